"""FakeDevice: as many tokens as were asked for, at the pace of its clock."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.fake_device import FakeDevice, environment
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.executor import RunnerExecutor
from quire.errors import ConfigError, EngineError
from quire.llm import LLM
from quire.request.sampling_params import SamplingParams
from tests.fixtures.checkpoints import VOCAB_SIZE, make_checkpoint

STEP_MS = 10
EOS_TOKEN_ID = VOCAB_SIZE // 4 + 50


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a fake device needs: config.json, a tokenizer, no weights. Its end is among the words."""
    path = make_checkpoint("llama3", tmp_path_factory.mktemp("checkpoint") / "llama3")
    for weights in path.glob("*.safetensors"):
        weights.unlink()
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    return path


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this process compute by a fake device, without any time to speak of."""
    for name, value in environment(0.001).items():
        monkeypatch.setenv(name, value)


class Time:
    """A clock that only sleeping, and the host's own `work`, moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.usefixtures("fast")
def test_generates_exactly_what_was_asked_for_without_weights(checkpoint: Path) -> None:
    llm = LLM(checkpoint, max_num_seqs=16)
    assert llm.core.executor.depth == 2, "the next step is to be launched ahead, as on a GPU"
    lengths = [1, 2, 30, 100, 7]
    params = [SamplingParams(max_tokens=length) for length in lengths]
    outputs = llm.generate([[5] * 40] * len(lengths), params)
    assert [len(output.token_ids) for output in outputs] == lengths
    assert all(output.text and output.finish_reason == "length" for output in outputs)
    seen = {token_id for output in outputs for token_id in output.token_ids}
    assert len(seen) > 40 and max(seen) < VOCAB_SIZE and EOS_TOKEN_ID not in seen


@pytest.mark.parametrize(
    ("depth", "host_ms", "expected_ms"),
    [(2, 0, 10), (2, 9, 10), (1, 4, 14), (2, 13, 13)],
    ids=["host free", "host hidden", "host not hidden", "host slower"],
)
def test_a_step_takes_its_time_whatever_its_rows_and_the_host_s_work_hides_behind_it(
    checkpoint: Path, depth: int, host_ms: float, expected_ms: float
) -> None:
    time = Time()
    config = EngineConfig.from_mapping({"model": str(checkpoint)})
    device = FakeDevice(config, STEP_MS, clock=time.clock, sleep=time.work)
    core = EngineCore(config, RunnerExecutor(device, depth=depth))
    for number in range(50):
        core.add_request(str(number), [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))
    arrivals, num_tokens = [], 0
    while core.has_work:
        time.work(host_ms / 1000)
        outputs = core.step()
        num_tokens += sum(len(output.new_token_ids) for output in outputs)
        if outputs:
            arrivals.append(time.now)
    assert num_tokens == 50 * 20 and len(arrivals) == 20
    gaps = [1000 * (after - before) for before, after in pairwise(arrivals)]
    assert gaps == pytest.approx([expected_ms] * 19)


@pytest.mark.usefixtures("fast")
def test_what_it_cannot_do_is_refused(checkpoint: Path) -> None:
    llm = LLM(checkpoint)
    for wish in ({"n": 2, "temperature": 1.0}, {"beam_width": 2}, {"logprobs": 1}):
        with pytest.raises(EngineError, match="a fake device draws one token"):
            llm.generate(["hello"], max_tokens=4, **wish)
    assert len(llm.generate(["hello"], max_tokens=4)[0].token_ids) == 4
    with pytest.raises(ConfigError, match="a fake device has no KV blocks"):
        LLM(checkpoint, host_cache_memory="1MiB")
