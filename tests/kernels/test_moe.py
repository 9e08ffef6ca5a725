"""The experts of a layer as one operator, beside a loop over them, and the choice of experts."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_kernels import ops, registry
from quire_kernels.cpu.compiler import supported_isas
from quire_kernels.cpu.linear import NativeLinear
from quire_kernels.cpu.moe import NativeExperts
from quire_kernels.reference.moe import LoopedExperts
from quire_kernels.routing import Routing
from quire_kernels.weights import PackedExperts, PackedLinear
from tests.kernels.common import every_implementation, forced, gated
from tests.kernels.test_grouped_linear import make_weight

NUM_EXPERTS, HIDDEN, INNER = 9, 256, 320
KINDS = [None, "int8", "int4", "w8a8", "w4a8", "Q4_K", "IQ4_NL"]
ISAS = supported_isas()
Experts = tuple[list[PackedLinear], list[PackedLinear]]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None, kind: str | None, activation: str | None, seed: int
) -> PackedLinear:
    """One layer, of any kind of weights that are computed; those of files have numbers of their own."""
    if kind in ("Q4_K", "IQ4_NL"):
        is_short = kind == "Q4_K" and weight.shape[1] % 256
        grouped = make_weight("Q4_1" if is_short else kind, *weight.shape, seed)
        return ops.pack_linear(grouped, bias, activation=activation, dtype=weight.dtype)
    return ops.pack_linear(weight, bias, activation=activation, quantization=kind)


def make_experts(
    isa: str,
    dtype: torch.dtype,
    kind: str | None = None,
    activation: str = "silu",
    *,
    num_experts: int = NUM_EXPERTS,
    hidden: int = HIDDEN,
    inner: int = INNER,
    bias: bool = False,
) -> Experts:
    gate_up, down = [], []
    with registry.forced({"linear": isa, "grouped_linear": isa}):
        for expert in range(num_experts):
            for made, rows, columns in ((gate_up, 2 * inner, hidden), (down, hidden, inner)):
                weight = (draw(rows, columns, seed=expert) * columns**-0.5).to(dtype)
                own = draw(rows, seed=expert).to(dtype) if bias else None
                made.append(pack(weight, own, kind, activation if made is gate_up else None, expert))
    return gate_up, down


def joined(experts: Experts, dtype: torch.dtype) -> PackedExperts:
    packed = ops.pack_experts(*experts, device_type="cpu", dtype=dtype)
    assert isinstance(packed, NativeExperts)
    return packed


def make_routes(
    num_tokens: int, among: Sequence[int], num_chosen: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens choose some of a few experts; shares do not sum to 1."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(num_tokens, len(among), generator=generator).argsort(1)[:, :num_chosen]
    return torch.tensor(among)[order], torch.rand(num_tokens, num_chosen, generator=generator)


def by_token(experts: Experts, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """float32: each token with each of its experts alone, in the order of these, added as the kernels do."""
    out = torch.zeros(x.shape[0], x.shape[1])
    for token, row in enumerate(x):
        for expert, share in sorted(zip(chosen[token].tolist(), shares[token], strict=True)):
            one = experts[1][expert](experts[0][expert](row[None]), torch.float32)[0]
            out[token] = (one.double() * share.double() + out[token].double()).float()
    return out


@pytest.mark.row("E14")
@pytest.mark.row("A12", clauses=("batch",))
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_that_of_its_experts_alone(isa: str, kind: str | None, dtype: torch.dtype) -> None:
    """To the last bit, whoever else is there, however many rows an expert has; a token of NaN stays alone."""
    experts = make_experts(isa, dtype, kind)
    moe = joined(experts, dtype)
    for num_tokens, among, num_chosen in ((1, range(9), 4), (2, (7, 8), 1), (90, range(9), 3), (40, (2,), 1)):
        x = draw(num_tokens, HIDDEN, seed=1).to(dtype)
        chosen, shares = make_routes(num_tokens, list(among), num_chosen)
        x[num_tokens // 2, 5] = torch.nan if num_tokens > 2 else 0
        out = moe(x, chosen, shares)
        assert out.dtype == dtype and torch.equal(
            out.nan_to_num(), by_token(experts, x, chosen, shares).to(dtype).nan_to_num()
        )
        assert out.isnan().any(1).sum() == (num_tokens > 2)


@pytest.mark.row("E14", clauses=("equal",))
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_loop_over_experts(isa: str, seed: int) -> None:
    """Random shapes, kinds and activations; 1 token and 1 000, of which some experts get none, or one all."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=generator))]

    dtype, kind = pick(torch.float32, torch.bfloat16), pick(*KINDS)
    multiple = 64 if kind == "w8a8" else 32
    num_experts, activation = pick(1, 5, 40), pick("silu", "gelu_tanh", "clamped_swiglu")
    experts = make_experts(
        isa,
        dtype,
        kind,
        activation,
        num_experts=num_experts,
        hidden=multiple * pick(1, 2, 5),
        inner=multiple * pick(1, 3),
        bias=pick(True, False),
    )
    moe, loop = joined(experts, dtype), LoopedExperts(*experts)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for num_tokens in (1, pick(2, 17, 65), 1000):
        for among in (range(num_experts), range(num_experts - 1, -1, -3), (num_experts // 2,)):
            x = draw(num_tokens, experts[1][0].out_features, seed=seed).to(dtype)
            routes = make_routes(num_tokens, list(among), min(len(among), pick(1, 4)), seed)
            expected = loop(x, *routes)
            torch.testing.assert_close(moe(x, *routes), expected, atol=tolerance, rtol=tolerance)
            assert expected.abs().max() > 0.01
    assert moe(x[:0], *(one[:0] for one in routes)).shape == (0, x.shape[1])


@pytest.mark.row("E8")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [None, "int8", "w8a8", "w4a8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_shared_expert_may_be_of_another_size(isa: str, kind: str | None, dtype: torch.dtype) -> None:
    """It is the last, and has every token: smaller and larger than the others, which may have none."""
    for inner in (64, 5 * INNER):
        own = make_experts(isa, dtype, kind, num_experts=5)
        experts: Any = tuple(
            [*one, *more]
            for one, more in zip(own, make_experts(isa, dtype, kind, num_experts=1, inner=inner), strict=True)
        )
        for num_tokens in (1, 3, 90):
            x = draw(num_tokens, HIDDEN, seed=1).to(dtype)
            chosen, shares = make_routes(num_tokens, [0, 3, 4], 2)
            chosen = torch.cat((chosen, torch.full((num_tokens, 1), 5)), 1)
            shares = torch.cat((shares, draw(num_tokens, 1).sigmoid()), 1)
            expected = by_token(experts, x, chosen, shares).to(dtype)
            assert torch.equal(joined(experts, dtype)(x, chosen, shares), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_experts_one_after_the_other(isa: str, dtype: torch.dtype) -> None:
    """The bits of all at once, if each group adds to the sums of those before it. Of the last one, an expert
    has taken the weights of another."""
    experts = make_experts(isa, dtype)
    for moe in (joined(experts, dtype), LoopedExperts(*experts)):
        moe.replace(8, experts[0][2], experts[1][2])
        for num_tokens in (1, 3, 90):
            x = draw(num_tokens, HIDDEN, seed=1).to(dtype)
            chosen, shares = make_routes(num_tokens, range(9), 4)
            whole, sums = moe(x, chosen, shares), torch.zeros(num_tokens, HIDDEN)
            for first, end in ((0, 1), (1, 5), (5, 9)):
                part = chosen.masked_fill((chosen < first) | (chosen >= end), -1)
                if (part >= 0).any():
                    out = moe(x, part, shares, sums)
            assert torch.equal(out, whole) and torch.equal(sums.to(dtype), whole)
        only = torch.tensor([[2]]), torch.ones(1, 1)
        assert torch.equal(moe(x[:1], torch.tensor([[8]]), only[1]), moe(x[:1], *only))


@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
def test_the_loop_is_the_definition(activation: str) -> None:
    weights = [(draw(2 * 48, 32, seed=expert) / 6, draw(32, 48, seed=expert) / 7) for expert in range(4)]
    bias, down_bias = draw(96), draw(32)
    with forced("linear", "reference"):
        loop = LoopedExperts(
            [ops.pack_linear(weight, bias, activation=activation) for weight, _ in weights],
            [ops.pack_linear(weight, down_bias) for _, weight in weights],
        )
    x = draw(20, 32, seed=9)
    chosen, shares = make_routes(20, [0, 1, 3], 2)
    expected = torch.zeros(20, 32, dtype=torch.float64)
    for token in range(20):
        for expert, share in zip(chosen[token].tolist(), shares[token].double(), strict=True):
            gate, up = (x[token].double() @ weights[expert][0].double().T + bias.double()).chunk(2)
            inner = gated(activation, gate, up)
            expected[token] += share * (inner @ weights[expert][1].double().T + down_bias.double())
    torch.testing.assert_close(loop(x, chosen, shares).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.row("E14")
@pytest.mark.parametrize(("name", "device"), every_implementation("route"))
@pytest.mark.parametrize("renormalizes", [True, False])
def test_routes_are_the_largest_logits(name: str, device: str, renormalizes: bool) -> None:
    for num_experts, num_chosen in ((1, 1), (8, 2), (128, 8), (33, 33)):
        logits = draw(70, num_experts, seed=num_experts) * 3
        logits[3] = torch.nan
        with forced("route", name):
            experts, shares = ops.route(
                logits.to(device), Routing(num_chosen=num_chosen, renormalizes=renormalizes)
            )
        experts, shares = experts.cpu(), shares.cpu()
        assert all(
            len(set(row)) == num_chosen and set(row) <= set(range(num_experts)) for row in experts.tolist()
        )
        assert shares[3].isnan().all()
        others = torch.arange(70) != 3
        assert torch.equal(experts[others], logits[others].argsort(1, descending=True)[:, :num_chosen])
        chosen = logits.double().gather(1, experts)
        whole = chosen if renormalizes else logits.double()
        expected = (chosen - whole.logsumexp(1, keepdim=True)).exp()
        torch.testing.assert_close(shares[others].double(), expected[others], atol=1e-6, rtol=1e-5)


def routed_alone(logits: list[float], routing: Routing, bias: list[float]) -> list[tuple[int, float]]:
    """The experts of one token and their shares, by the definition, in Python's numbers."""
    count = len(bias)
    sigmoids = [1 / (1 + math.exp(-one)) for one in logits]
    total = math.fsum(map(math.exp, logits[:count]))
    is_sigmoid = routing.scoring == "sigmoid"
    scores = sigmoids[:count] if is_sigmoid else [math.exp(one) / total for one in logits[:count]]
    choice = [score + own for score, own in zip(scores, bias, strict=True)]
    size = count // routing.num_groups
    groups = [range(first, first + size) for first in range(0, count, size)]
    best = [sum(sorted((choice[one] for one in own), reverse=True)[: routing.group_best]) for own in groups]
    order = sorted(range(len(groups)), key=lambda group: (-round(best[group], 6), group))
    kept = sorted(one for group in order[: routing.num_chosen_groups] for one in groups[group])
    chosen = sorted(kept, key=lambda one: (-round(choice[one], 6), one))[: routing.num_chosen]
    least = 0.0 if is_sigmoid else routing.least_sum
    whole = max(sum(scores[one] for one in chosen), least) if routing.renormalizes else 1.0
    found = [(one, scores[one] / whole * routing.scale) for one in chosen]
    if routing.shared is not None:
        found.append((count, sigmoids[count] if routing.shared == "gated" else 1.0))
    return found


@pytest.mark.row("E8", clauses=("ties",))
@pytest.mark.parametrize(("name", "device"), every_implementation("route"))
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("num_experts", "options"),
    [
        (8, {"num_chosen": 3}),
        (16, {"num_chosen": 2, "least_sum": 0.5}),
        (60, {"num_chosen": 4, "shared": "gated"}),
        (64, {"num_chosen": 6, "scale": 2.5, "shared": "whole"}),
        (32, {"num_chosen": 8, "num_groups": 8, "num_chosen_groups": 2}),
        (32, {"num_chosen": 5, "num_groups": 4, "num_chosen_groups": 2, "group_best": 2, "shared": "gated"}),
    ],
)
def test_routes_are_as_defined_also_among_equals(
    num_experts: int, options: dict[str, Any], has_bias: bool, scoring: Any, name: str, device: str
) -> None:
    """Logits and biases of few levels: most tokens have equals where the choice ends, among experts and
    groups, of which the first count; logits far from zero saturate a sigmoid, and are equals then too."""
    generator = torch.Generator().manual_seed(num_experts)
    for renormalizes in (True, False):
        routing = Routing(renormalizes=renormalizes, scoring=scoring, **options)
        size = num_experts + routing.num_gates
        logits = torch.randint(-2, 4, (50, size), generator=generator).float()
        bias = torch.randint(-1, 2, (num_experts,), generator=generator) * 0.75 * has_bias
        if scoring == "sigmoid":
            logits[::7] = logits[::7].sign() * torch.arange(40, 40 + size)
        with forced("route", name):
            out = ops.route(logits.to(device), routing, bias.to(device) if has_bias else None)
        experts, shares = (one.cpu() for one in out)
        assert experts.dtype == torch.int64 and shares.dtype == torch.float32
        for row, own, share in zip(logits.tolist(), experts.tolist(), shares, strict=True):
            expected = routed_alone(row, routing, bias.tolist())
            assert own == [one for one, _ in expected]
            torch.testing.assert_close(
                share, torch.tensor([one for _, one in expected]), atol=1e-6, rtol=1e-5
            )
        alone = [ops.route(one[None], routing, bias if has_bias else None)[0] for one in logits]
        assert torch.equal(torch.cat(alone), experts), "whoever else is there"


@pytest.mark.parametrize(("name", "device"), every_implementation("route"))
def test_sigmoids_of_nothing_have_no_share(name: str, device: str) -> None:
    """All of a token's sigmoids are 0: their sum is not what shares are divided by; one of NaN has NaN."""
    routing = Routing(num_chosen=2, renormalizes=True, scoring="sigmoid")
    logits = torch.tensor([[-200.0] * 4, [torch.nan] * 4])
    with forced("route", name):
        experts, shares = ops.route(logits.to(device), routing, torch.tensor([0.0, 1, 0, 2]).to(device))
    assert experts[0].tolist() == [3, 1] and shares[0].tolist() == [0.0, 0.0]
    assert shares[1].isnan().all()


def pages(linear: PackedLinear) -> range:
    """Numbers of the pages of memory that hold nothing but a layer's weights."""
    assert isinstance(linear, NativeLinear)
    start = linear._data.data_ptr()
    return range(-(-start // mmap.PAGESIZE), (start + linear._data.nbytes) // mmap.PAGESIZE)


def are_present(own: range) -> list[bool]:
    """Whether anything was read of, or written to, each page since it was given back."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        file.seek(own.start * 8)
        entries = file.read(len(own) * 8)
    return [entries[8 * index + 7] >> 7 == 1 for index in range(len(own))]


@pytest.mark.row("E14", clauses=("skips",))
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [None, "w8a8", "w4a8"])
@pytest.mark.parametrize("num_tokens", [1, 3, 300])
def test_experts_without_tokens_are_not_read(isa: str, kind: str | None, num_tokens: int) -> None:
    """What the system took of their weights' memory does not come back, which any access would make it do."""
    dtype, among = torch.bfloat16, [1, 4, 5]
    experts = make_experts(isa, dtype, kind, num_experts=6)
    moe, x = joined(experts, dtype), draw(num_tokens, HIDDEN).to(dtype)
    routes = make_routes(num_tokens, among, 2)
    expected, used = moe(x, *routes), routes[0].unique().tolist()
    libc = ctypes.CDLL(None, use_errno=True)
    for expert in set(range(6)) - set(used):
        for linears in experts:
            own = pages(linears[expert])
            assert len(own) > 5 and all(are_present(own))
            address = ctypes.c_void_p(own.start * mmap.PAGESIZE)
            assert libc.madvise(address, ctypes.c_size_t(len(own) * mmap.PAGESIZE), 4) == 0  # MADV_DONTNEED
    assert torch.equal(moe(x, *routes), expected)
    for expert in range(6):
        for linears in experts:
            found = are_present(pages(linears[expert]))
            assert all(found) if expert in used else not any(found)
    unused = min(set(range(6)) - set(used))
    moe(x, torch.full_like(routes[0][:, :1], unused), routes[1][:, :1])
    assert all(are_present(pages(experts[1][unused]))), "they would be noticed"


def test_experts_of_different_forms_are_computed_one_by_one() -> None:
    plain, quantised = (make_experts(ISAS[0], torch.float32, kind) for kind in (None, "w8a8"))
    mixed = ([*plain[0][:4], *quantised[0][4:]], plain[1])
    moe = ops.pack_experts(*mixed, device_type="cpu", dtype=torch.float32)
    assert isinstance(moe, LoopedExperts)
    x, routes = draw(7, HIDDEN), make_routes(7, range(9), 3)
    torch.testing.assert_close(moe(x, *routes), by_token(mixed, x, *routes), atol=1e-5, rtol=1e-5)
