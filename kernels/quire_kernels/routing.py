"""Routing: how a layer's router chooses experts and weighs what they give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SIGMOID_EPSILON = 1e-20
"""Number added to the sum of a token's sigmoid shares before the shares are divided by that sum."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Rules by which `ops.route` chooses a token's experts from the router's logits, and computes their
    shares.

    With more than one group (DeepSeek-AI, 2024, arXiv 2405.04434 and 2412.19437) a token's experts are chosen
    from its best groups alone. A group is as good as the sum of the scores of its `group_best` best experts.
    The groups are equal in size, at least `group_best`, and those of a token have `num_chosen` experts or
    more.
    """

    num_chosen: int
    """Experts of a token."""
    renormalizes: bool
    """Whether a token's shares are divided by their sum, with SIGMOID_EPSILON where they are sigmoids."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Function that makes scores of the logits."""
    least_sum: float = 0.0
    """Least divisor of renormalised softmax shares: it replaces their sum where that is less."""
    scale: float = 1.0
    """Factor of the shares, applied last, and not to the share of the shared expert."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_best: int = 1
    shared: Literal["whole", "gated"] | None = None
    """Whether behind the experts there is one that computes every token, with a share of 1 or, "gated", the
    sigmoid of one more logit."""

    @property
    def num_routes(self) -> int:
        """Experts of a token, with the shared one."""
        return self.num_chosen + (self.shared is not None)

    @property
    def num_gates(self) -> int:
        """Logits behind those of the experts."""
        return int(self.shared == "gated")
