"""The gated delta rule and its convolution against float64, token by token, for rows of many kinds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import pytest
import torch

from quire_kernels import ops
from quire_kernels.metadata import AttentionMetadata
from tests.kernels.common import every_implementation, forced

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RULES = every_implementation("gated_delta_rule", DTYPES, key_dim=64, value_dim=64)
CONVOLUTIONS = every_implementation("causal_conv", DTYPES, num_channels=64)
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
NUM_BLOCKS = 7
ROWS = [
    # (new tokens, tokens before them) of each sequence
    [(1, 0)],
    [(1, 5)],
    [(33, 0)],
    [(1, 1), (2, 0), (3, 4), (1, 0), (17, 1)],
    # The kernels prepare 128 tokens of a batch at a time.
    [(100, 2), (1, 3), (27, 0), (70, 1), (131, 0)],
]
SHAPES = [(2, 4, 32, 64), (1, 1, 128, 16), (2, 2, 16, 48), (3, 6, 64, 128)]
"""(key heads, heads, size of a key, size of a value)"""


def batch(rows: list[tuple[int, int]], device: str) -> AttentionMetadata:
    """Metadata of sequences whose states lie in blocks from the last one down."""
    blocks = [[NUM_BLOCKS - 1 - index] for index in range(len(rows))]
    lens = [count for count, _ in rows]
    return AttentionMetadata.build(lens, [sum(row) for row in rows], blocks, 256, device)


@dataclass
class Case:
    """Operands of `gated_delta_rule`, and of the convolution before it."""

    mixed: torch.Tensor
    weight: torch.Tensor
    gates: torch.Tensor
    log_decay: torch.Tensor
    step_bias: torch.Tensor
    memory: torch.Tensor
    """States of all blocks as a pool has them: with other bytes between; NaN where nobody wrote."""
    shape: tuple[int, int, int, int]

    @property
    def states(self) -> torch.Tensor:
        _, heads, key_dim, value_dim = self.shape
        return self.memory[:, 16:-16].view(NUM_BLOCKS, heads, key_dim, value_dim)

    def rule(self, meta: AttentionMetadata, tokens: slice = slice(None)) -> torch.Tensor:
        """Output for some of the tokens; changes the states."""
        key_heads, heads, key_dim, value_dim = self.shape
        sizes = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
        query, key, value = self.mixed[tokens].split(sizes, 1)
        a, b = self.gates[tokens].chunk(2, 1)
        return ops.gated_delta_rule(
            query.unflatten(1, (key_heads, key_dim)),
            key.unflatten(1, (key_heads, key_dim)),
            value.unflatten(1, (heads, value_dim)),
            *(a, b, self.log_decay, self.step_bias, self.states, meta),
        )

    def expected(self, rows: list[tuple[int, int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(output, each row's state after it), float64."""
        key_heads, heads, key_dim, value_dim = self.shape
        sizes = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
        query, key, value = self.mixed.double().cpu().split(sizes, 1)
        a, b = self.gates.double().cpu().chunk(2, 1)
        speed, bias = self.log_decay.double().cpu().exp(), self.step_bias.double().cpu()
        outputs, states, token = [], [], 0
        query, key = (
            one.unflatten(1, (key_heads, key_dim)).repeat_interleave(heads // key_heads, 1)
            for one in (query, key)
        )
        query, key, value = (
            *(one / one.norm(dim=-1, keepdim=True) for one in (query, key)),
            value.unflatten(1, (heads, value_dim)),
        )
        decays = (-speed * torch.log1p((a + bias).exp())).exp()
        for index, (count, before) in enumerate(rows):
            state = torch.zeros(heads, key_dim, value_dim, dtype=torch.float64)
            if before:
                state += self.states[NUM_BLOCKS - 1 - index].double().cpu()
            for _ in range(count):
                state = state * decays[token, :, None, None]
                k, q = key[token].unsqueeze(2), query[token].unsqueeze(2)
                delta = (value[token] - (k * state).sum(1)) * b[token].sigmoid()[:, None]
                state = state + k * delta.unsqueeze(1)
                outputs.append((q * state).sum(1) * key_dim**-0.5)
                token += 1
            states.append(state)
        return torch.stack(outputs), states


def make_case(
    rows: list[tuple[int, int]], shape: tuple[int, int, int, int], dtype: torch.dtype, device: str
) -> Case:
    generator = torch.Generator().manual_seed(len(rows) + sum(shape))

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device)

    key_heads, heads, key_dim, value_dim = shape
    num_tokens, channels = sum(count for count, _ in rows), 2 * key_heads * key_dim + heads * value_dim
    memory = torch.full((NUM_BLOCKS, 32 + heads * key_dim * value_dim), torch.nan, device=device)
    for index, (_, before) in enumerate(rows):
        if before:
            memory[NUM_BLOCKS - 1 - index] = draw(memory.shape[1])
    return Case(
        # Rows of a wider matrix, as the projections' output has them.
        draw(num_tokens, channels + 7)[:, :channels].to(dtype),
        draw(4, channels).to(dtype),
        draw(num_tokens, 2 * heads).to(dtype),
        draw(heads),
        draw(heads),
        memory,
        shape,
    )


class CaseWithStates(Protocol):
    """Operands of an operator with states."""

    memory: torch.Tensor

    @property
    def states(self) -> torch.Tensor:
        """States of all blocks, a part of `memory`."""

    def expected(self, rows: list[tuple[int, int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(output, each row's state after it), float64."""


def check_rows(
    case: CaseWithStates,
    rows: list[tuple[int, int]],
    dtype: torch.dtype,
    compute: Callable[[AttentionMetadata], torch.Tensor],
) -> None:
    """Output and states are those of float64, and nothing else was written."""
    output, states = case.expected(rows)
    between = case.memory[:, :16].clone(), case.memory[:, -16:].clone()
    got = compute(batch(rows, str(case.memory.device)))
    assert got.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got.double().cpu(), output, atol=tolerance, rtol=tolerance, msg=str(rows))
    for index, state in enumerate(states):
        own = case.states[NUM_BLOCKS - 1 - index].double().cpu()
        torch.testing.assert_close(own, state, atol=5e-5, rtol=1e-5)
    assert torch.equal(case.memory[:, :16].nan_to_num(), between[0].nan_to_num())
    assert torch.equal(case.memory[:, -16:].nan_to_num(), between[1].nan_to_num())
    assert bool(case.memory[: NUM_BLOCKS - len(rows)].isnan().all())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "device", "dtype"), RULES)
def test_each_row_goes_on_from_its_state(
    name: str, device: str, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    for rows in ROWS:
        case = make_case(rows, shape, dtype, device)
        with forced("gated_delta_rule", name):
            check_rows(case, rows, dtype, case.rule)


@pytest.mark.parametrize(("name", "device", "dtype"), RULES)
def test_a_state_may_decay_to_nothing(name: str, device: str, dtype: torch.dtype) -> None:
    """Decays from almost 1 to exactly 0 in one sequence."""
    rows = [(40, 3)]
    case = make_case(rows, (1, 2, 32, 48), dtype, device)
    case = replace(case, log_decay=torch.full_like(case.log_decay, 4), gates=case.gates * 6)
    speed = case.log_decay[0].exp() * torch.log1p((case.gates[:, :2].float() + case.step_bias).exp())
    assert speed.max() > 200 and speed.min() < 0.01
    output, states = case.expected(rows)
    with forced("gated_delta_rule", name):
        got = case.rule(batch(rows, device))
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got.double().cpu(), output, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(case.states[NUM_BLOCKS - 1].double().cpu(), states[0], atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "device", "dtype"), CONVOLUTIONS)
@pytest.mark.parametrize("num_taps", [2, 4])
def test_a_convolution_goes_on_from_its_last_inputs(
    name: str, device: str, dtype: torch.dtype, num_taps: int
) -> None:
    for rows in ROWS:
        case = make_case(rows, (1, 1, 32, 80), dtype, device)
        x, weight = case.mixed, case.weight[:num_taps].contiguous()
        states = torch.full((NUM_BLOCKS, num_taps - 1, x.shape[1]), torch.nan, dtype=dtype, device=device)
        for index, (_, before) in enumerate(rows):
            if before:
                states[NUM_BLOCKS - 1 - index] = torch.randn(states.shape[1:]).to(states)
        expected, kept = [], []
        own_states = states.double()
        for index, own in enumerate(x.double().split([count for count, _ in rows])):
            state = own_states[NUM_BLOCKS - 1 - index]
            inputs = torch.cat([state if rows[index][1] else torch.zeros_like(state), own])
            taps = torch.stack([inputs[j : j + len(own)] for j in range(num_taps)])
            total = (taps * weight.double()[:, None]).sum(0)
            expected.append(total * total.sigmoid())
            kept.append(inputs[len(own) :])
        with forced("causal_conv", name):
            got = ops.causal_conv(x, weight, states, batch(rows, device))
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(got.double(), torch.cat(expected), atol=tolerance, rtol=tolerance)
        for index, state in enumerate(kept):
            assert torch.equal(states[NUM_BLOCKS - 1 - index].double(), state)
        assert bool(states[: NUM_BLOCKS - len(rows)].isnan().all())


NATIVE = [one for one in RULES if one.values[0] != "reference"]


@pytest.mark.parametrize(("name", "device", "dtype"), NATIVE)
def test_a_token_does_not_depend_on_its_chunk(name: str, device: str, dtype: torch.dtype) -> None:
    """Output and state, to the last bit: whole, in pieces, token by token, and beside others."""
    count, shape = 150, (2, 4, 32, 80)
    whole = make_case([(count, 0)], shape, dtype, device)
    with forced("gated_delta_rule", name):
        expected = whole.rule(batch([(count, 0)], device))
        for cuts in ([75], [1, 2], [7, 55], [128], list(range(1, count))):
            case = replace(whole, memory=torch.full_like(whole.memory, torch.nan))
            outputs = [
                case.rule(batch([(stop - start, start)], device), slice(start, stop))
                for start, stop in itertools.pairwise([0, *cuts, count])
            ]
            assert torch.equal(torch.cat(outputs), expected), cuts
            assert torch.equal(case.states[NUM_BLOCKS - 1], whole.states[NUM_BLOCKS - 1])
        twice = replace(
            whole,
            mixed=torch.cat([whole.mixed, whole.mixed]),
            gates=torch.cat([whole.gates, whole.gates]),
            memory=torch.full_like(whole.memory, torch.nan),
        )
        assert torch.equal(twice.rule(batch([(count, 0)] * 2, device)), torch.cat([expected, expected]))
