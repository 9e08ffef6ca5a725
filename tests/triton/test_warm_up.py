"""Nothing is left for the first request to do: what it needs is there when the model is ready."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.checkpoints import make_checkpoint

FRONTEND = """
import json, sys
from pathlib import Path
import numpy as np
import psutil
from tests.fixtures import fake_pb_utils
fake_pb_utils.install()
from quire.triton.frontend import TritonPythonModel

folder = Path(sys.argv[1])
parameters = {key: {"string_value": str(value)} for key, value in json.loads(sys.argv[2]).items()}
config = {
    "name": "generator", "backend": "quire", "parameters": parameters, "max_batch_size": 0,
    "instance_group": [{"count": 1, "kind": "KIND_CPU"}], "model_transaction_policy": {"decoupled": True}}
(folder / "1").mkdir()
model = TritonPythonModel()
model.initialize({
    "model_config": json.dumps(config), "model_repository": str(folder), "model_version": "1",
    "model_name": "generator", "model_instance_name": "generator_0", "model_instance_kind": "CPU",
    "model_instance_device_id": "0"})

def text(value):
    return np.array([value.encode()], dtype=np.object_)

schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
kinds = {
    "text": {"text_input": text("the quick brown fox")},
    "sampled": {"text_input": text("a fox"), "sampling_parameters": text(json.dumps(
        {"temperature": 0.8, "top_p": 0.9, "seed": 1, "stop": ["zz"], "logprobs": 2}))},
    "messages": {"messages": text(json.dumps([{"role": "user", "content": "hello"}]))},
    "schema": {"text_input": text("json"), "sampling_parameters": text(json.dumps(
        {"structured_output": {"json": schema}}))},
}
before, children = set(sys.modules), len(psutil.Process().children())
for name, inputs in kinds.items():
    inputs |= {"stream": np.array([True]), "max_tokens": np.array([6], dtype=np.int32)}
    request = fake_pb_utils.InferenceRequest(inputs)
    model.execute([request])
    assert request.sender.final.wait(60), name
    error = request.sender.responses[-1].error
    assert error is None, (name, error and error.message())
    new = sorted(set(sys.modules) - before)
    print(json.dumps([name, new, len(psutil.Process().children()) - children]))
    before = set(sys.modules)
model.finalize()
"""

ENGINE = """
import json, sys
from quire.config import EngineConfig
from quire.engine.loop import EngineCore, make_executor
from quire.request.sampling_params import SamplingParams
from quire.request.structured_output import StructuredOutput

config = EngineConfig.from_mapping(json.loads(sys.argv[2]))
core = EngineCore(config, make_executor(config, threaded=True))
core.warm_up()
kinds = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 1},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.1, "presence_penalty": 0.1},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 1},
    "choices": {"n": 2, "temperature": 1.0},
    "words": {"bad_words_ids": [[3, 4]], "no_repeat_ngram_size": 2, "logit_bias": {5: 1.0}},
}
before = set(sys.modules)
for name, sampling in kinds.items():
    core.add_request(name, [5, 6, 7, 8] * 10, SamplingParams(max_tokens=4, ignore_eos=True, **sampling))
    while core.has_work:
        assert not any(output.error for output in core.step())
    print(json.dumps([name, sorted(set(sys.modules) - before), 0]))
    before = set(sys.modules)
core.close()
"""

START = """
import io, json, sys, types
from pathlib import Path
from unittest import mock
from quire.engine import loop
from quire.engine.runtime_directory import RuntimeDirectory
from quire.request.sampling_params import SamplingParams
from quire_kernels.triton_lang import tuning
from tests.fixtures.graphs import recorded_steps

folder = Path(sys.argv[1]) / "engine"
folder.mkdir(mode=0o700)
options = json.loads(sys.argv[2]) | {"async_scheduling": True, "max_num_seqs": 4}
options["max_num_batched_tokens"] = 32
(folder / "config.json").write_text(json.dumps(options))
sys.stdin = types.SimpleNamespace(buffer=io.BytesIO(b"1"))
may_tune = []

def tell(what):
    print(json.dumps([what, backend.num_graphs]))

def write_state(self, state):
    tell(state.state)

def run(self):
    assert self.core.scheduler.num_scheduled_tokens > 0, "nothing was computed before it was ready"
    self.core.add_request("first", [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))
    while self.core.has_work:
        assert not any(output.error for output in self.core.step())
    tell("asked")

with recorded_steps() as backend:
    begin = backend.begin
    backend.begin = lambda: may_tune.append(tuning._warming_up) or begin()
    with mock.patch.object(RuntimeDirectory, "write_state", write_state):
        with mock.patch.object(loop.EngineLoop, "run", run):
            loop.main.callback(path=folder, server_pid=0, server_start_time=0, generation=0)
assert all(may_tune) and not tuning._warming_up
"""


@pytest.mark.row("G11", clauses=("ready",))
def test_an_engine_says_that_it_is_ready_behind_its_warm_up(tmp_path: Path) -> None:
    """Steps were computed, graphs recorded (by the stand-in for CUDA's) and kernels tuned, where they may be,
    before the word that frontends wait for; afterwards nothing is recorded. What else a first request could
    have to do: below."""
    (ready, num_graphs), (asked, num_later) = run_program(START, tmp_path)
    assert (ready, asked) == ("ready", "asked")
    assert num_later == num_graphs > 0


@pytest.mark.row("G11")
@pytest.mark.parametrize("program", [FRONTEND, ENGINE], ids=["frontend", "engine"])
def test_first_requests_import_and_start_nothing(tmp_path: Path, program: str) -> None:
    found = run_program(program, tmp_path)
    assert len(found) >= 4
    for name, modules, processes in found:
        assert modules == [] and processes == 0, (name, modules, processes)


def run_program(program: str, folder: Path) -> list[Any]:
    """What it prints, a line of JSON each."""
    checkpoint = make_checkpoint("llama", folder / "llama")
    options = {"model": str(checkpoint), "max_model_len": 256, "num_blocks": 64, "num_threads": 1}
    command = [sys.executable, "-c", program, str(folder), json.dumps(options)]
    root = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
