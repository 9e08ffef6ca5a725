"""Nothing is left for the first request to do: what it needs is there when the model is ready."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
from quire.sampling_params import SamplingParams
from quire.structured_output import StructuredOutput

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


@pytest.mark.row("G11")
@pytest.mark.parametrize("program", [FRONTEND, ENGINE], ids=["frontend", "engine"])
def test_first_requests_import_and_start_nothing(tmp_path: Path, program: str) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "llama")
    options = {"model": str(checkpoint), "max_model_len": 256, "num_blocks": 64, "num_threads": 1}
    command = [sys.executable, "-c", program, str(tmp_path), json.dumps(options)]
    root = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) >= 4
    for name, modules, processes in found:
        assert modules == [] and processes == 0, (name, modules, processes)
