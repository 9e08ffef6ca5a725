"""Routing: how a layer's router chooses experts and computes their shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SIGMOID_EPSILON = 1e-20
"""Default of `Routing.epsilon`."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Rules by which `ops.route` chooses a token's experts from the router's logits, and computes their
    shares.

    With several groups, a token's experts are chosen from its best groups only (DeepSeek-AI, 2024, arXiv
    2405.04434 and 2412.19437). A group's score is the sum of the scores of its `group_best` best experts. All
    groups have the same number of experts, at least `group_best`. A token's groups together have at least
    `num_chosen` experts.
    """

    num_chosen: int
    """Number of experts that a token goes to, without the shared expert."""
    renormalizes: bool
    """Whether a token's shares are divided by their sum."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Function that computes scores from logits."""
    least_sum: float = 0.0
    """Least divisor of renormalised softmax shares, used if their sum is smaller."""
    epsilon: float = SIGMOID_EPSILON
    """Number added to the sum of a token's sigmoid shares before the shares are divided by that sum."""
    scale: float = 1.0
    """Factor of the shares, applied last. It does not apply to the shared expert."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_best: int = 1
    shared: Literal["whole", "gated"] | None = None
    """Kind of the shared expert, which comes after the other experts and computes every token. "whole": its
    share is 1. "gated": its share is the sigmoid of an additional logit. None: there is none, or the model
    computes it apart."""

    @property
    def num_routes(self) -> int:
        """Number of experts that a token goes to, the shared expert included."""
        return self.num_chosen + (self.shared is not None)

    @property
    def num_gates(self) -> int:
        """Number of logits after those of the experts."""
        return int(self.shared == "gated")
