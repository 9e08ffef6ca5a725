"""Mamba-2 against float64, token by token, for rows of many kinds; the convolution's bias and activation."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from quire_kernels import ops
from quire_kernels.metadata import AttentionMetadata
from quire_kernels.state_space import StateSpace
from tests.kernels.common import every_implementation, forced
from tests.kernels.test_gated_delta import (
    CONVOLUTIONS,
    DTYPES,
    NUM_BLOCKS,
    ROWS,
    TOLERANCES,
    batch,
    check_rows,
)

IMPLEMENTATIONS = every_implementation("mamba2", DTYPES, head_dim=64, state_dim=64)
NATIVE = [one for one in IMPLEMENTATIONS if one.values[0] != "reference"]
SHAPES = [(4, 64, 2, 32), (1, 16, 1, 128), (2, 48, 1, 16), (6, 80, 3, 64)]
"""(heads, size of a head, groups, size of a state)"""


@dataclass
class Case:
    """Operands of `mamba2`."""

    mixed: torch.Tensor
    """[num_tokens, values + b + c + steps + gates], a part of wider rows."""
    space: StateSpace
    memory: torch.Tensor
    """States of all blocks as a pool has them: with other bytes between; NaN where nobody wrote."""
    shape: tuple[int, int, int, int]

    @property
    def states(self) -> torch.Tensor:
        heads, head_dim, _, state_dim = self.shape
        return self.memory[:, 16:-16].view(NUM_BLOCKS, heads, state_dim, head_dim)

    def operands(self, tokens: slice = slice(None)) -> tuple[torch.Tensor, ...]:
        """(x, b, c, step, gate) of some of the tokens."""
        heads, head_dim, groups, state_dim = self.shape
        inner, group = heads * head_dim, groups * state_dim
        x, b, c, step, gate = self.mixed[tokens].split([inner, group, group, heads, inner], 1)
        b, c = (one.unflatten(1, (groups, state_dim)) for one in (b, c))
        return x.unflatten(1, (heads, head_dim)), b, c, step, gate

    def compute(self, meta: AttentionMetadata, tokens: slice = slice(None)) -> torch.Tensor:
        """Output for some of the tokens; changes the states."""
        x, b, c, step, gate = self.operands(tokens)
        return ops.mamba2(x, b, c, step, gate, self.space, self.states, meta)

    def expected(self, rows: list[tuple[int, int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(output, each row's state after it), float64."""
        heads, head_dim, groups, state_dim = self.shape
        x, b, c, step, gate = (one.double().cpu() for one in self.operands())
        b, c = (one.repeat_interleave(heads // groups, 1) for one in (b, c))
        log_decay, bias, skip, norm = (one.double().cpu() for one in self.space[:4])
        steps = torch.log1p((step + bias).exp()).clamp(*self.space.step_limit)
        outputs, states, token = [], [], 0
        for index, (count, before) in enumerate(rows):
            state = torch.zeros(heads, state_dim, head_dim, dtype=torch.float64)
            if before:
                state += self.states[NUM_BLOCKS - 1 - index].double().cpu()
            for _ in range(count):
                decay = (-log_decay.exp() * steps[token]).exp()
                state = state * decay[:, None, None]
                state += b[token].unsqueeze(2) * (x[token] * steps[token][:, None]).unsqueeze(1)
                outputs.append((c[token].unsqueeze(2) * state).sum(1) + skip[:, None] * x[token])
                token += 1
            states.append(state)
        gated = torch.stack(outputs).flatten(1) * gate * gate.sigmoid()
        groups_of = gated.unflatten(1, (groups, -1))
        scale = (groups_of.square().mean(-1, keepdim=True) + self.space.eps).rsqrt()
        return (groups_of * scale).flatten(1) * norm, states


def make_case(
    rows: list[tuple[int, int]],
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
    step_limit: tuple[float, float] = (0.0, float("inf")),
) -> Case:
    generator = torch.Generator().manual_seed(len(rows) + sum(shape))

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device)

    heads, head_dim, groups, state_dim = shape
    num_tokens, width = sum(count for count, _ in rows), 2 * heads * head_dim + 2 * groups * state_dim + heads
    memory = torch.full((NUM_BLOCKS, 32 + heads * state_dim * head_dim), torch.nan, device=device)
    for index, (_, before) in enumerate(rows):
        if before:
            memory[NUM_BLOCKS - 1 - index] = draw(memory.shape[1])
    space = StateSpace(draw(heads), draw(heads), draw(heads), draw(heads * head_dim), 1e-5, step_limit)
    # Rows of a wider matrix, as the projections' output has them.
    return Case(draw(num_tokens, width + 7)[:, :width].to(dtype), space, memory, shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "device", "dtype"), IMPLEMENTATIONS)
def test_each_row_goes_on_from_its_state(
    name: str, device: str, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    for rows in ROWS:
        case = make_case(rows, shape, dtype, device)
        with forced("mamba2", name):
            check_rows(case, rows, dtype, case.compute)


@pytest.mark.parametrize(("name", "device", "dtype"), IMPLEMENTATIONS)
def test_steps_have_limits(name: str, device: str, dtype: torch.dtype) -> None:
    rows, limit = [(9, 3)], (0.6, 1.1)
    case = make_case(rows, (4, 64, 2, 32), dtype, device, limit)
    (output, _), free = case.expected(rows), replace(case, space=case.space._replace(step_limit=(0.0, 1e9)))
    assert (free.expected(rows)[0] - output).abs().max() > 0.1
    with forced("mamba2", name):
        got = case.compute(batch(rows, device))
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got.double().cpu(), output, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("name", "device", "dtype"), NATIVE)
def test_a_token_does_not_depend_on_its_chunk(name: str, device: str, dtype: torch.dtype) -> None:
    """Output and state, to the last bit: whole, in halves, token by token, and beside others."""
    count, shape = 24, (4, 80, 2, 32)
    whole = make_case([(count, 0)], shape, dtype, device)
    with forced("mamba2", name):
        expected = whole.compute(batch([(count, 0)], device))
        for cuts in ([12], [1, 2], list(range(1, count))):
            case = replace(whole, memory=torch.full_like(whole.memory, torch.nan))
            outputs = [
                case.compute(batch([(stop - start, start)], device), slice(start, stop))
                for start, stop in itertools.pairwise([0, *cuts, count])
            ]
            assert torch.equal(torch.cat(outputs), expected), cuts
            assert torch.equal(case.states[NUM_BLOCKS - 1], whole.states[NUM_BLOCKS - 1])
        mixed, memory = torch.cat([whole.mixed, whole.mixed]), torch.full_like(whole.memory, torch.nan)
        twice = replace(whole, mixed=mixed, memory=memory)
        assert torch.equal(twice.compute(batch([(count, 0)] * 2, device)), torch.cat([expected, expected]))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("name", "device", "dtype"), CONVOLUTIONS)
def test_a_convolution_has_a_bias_and_an_activation_as_asked(
    name: str, device: str, dtype: torch.dtype, activation: str | None, has_bias: bool
) -> None:
    """Token by token, so that all but the first go on from kept inputs."""
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (
        torch.randn(size, generator=generator).to(device, dtype) for size in ((9, 48), (3, 48), (48,))
    )
    padded = torch.cat([torch.zeros_like(x[:2]), x]).double()
    sums = sum(padded[tap : tap + len(x)] * weight[tap].double() for tap in range(3))
    sums = sums + bias.double() if has_bias else sums
    expected = sums if activation is None else sums * sums.sigmoid()
    states = torch.full((NUM_BLOCKS, 2, 48), torch.nan, dtype=dtype, device=device)
    with forced("causal_conv", name):
        got = [
            ops.causal_conv(
                *(x[token : token + 1], weight, states, batch([(1, token)], device)),
                bias=bias if has_bias else None,
                activation=activation,
            )
            for token in range(len(x))
        ]
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(torch.cat(got).double(), expected, atol=tolerance, rtol=tolerance)
