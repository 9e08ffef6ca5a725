"""An engine that sleeps gives its memory back, and computes the same once it is awake."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.cache_commands import Sleep
from quire.engine.core import PROBE_ID, EngineCore
from quire.errors import CheckpointError, UnavailableError
from quire.outputs import EngineCoreOutput
from quire.request.scheduling_params import SchedulingParams
from tests.fixtures.checkpoints import make_checkpoint

PROMPTS = [[1, *range(5, 45)], [1, *range(5, 25), 7, 7], [3, 2, 1]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=7, max_tokens=12, ignore_eos=True)
OPTIONS = {"max_model_len": 256, "num_blocks": 64, "num_threads": 2}


def answers(llm: LLM) -> list[list[int]]:
    return [result.token_ids for params in (GREEDY, SEEDED) for result in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen3", {"quantization": "w8a8"}),
        ("gemma3", {"kv_cache_dtype": "int8"}),
        ("llama", {"tensor_parallel_size": 2}),
        ("llama", {"async_scheduling": True, "host_cache_memory": "1MiB"}),
    ],
    ids=["plain", "w8a8", "tied", "ranks", "ahead"],
)
def test_the_same_tokens_after_waking(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    llm = LLM(str(make_checkpoint(family, tmp_path / family)), **OPTIONS, **options)
    before = answers(llm)
    for _ in range(2):
        llm.core.begin_sleep(Sleep())
        llm.core.sleep()
        with pytest.raises(UnavailableError, match="asleep"):
            llm.core.add_request("r", [1], GREEDY)
        assert llm.core.stats().num_cached_blocks == 0, "nothing is found that is not there any more"
        assert llm.core.is_asleep
        llm.core.wake()
        assert answers(llm) == before
        llm.core.scheduler.check_integrity()


def test_a_wake_that_fails_leaves_it_asleep_and_is_tried_again(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "llama")
    llm = LLM(str(checkpoint), **OPTIONS)
    before = answers(llm)
    llm.core.sleep()
    weights = checkpoint / "model.safetensors"
    stat, other = weights.stat(), make_checkpoint("llama", tmp_path / "other", seed=1) / weights.name
    away = weights.rename(tmp_path / "away")
    shutil.copy(other, weights)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="has changed since it was loaded"):
            llm.core.wake()
        assert llm.core.is_asleep
    away.rename(weights)
    assert weights.stat().st_mtime_ns == stat.st_mtime_ns
    llm.core.wake()
    assert answers(llm) == before


def test_what_is_on_disk_is_found_again(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "llama")
    llm = LLM(str(checkpoint), **OPTIONS, disk_cache_directory=str(tmp_path / "disk"))
    (before,) = llm.generate(PROMPTS[:1], GREEDY)
    llm.core.sleep()
    llm.core.wake()
    (again,) = llm.generate(PROMPTS[:1], GREEDY)
    assert again.token_ids == before.token_ids
    assert again.num_cached_tokens == 32, "two whole blocks of the prompt"


MEMORY = """
import sys
from quire import LLM
from quire_common.host_memory import resident_bytes
path, sizes = sys.argv[1], eval(sys.argv[2])
llm = LLM(path, num_threads=2, max_model_len=256, **sizes)
before = llm.generate([[1, 2, 3, 4]], temperature=0.0, max_tokens=8, ignore_eos=True)[0].token_ids
runner = llm.core.executor.runner
weights = sum(p.nbytes for p in runner.model.parameters()) + sum(
    module.packed.nbytes for module in runner.model.modules() if hasattr(module, "packed"))
held = weights + llm.core.info.kv_cache_bytes
del runner
for _ in range(2):
    full = resident_bytes()
    llm.core.sleep()
    freed = full - resident_bytes()
    print(f"held {held >> 20} MiB, freed {freed >> 20} MiB")
    assert held > 100 << 20
    assert freed >= 0.9 * held, (freed, held)
    llm.core.wake()
    assert llm.generate([[1, 2, 3, 4]], temperature=0.0, max_tokens=8, ignore_eos=True)[0].token_ids == before
"""


@pytest.mark.row("G17", clauses=("frees",))
def test_sleep_gives_the_memory_back(tmp_path: Path) -> None:
    """To the system, in a process of its own; also what the C library has in small pieces."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 4096}
    checkpoint = make_checkpoint("llama", tmp_path / "llama", **shape, tokenizer=False)
    quantized = {"quantization": "w8a8", "dtype": "bfloat16", "kv_cache_dtype": "int8"}
    for options in ({"num_blocks": 768}, {"num_blocks": 4096, **quantized}):
        command = [sys.executable, "-c", MEMORY, str(checkpoint), repr(options)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout + done.stderr[-2000:]
        assert done.stdout.count("freed") == 2, done.stdout
        print(done.stdout)


def test_what_goes_on_after_a_death_is_let_in_before_the_engine_sleeps(tmp_path: Path) -> None:
    """Another frontend may be later with it than a command to sleep: its streams were broken off."""
    core = LLM(str(make_checkpoint("llama", tmp_path / "llama")), **OPTIONS).core
    core.begin_sleep(Sleep())
    with pytest.raises(UnavailableError, match="about to sleep"):
        core.add_request("new", [5], GREEDY)
    core.add_request("old", [5], GREEDY, num_deaths=1, outputs={0: [7, 8]})
    tokens = [token for output in iter_outputs(core) for token in output.new_token_ids]
    assert len(tokens) == GREEDY.max_tokens - 2
    core.sleep()
    with pytest.raises(UnavailableError, match="is asleep"):
        core.add_request("old", [5], GREEDY, num_deaths=1, outputs={0: [7, 8]})


def iter_outputs(core: EngineCore) -> Iterator[EngineCoreOutput]:
    while core.has_work:
        yield from core.step()


def test_a_health_check_under_way_does_not_keep_an_engine_awake(tmp_path: Path) -> None:
    core = LLM(str(make_checkpoint("llama", tmp_path / "llama")), **OPTIONS).core
    exempt = SchedulingParams(is_internal=True)
    core.add_request("other", [5], GREEDY, scheduling=exempt)
    core.add_request(PROBE_ID, [0], SamplingParams(max_tokens=1), scheduling=exempt)
    with pytest.raises(UnavailableError, match="requests are running"):
        core.begin_sleep(Sleep())
    core.abort(["other"])
    core.begin_sleep(Sleep())
