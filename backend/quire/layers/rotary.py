"""Rotary position embedding: frequencies of the supported scaling types, cosines and sines of positions.

A position's rotation must not depend on the request or the batch, because cached keys are already rotated and
may be shared. In `transformers`, two types of scaling depend on the length of the *sequence*:

- `dynamic` (NTK) changes the frequencies once a sequence outgrows max_position_embeddings, and again with
  every further token. Keys that were cached before keep their old rotation.
- `longrope` changes from its short to its long factors beyond original_max_position_embeddings.

Here the engine's `max_model_len` decides instead. If it is at most the length named above for the type, every
sequence gets the result of `transformers`. If it is larger, all sequences get the frequencies that
`transformers` uses for a sequence of `max_model_len` tokens. All positions are then consistent, but short
sequences differ from `transformers`.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quire.converters import INT32_MAX
from quire.layers.hf_config import HFConfig

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
MIN_NUMBER = 1e-6
"""Least theta, and least factor of a scaling, that a file may state. With smaller ones, angles may not be
finite."""
NO_ROPE = "none"
"""Rope type of layers without rotary embedding. `RopeConfig.from_hf` does not accept it."""
_ALIASES = {"su": "longrope", "mrope": "default"}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding as config.json states it; the same form for old and new files."""

    rope_type: str
    theta: float
    rotary_dim: int
    """Number of a head's dimensions that take part in the rotation; even. Some of them may have frequency 0,
    so that they do not turn."""
    max_position_embeddings: int
    original_max_position_embeddings: int
    """Context length before scaling, in tokens; the file's max_position_embeddings if it states none."""
    parameters: dict[str, Any]
    """Parameters of the rope type, under their names in config.json. For `proportional` there is also
    `num_turning`: the number of frequencies that are not 0."""
    mrope_section: tuple[int, ...] | None = None
    """M-RoPE: how many of the rotary_dim / 2 frequencies follow each of the three position axes; None: no
    M-RoPE."""
    mrope_interleaved: bool = False
    """M-RoPE: whether the axes alternate (t, h, w, t, h, w, ...) instead of following each other in
    sections."""
    frequency_factors: tuple[float, ...] | None = None
    """Divisors of the rotary_dim / 2 frequencies; None: there are none. GGUF files store llama3 scaling like
    this."""

    @classmethod
    def from_hf(cls, hf: HFConfig, head_dim: int) -> RopeConfig:
        """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Raises:
            CheckpointError: a value is missing, wrong or not supported.
        """
        rope, scaling = hf.get("rope_parameters", {}), hf.get("rope_scaling", {})
        for one in (rope, scaling):
            if not isinstance(one, dict) or any(isinstance(value, dict) for value in one.values()):
                raise hf.error(
                    "rope_parameters must be one object; a different rope per layer is not supported"
                )
        rope = rope or scaling
        stated, other = (
            first_stated(one.get("rope_type"), one.get("type"), "default") for one in (rope, scaling)
        )
        rope_type = _ALIASES.get(stated, stated)
        own = {**rope, "type": stated, "rope_type": stated}
        if scaling and {**own, **scaling, "type": other, "rope_type": other} != own:
            # transformers uses rope_scaling, and then a rope_theta other than that of rope_parameters.
            raise hf.error("rope_parameters and rope_scaling say different things: one of them must go")
        if rope_type not in ROPE_TYPES:
            raise hf.error(f"rope type {stated!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        max_position = hf.require_int("max_position_embeddings", most=INT32_MAX)
        length = "original_max_position_embeddings"
        original = first_stated(hf.get(length), rope.get(length))
        partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
        needed = {
            "linear": ("factor",),
            "dynamic": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
            "longrope": ("short_factor", "long_factor"),
        }.get(rope_type, ())
        for key in needed:
            if rope.get(key) is None:
                raise hf.error(f"rope type {rope_type} needs the key {key!r}")
        theta = first_stated(rope.get("rope_theta"), hf.get("rope_theta"), 10000.0)
        numbers = {key: rope.get(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        numbers[length] = original
        for key, value in {"rope_theta": theta, **numbers}.items():
            most = sys.float_info.max if key == "rope_theta" else INT32_MAX
            if value is not None and (type(value) not in (int, float) or not MIN_NUMBER <= value <= most):
                least = f"(at least {MIN_NUMBER})"
                raise hf.error(f"rope parameter {key} must be a positive number, got {value!r:.40} {least}")
        if type(partial) not in (int, float, type(None)):
            raise hf.error(f"partial_rotary_factor must be a number, got {partial!r:.40}")
        rotary_dim = int(head_dim * (1.0 if partial is None else partial))
        if rope_type == "proportional":
            rope = {**rope, "num_turning": rotary_dim // 2}
            rotary_dim = head_dim if 0 <= rotary_dim <= head_dim else 0
        if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
            raise hf.error(
                f"partial_rotary_factor={partial!r:.40} of heads of {head_dim}: an even number of dimensions "
                "rotates"
            )
        for key in ("short_factor", "long_factor", "frequency_factors"):
            if rope.get(key) is not None and len(rope[key]) != rotary_dim // 2:
                raise hf.error(f"{key} has {len(rope[key])} entries, the head needs {rotary_dim // 2}")
        section, divisors = rope.get("mrope_section"), rope.get("frequency_factors")
        if section and (len(section) != 3 or min(section) < 0 or sum(section) != rotary_dim // 2):
            raise hf.error(f"mrope_section {section!r:.80} must be three numbers that make {rotary_dim // 2}")
        return cls(
            rope_type=rope_type,
            theta=float(theta),
            rotary_dim=rotary_dim,
            max_position_embeddings=max_position,
            original_max_position_embeddings=int(original or max_position),
            parameters=dict(rope),
            mrope_section=tuple(section) if section else None,
            mrope_interleaved=bool(rope.get("mrope_interleaved", False)),
            frequency_factors=tuple(divisors) if divisors else None,
        )

    def without_rotation(self) -> RopeConfig:
        """Returns the config for layers in which nothing is rotated."""
        return replace(self, rope_type=NO_ROPE)

    @property
    def longest_model_len(self) -> int:
        """Number of positions that the scaling was made for.

        With `dynamic`, this is max_position_embeddings times the factor. With `yarn`, this is the original
        length times the factor. With all others, this is max_position_embeddings. It is never less than
        max_position_embeddings.
        """
        factor = self.parameters.get("factor") or 1.0
        if self.rope_type == "dynamic":
            return max(self.max_position_embeddings, int(self.max_position_embeddings * factor))
        if self.rope_type == "yarn":
            return max(self.max_position_embeddings, int(self.original_max_position_embeddings * factor))
        return self.max_position_embeddings


def first_stated(*values: Any) -> Any:
    """Returns the first value that is not None; None: there is none. 0 and false are not passed over, so that
    they can be refused later."""
    return next((value for value in values if value is not None), None)


def neighbours_apart(rows: torch.Tensor, head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Reorders rows of heads from pairs (2 i, 2 i + 1) to the pairs (i, i + rotary_dim / 2) of `ops.rope`.
    Rows that do not rotate keep their places."""
    turned, rest = rows.unflatten(0, (-1, head_dim)).tensor_split([rotary_dim], 1)
    turned = turned.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([turned, rest], 1).flatten(0, 1)


def rope_frequencies(rope: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    """Returns the frequencies, and the factor of cos and sin.

    Args:
        rope: type and parameters.
        max_model_len: longest sequence served, in tokens. The frequencies of `dynamic` and `longrope` depend
            on it; see the module's docstring.

    Returns:
        float32 [rotary_dim / 2], radians per position; and the attention factor.

    Raises:
        ValueError: the parameters give frequencies that are not finite, or an attention factor that is not
            positive and finite.
        ArithmeticError: a formula has no value for the parameters.
    """
    if rope.rope_type == "dynamic" and max_model_len > rope.max_position_embeddings:
        return _inverse(rope.rotary_dim, _dynamic_theta(rope, max_model_len)), 1.0
    frequencies, factor = _inverse(rope.rotary_dim, rope.theta), 1.0
    if rope.rope_type == NO_ROPE:
        return torch.zeros_like(frequencies), 1.0
    if rope.rope_type == "linear":
        frequencies = frequencies / rope.parameters["factor"]
    elif rope.rope_type == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.rope_type == "yarn":
        frequencies, factor = _yarn(rope, frequencies)
    elif rope.rope_type == "proportional":
        frequencies[rope.parameters["num_turning"] :] = 0
        frequencies = frequencies / (rope.parameters.get("factor") or 1.0)
    elif rope.rope_type == "longrope":
        frequencies, factor = _longrope(rope, max_model_len)
    if rope.frequency_factors is not None:
        frequencies = frequencies / torch.tensor(rope.frequency_factors, dtype=torch.float32)
    if not (frequencies.isfinite().all() and 0 < factor < math.inf):
        raise ValueError("the rope parameters make frequencies, or an attention factor, that are not numbers")
    return frequencies, factor


def _exponents(rotary_dim: int) -> torch.Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim


def _inverse(rotary_dim: int, theta: float) -> torch.Tensor:
    return 1.0 / theta ** _exponents(rotary_dim)


def _dynamic_theta(rope: RopeConfig, length: int) -> float:
    factor, dim = rope.parameters["factor"], rope.rotary_dim
    growth: float = factor * length / rope.max_position_embeddings - (factor - 1)
    return float(rope.theta * growth ** (dim / (dim - 2)))


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    factor = rope.parameters["factor"]
    low, high = rope.parameters["low_freq_factor"], rope.parameters["high_freq_factor"]
    # Turns that a frequency makes over the original context: many (above `high`) stay, few (below `low`)
    # are slowed by the factor, those between are blended.
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / factor + blend * frequencies


def _yarn(rope: RopeConfig, frequencies: torch.Tensor) -> tuple[torch.Tensor, float]:
    parameters, dim = rope.parameters, rope.rotary_dim
    original = rope.original_max_position_embeddings
    factor = parameters.get("factor") or rope.max_position_embeddings / original
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if mscale and all_dim:
            attention_factor = yarn_scale(factor, mscale) / yarn_scale(factor, all_dim)
        else:
            attention_factor = yarn_scale(factor, 1.0)

    def dimension(turns: float) -> float:
        """Returns the (fractional) index of the frequency that makes `turns` turns over the original
        context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = dimension(parameters.get("beta_fast") or 32)
    high = dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    slowed = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / factor * slowed + frequencies * (1 - slowed), float(attention_factor)


def yarn_scale(factor: float, mscale: float) -> float:
    """Returns the factor by which YaRN multiplies queries and keys (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: RopeConfig, max_model_len: int) -> tuple[torch.Tensor, float]:
    parameters, original = rope.parameters, rope.original_max_position_embeddings
    factor = parameters.get("factor") or rope.max_position_embeddings / original
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    divisors = parameters["long_factor" if max_model_len > original else "short_factor"]
    powers = rope.theta ** _exponents(rope.rotary_dim)
    return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * powers), float(attention_factor)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions, shared by the layers with the same rope.

    They are looked up in a table (128 k positions of 128 dimensions take 64 MiB). On a CPU it grows with the
    largest position used; on a GPU its first use makes it for all `max_model_len` positions. Computing them
    in each step is little work, but torch uses a second thread pool for it. Its threads then spin on the
    cores that the kernels need: 5 to 9 % of a decode step of 40 ms on two cores.

    Args:
        rope: type and parameters.
        max_model_len: longest sequence served, in tokens.
    """

    frequencies: torch.Tensor
    table: torch.Tensor
    axes: torch.Tensor | None

    def __init__(self, rope: RopeConfig, max_model_len: int, device: torch.device) -> None:
        super().__init__()
        self.max_model_len = max_model_len
        frequencies, self.attention_factor = rope_frequencies(rope, max_model_len)
        self.register_buffer("frequencies", frequencies.to(device), persistent=False)
        # [positions][rotary_dim]: cosines, then sines.
        self.register_buffer(
            "table", frequencies.new_empty((0, rope.rotary_dim), device=device), persistent=False
        )
        axes = _mrope_axes(rope)
        self.register_buffer("axes", None if axes is None else axes.to(device), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and sin, float32 [num_tokens, rotary_dim / 2] each.

        Args:
            positions: int64 [num_tokens], or [3, num_tokens] (time, height, width) for M-RoPE.
        """
        cos, sin = self.rotations(positions).chunk(2, dim=-1)
        return cos.contiguous(), sin.contiguous()

    def rotations(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns float32 [num_tokens, rotary_dim]: cosines, then sines. `positions` as in `forward`."""
        rows = self.table_to(self._needed(positions))[positions]
        if positions.ndim == 2:
            assert self.axes is not None, "positions with three axes need an mrope_section"
            rows = rows.gather(0, self.axes.repeat(2).expand(1, *rows.shape[1:]))[0]
        return rows

    def table_to(self, num_positions: int) -> torch.Tensor:
        """Returns the table of rotations of positions 0, 1, ..., with at least `num_positions` rows."""
        if num_positions > self.table.shape[0]:
            self._grow(num_positions)
        return self.table

    def identity(self) -> list[Any]:
        """Returns the numbers that decide a position's rotation, as JSON values."""
        axes = [] if self.axes is None else self.axes.tolist()
        return [self.frequencies.tolist(), self.attention_factor, axes]

    def _needed(self, positions: torch.Tensor) -> int:
        """Returns how many rows of the table these positions may need."""
        if positions.device.type != "cpu":
            # To look for the highest one would wait for all that runs there.
            return self.max_model_len
        return 1 + int(positions.max()) if positions.numel() else 0

    def _grow(self, num_positions: int) -> None:
        num_positions = max(2 * self.table.shape[0], num_positions, 1024)
        positions = torch.arange(num_positions, device=self.frequencies.device)
        angles = positions.unsqueeze(-1).float() * self.frequencies
        self.table = torch.cat([angles.cos(), angles.sin()], -1) * self.attention_factor


def _mrope_axes(rope: RopeConfig) -> torch.Tensor | None:
    """Returns int64 [rotary_dim / 2]: the position axis that each frequency follows; None: no M-RoPE."""
    if rope.mrope_section is None:
        return None
    sections = rope.mrope_section
    if not rope.mrope_interleaved:
        return torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(sections))
    axes = torch.zeros(rope.rotary_dim // 2, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes
