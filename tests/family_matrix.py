"""The table of docs/families.md: the ways of computing that give transformers' answers, for each family.

`python -m tests.family_matrix` computes the table in some minutes, and writes it to the page. With names of
families, it prints their rows only. The slow test of tests/unit/test_family_matrix.py compares each cell.
"""

from __future__ import annotations

import functools
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from quire import SamplingParams
from quire.core.scheduler import SchedulerStats
from quire.errors import QuireError
from quire.request.sampling_params import choice_seed
from tests.fixtures.adapters import ATTENTION, make_adapter, merge
from tests.fixtures.checkpoints import FALLBACK_FAMILIES, NATIVE_FAMILIES, make_checkpoint
from tests.fixtures.drive import Driver, hf_greedy, hf_logits, hf_model
from tests.unit.test_oracle_matrix import GREEDY, MAX_TOKENS, PROMPTS, engine, ids, small_pool

ROWS = (*NATIVE_FAMILIES, *FALLBACK_FAMILIES)
PAGE = Path(__file__).parents[1] / "docs" / "families.md"
TOLERANCE = 1e-4
"""Largest difference of any logit from transformers'."""
MOST_OFF = 0.25
"""Distance of logits, by their deviation, that eight bits may make in a model of random weights."""
IDS = torch.randint(5, 512, (75,), generator=torch.Generator().manual_seed(0)).tolist()
_SIZES: dict[str, dict[str, Any]] = {
    "gemma4": {"hidden_size_per_layer_input": 64},  # w8a8 has groups of 64
}


class Family:
    """A family's checkpoint in a folder, and what transformers makes of it."""

    def __init__(self, name: str, root: Path, **options: Any) -> None:
        self.name, self.root = name, root / name
        self.path = make_checkpoint(
            name, self.root / name, tokenizer=False, **(_SIZES.get(name, {}) | options)
        )

    @functools.cached_property
    def model(self) -> Any:
        """The model of transformers."""
        return hf_model(self.path)

    @functools.cached_property
    def logits(self) -> torch.Tensor:
        """Logits of IDS."""
        return hf_logits(self.model, IDS)

    @functools.cached_property
    def expected(self) -> list[list[int]]:
        """Greedy tokens behind each of PROMPTS."""
        return [hf_greedy(self.model, prompt, MAX_TOKENS) for prompt in PROMPTS]

    def check_tokens(self, **options: Any) -> SchedulerStats:
        """Generates behind PROMPTS with an engine of these options; returns the engine's figures."""
        llm = engine(self.path, **options)
        try:
            assert ids(llm.generate(PROMPTS, GREEDY)) == self.expected
            return llm.core.stats()
        finally:
            llm.core.close()

    def check_logits(self, chunk: int | None = None) -> None:
        """Compares the logits of IDS."""
        found = Driver.load(self.path).logits(IDS, chunk)
        torch.testing.assert_close(found, self.logits, atol=TOLERANCE, rtol=0.0)

    def check_adapter(self, targets: Collection[str]) -> None:
        """Generates with an adapter of these modules, and without it in the same batch."""
        path = self.root / f"adapter of {len(targets)}"
        adapter = make_adapter(path, self.model, targets=sorted(targets))
        model = merge(hf_model(self.path), adapter)
        expected = [hf_greedy(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
        assert expected != self.expected
        llm = engine(self.path, enable_lora=True, lora_modules={"a": str(adapter)})
        names = ["a"] * len(PROMPTS) + [None] * len(PROMPTS)
        assert ids(llm.generate([*PROMPTS, *PROMPTS], GREEDY, adapters=names)) == expected + self.expected
        llm.core.close()

    def check_distance(self, found: torch.Tensor) -> None:
        """Compares logits of IDS that were computed in eight bits."""
        of_tokens = (found - self.logits).square().mean(1).sqrt()
        assert 0 < float(of_tokens.median() / self.logits.std()) < MOST_OFF


def whole(family: Family) -> str:
    family.check_logits()
    llm = engine(family.path, max_num_batched_tokens=512)
    for prompt, expected in zip(PROMPTS, family.expected, strict=True):
        assert llm.generate([prompt], GREEDY)[0].token_ids == expected
    llm.core.close()
    return "equal"


def chunks(family: Family) -> str:
    for size in (7, 48):
        family.check_logits(size)
        family.check_tokens(max_num_batched_tokens=size)
    return "equal"


def batched(family: Family) -> str:
    family.check_tokens(max_num_batched_tokens=4096)
    return "equal"


def recomputed(family: Family) -> str:
    stats = family.check_tokens(preemption_mode="recompute", **small_pool(family.path))
    assert stats.num_preemptions and stats.num_recomputed_tokens
    return "equal"


def swapped(family: Family) -> str:
    host = {"host_cache_memory": "64MiB", "enable_prefix_caching": False}
    stats = family.check_tokens(preemption_mode="swap", **small_pool(family.path), **host)
    assert 0 < stats.num_preemptions == stats.num_swaps
    return "equal"


def cached(family: Family) -> str:
    llm = engine(family.path)
    for is_cached in (False, True):
        outputs = llm.generate(PROMPTS, GREEDY)
        assert ids(outputs) == family.expected
        size = llm.core.kv.block_size
        for output, prompt in zip(outputs, PROMPTS, strict=True):
            assert not is_cached or output.num_cached_tokens == (len(prompt) - 1) // size * size
    llm.core.close()
    return "equal"


def forked(family: Family) -> str:
    sampled: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0}
    reference = engine(family.path, enable_prefix_caching=False, max_num_batched_tokens=512)
    llm = engine(family.path, max_num_batched_tokens=16)
    for prompt in PROMPTS[:4]:
        (output,) = llm.generate([prompt], SamplingParams(n=3, seed=5, **sampled))
        for index, choice in enumerate([output, *output.others]):
            alone = SamplingParams(seed=choice_seed(5, index), **sampled)
            assert choice.token_ids == reference.generate([prompt], alone)[0].token_ids
    llm.core.close()
    reference.core.close()
    return "equal"


def adapted(family: Family) -> str:
    modules = [name for name, one in family.model.named_modules() if isinstance(one, torch.nn.Linear)]
    targets = {name.rpartition(".")[2] for name in modules if not _NOT_ADAPTED.search(name)}
    try:
        family.check_adapter(targets)
    except QuireError:
        if not targets & {*ATTENTION}:
            raise
        family.check_adapter(targets & {*ATTENTION})
        return "attention"
    return "equal"


_NOT_ADAPTED = re.compile(r"lm_head|\.gate$|router|expert")


def int8_cache(family: Family) -> str:
    family.check_distance(Driver.load(family.path, kv_cache_dtype="int8").logits(IDS, 7))
    return "close"


def w8a8(family: Family) -> str:
    family.check_distance(Driver.load(family.path, quantization="w8a8").logits(IDS))
    return "close"


COLUMNS: dict[str, Callable[[Family], str]] = {
    "whole": whole,
    "chunks": chunks,
    "batched": batched,
    "recomputed": recomputed,
    "swapped": swapped,
    "cached": cached,
    "forked": forked,
    "LoRA": adapted,
    "int8 cache": int8_cache,
    "w8a8": w8a8,
}


def cell(family: Family, column: str) -> str:
    """Returns what the page says of a family under a column; says why on stderr,
    where it is neither equal nor close."""
    try:
        return COLUMNS[column](family)
    except QuireError as error:
        print(f"{family.name}, {column}: {error}", file=sys.stderr)
        return "refused"
    except AssertionError as error:
        print(f"{family.name}, {column}: {str(error)[:400]}", file=sys.stderr)
        return "differs"


def stated() -> dict[str, dict[str, str]]:
    """Returns the page's cells, by family and column."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text("utf-8").splitlines() if " | " in line]
    start = next(index for index, line in enumerate(lines) if line[0] == "family")
    header = lines[start][1:]
    return {name: dict(zip(header, cells, strict=True)) for name, *cells in lines[start + 2 :]}


def rows(names: Sequence[str]) -> Iterator[str]:
    """Yields the table's lines, with rows of these families."""
    yield f"| family | {' | '.join(COLUMNS)} |"
    yield f"| --- |{' --- |' * len(COLUMNS)}"
    with tempfile.TemporaryDirectory() as root:
        for name in names:
            family = Family(name, Path(root))
            yield f"| {name} | {' | '.join(cell(family, column) for column in COLUMNS)} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    table = "".join(f"{line}\n" for line in rows(sys.argv[1:] or ROWS))
    if sys.argv[1:]:
        print(table, end="")
    else:
        prose = PAGE.read_text("utf-8").partition("| family |")[0]
        PAGE.write_text(prose + table, "utf-8")
