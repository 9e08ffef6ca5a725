"""Triton's OpenAI frontend in both modes, its own tests, and vllm_backend's CI clients: their public files.

They run unmodified, and the models are Quire's, of a checkpoint that was taught the words that these clients
expect. tests/fixtures/triton_sources.py says what must be there.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers
import tritonclient

from benchmarks.peers import registry, venvs
from quire import LLM, SamplingParams
from tests.e2e.conftest import write_model
from tests.fixtures.parrot import MAX_LENGTH, chat_prompt, make_adapter, make_parrot
from tests.fixtures.server import POLL_S
from tests.fixtures.triton_sources import SOURCES, Image, build_binding, constants, missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.server,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

FRONTEND = Path(SOURCES) / "server" / "python" / "openai"
VLLM = Path(SOURCES) / "vllm_backend"
CLIENTS = Path("ci") / "L0_backend_vllm"
READY_S = 120
ENGINE: dict[str, Any] = {"max_model_len": MAX_LENGTH, "num_blocks": 1024, "dtype": "float32"}
OPTIONS = {**ENGINE, "stream_interval": 1}
VLLM_OPTIONS = {**OPTIONS, "dialect": "vllm"}
BATCHED = 'backend: "quire"\nmax_batch_size: 64\n'

QUESTION = "What is machine learning?"
LONG_ANSWER = (
    "Programs that learn from data, not from rules that somebody wrote down, are what people mean by it. "
    "They look at many examples, find what these have in common, and then say what is likely for an example "
    "that they have not seen; how well they do it is measured on more examples, kept apart for that."
)
ARGUMENTS = '{"city": "Dallas", "state": "TX", "unit": "fahrenheit"'
CALL = f'{{"name": "get_current_weather", "parameters": {ARGUMENTS}}}}}'

_ADD_SUB_CONFIG = """
backend: "python"
input [
  { name: "INPUT0", data_type: TYPE_FP32, dims: [ 4 ] },
  { name: "INPUT1", data_type: TYPE_FP32, dims: [ 4 ] }
]
output [
  { name: "OUTPUT0", data_type: TYPE_FP32, dims: [ 4 ] },
  { name: "OUTPUT1", data_type: TYPE_FP32, dims: [ 4 ] }
]
"""
_ADD_SUB = '''
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Another backend's model beside ours: the sum and the difference of two vectors."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "INPUT1"))
        results = (("OUTPUT0", a + b), ("OUTPUT1", a - b))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, result) for name, result in results])
'''


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    packages = tmp_path_factory.mktemp("packages")
    build_binding(packages)
    with Image(packages) as made:
        yield made


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says what the clients expect of facebook/opt-125m and of an instructed Llama."""
    tools = constants(FRONTEND / "tests" / "test_tool_calling.py")
    names = [tools[name]["function"]["name"] for name in ("WEATHER_TOOL", "WEATHER_FORECAST_TOOL")]
    asked = chat_prompt(tools["MESSAGES_ASKING_FOR_TOOLS"], names)
    told = chat_prompt([{"content": None, **one} for one in tools["MESSAGES_WITH_TOOL_RESPONSE"]], names)
    lessons = [
        *_expected_of_opt(VLLM / CLIENTS),
        ("In this example,", " a model says what it was taught, word for word, and no more than"),
        ("The future of AI is", " what people make of it, and that is for all of them to say, not for a few"),
        (QUESTION, f" {LONG_ANSWER}"),
        (chat_prompt([{"role": "user", "content": QUESTION}]), LONG_ANSWER),
        *[(asked, CALL)] * 3,
        (asked, f'{ARGUMENTS}, "num_days": 3}}'),
        (asked, f"{ARGUMENTS}}}"),
        (told, "It is 98 degrees Fahrenheit in Dallas now, and sunny."),
    ]
    return make_parrot(tmp_path_factory.mktemp("parrot"), lessons)


def _expected_of_opt(folder: Path) -> list[tuple[str, str]]:
    """Prompts of vllm_backend's clients and the answers that they compare."""
    prompts = constants(folder / "vllm_backend" / "vllm_backend_test.py")["PROMPTS"]
    found = {}
    for file in ("vllm_backend/vllm_backend_test.py", "enabled_stream/enabled_stream_test.py"):
        for node in ast.walk(ast.parse((folder / file).read_text("utf-8"))):
            if not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "expected_output"):
                continue
            if isinstance(node.value, ast.List):
                words = ast.literal_eval(node.value)
                text = "".join(words) if isinstance(words[0], str) else words[0].decode()
                for prompt in prompts:
                    if text.startswith(prompt):
                        found[prompt] = text.removeprefix(prompt)
                if len(words) > 1:
                    (first,) = constants(folder / file)["PROMPTS"]
                    found[first] = text
    assert len(found) == 2, found
    return list(found.items())


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    """The same engine without a server."""
    return LLM(checkpoint, **ENGINE)


def write_quire(repository: Path, name: str, config: str, **options: Any) -> None:
    version = write_model(repository, name, config)
    (version / "quire.json").write_text(json.dumps(options))


@dataclass
class Front:
    """The frontend, and what its user would write."""

    url: str
    model: str
    llm: LLM

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0)

    def text(self, prompt: str, **params: Any) -> str:
        """Quire's own greedy answer."""
        return self.llm.generate([prompt], SamplingParams(**{"temperature": 0.0, **params}))[0].text


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(url):
                return
        except OSError:
            ended = process.poll()
            assert ended is None and time.monotonic() < deadline, f"status {ended}:\n{log.read_text('utf-8')}"
            time.sleep(POLL_S)


def start_front(
    image: Image, repository: Path, checkpoint: Path, *arguments: str
) -> tuple[str, subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = repository.parent / "front.log"
    command = ["python3", FRONTEND / "openai_frontend" / "main.py", "--model-repository", repository]
    command += ["--tokenizer", checkpoint, "--host", "127.0.0.1", "--openai-port", str(port)]
    command += ["--tool-call-parser", "llama3"]
    process = image.start(*command, *arguments, cwd=repository, log=log, network=False)
    wait_for(f"http://127.0.0.1:{port}/health/ready", process, log)
    return f"http://127.0.0.1:{port}/v1", process


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def vllm_mode(
    image: Image, checkpoint: Path, llm: LLM, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    repository = tmp_path_factory.mktemp("vllm-mode") / "models"
    write_quire(repository, "vllm_model", 'backend: "quire"\n', model=str(checkpoint), **VLLM_OPTIONS)
    url, process = start_front(image, repository, checkpoint, "--backend", "vllm")
    yield Front(url, "vllm_model", llm)
    end(process)


@pytest.fixture(scope="module")
def default_mode(
    image: Image, checkpoint: Path, llm: LLM, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    """Beside the model of TensorRT-LLM's names one whose config.pbtxt says vllm, which is Quire here."""
    repository = tmp_path_factory.mktemp("default-mode") / "models"
    write_quire(repository, "tensorrt_llm_bls", BATCHED, model=str(checkpoint), **OPTIONS)
    write_quire(repository, "opt", 'backend: "vllm"\n', model=str(checkpoint), **VLLM_OPTIONS)
    url, process = start_front(image, repository, checkpoint)
    yield Front(url, "tensorrt_llm_bls", llm)
    end(process)


def check_front(front: Front) -> None:
    """What both modes can, by the official client: every greedy text is Quire's own."""
    client, model = front.client, front.model
    assert model in [one.id for one in client.models.list()]
    assert client.models.retrieve(model).owned_by == "Triton Inference Server"

    greedy: dict[str, Any] = {"model": model, "temperature": 0.0}
    expected = front.text(QUESTION, max_tokens=40)
    whole = client.completions.create(prompt=QUESTION, max_tokens=40, **greedy)
    assert whole.choices[0].text == expected and whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert (
        whole.usage.prompt_tokens == len(front.llm.encode(QUESTION)) and whole.usage.completion_tokens == 40
    )
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.completions.create(prompt=QUESTION, max_tokens=40, **greedy, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected and len(chunks) > 1
    assert last.usage == whole.usage
    echo = client.completions.create(prompt=QUESTION, max_tokens=4, echo=True, **greedy)
    assert echo.choices[0].text == QUESTION + front.text(QUESTION, max_tokens=4)
    assert client.completions.create(prompt=QUESTION, **greedy).choices[0].text == front.text(
        QUESTION, max_tokens=16
    )
    stopped = client.completions.create(prompt=QUESTION, max_tokens=40, stop=["rules", "nowhere"], **greedy)
    assert stopped.choices[0].text == front.text(QUESTION, max_tokens=40, stop=("rules",))
    assert stopped.choices[0].text.endswith("from ")

    def drawn(seed: int) -> str:
        asked = {"prompt": QUESTION, "model": model, "max_tokens": 40, "temperature": 1.0, "seed": seed}
        return client.completions.create(**asked).choices[0].text

    first = drawn(7)
    assert first == drawn(7) == front.text(QUESTION, max_tokens=40, temperature=1.0, seed=7)
    assert first not in (drawn(8), expected)

    messages: Any = [{"role": "user", "content": QUESTION}]
    prompt = chat_prompt(messages)
    answer = client.chat.completions.create(messages=messages, max_completion_tokens=99, **greedy)
    assert answer.choices[0].message.content == LONG_ANSWER == front.text(prompt, max_tokens=99)
    assert answer.choices[0].message.role == "assistant" and answer.usage is not None
    *parts, last_part = client.chat.completions.create(messages=messages, max_tokens=99, **greedy, **options)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == LONG_ANSWER
    assert last_part.usage == answer.usage

    for status, wrong in ((400, {"model": "nobody"}), (400, {"n": 2}), (422, {"temperature": 3.0})):
        with pytest.raises(openai.APIStatusError) as refused:
            client.completions.create(**{"prompt": QUESTION, "model": model, **wrong})
        assert refused.value.status_code == status
    with pytest.raises(openai.InternalServerError) as too_long:
        client.completions.create(prompt="the " * MAX_LENGTH, model=model)
    assert f"max_model_len is {MAX_LENGTH}" in too_long.value.response.text
    assert asyncio.run(_many(front)) == [front.text(f"Word {n} is", max_tokens=24) for n in range(16)]


async def _many(front: Front) -> list[str]:
    """Answers to prompts that are asked at once, streamed."""
    async with openai.AsyncOpenAI(base_url=front.url, api_key="none", max_retries=0) as client:

        async def one(prompt: str) -> str:
            stream = await client.completions.create(
                model=front.model, prompt=prompt, max_tokens=24, temperature=0.0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        return list(await asyncio.gather(*(one(f"Word {number} is") for number in range(16))))


@pytest.mark.row("A5", clauses=("frontend",))
def test_the_openai_frontend_with_backend_vllm(vllm_mode: Front) -> None:
    check_front(vllm_mode)


@pytest.mark.row("A6", clauses=("frontend",))
def test_the_openai_frontend_in_its_default_mode(default_mode: Front) -> None:
    check_front(default_mode)


@pytest.mark.row("A6")
def test_the_openai_frontend_forces_tool_calls_in_its_default_mode(default_mode: Front) -> None:
    """A named tool's schema comes as TensorRT-LLM's guided decoding. It bounds all: the checkpoint was not
    taught calls of it, and would write digits, or further keys, until its tokens are used up."""
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    numbers = {"type": "array", "items": digit, "minItems": 2, "maxItems": 2}
    schema = {
        "type": "object",
        "properties": {"numbers": numbers},
        "required": ["numbers"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "function": {"name": "add", "description": "sum", "parameters": schema}}
    asked: dict[str, Any] = {
        "model": default_mode.model,
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [tool],
        "max_completion_tokens": 400,
        "temperature": 0.0,
    }
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        answer = default_mode.client.chat.completions.create(**asked, tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.type == "function" and call.function.name == "add"
        found = json.loads(call.function.arguments)
        assert list(found) == ["numbers"] and [type(one) for one in found["numbers"]] == [int, int]


@pytest.mark.row("A5")
def test_a_model_whose_backend_is_called_vllm_needs_no_mode_and_has_logprobs(default_mode: Front) -> None:
    """The frontend gives log-probabilities where config.pbtxt says vllm, and nowhere else."""
    asked: Any = {"prompt": QUESTION, "max_tokens": 12, "temperature": 0.0, "logprobs": 2}
    (choice,) = default_mode.client.completions.create(model="opt", **asked).choices
    assert choice.text == default_mode.text(QUESTION, max_tokens=12) and choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or ()) == choice.text
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2)
    (own,) = default_mode.llm.generate([QUESTION], params)
    expected = [entry.logprobs[0] for entry in own.logprobs or ()]
    assert choice.logprobs.token_logprobs == pytest.approx(expected, abs=1e-5)
    with pytest.raises(openai.BadRequestError) as refused:
        default_mode.client.completions.create(model=default_mode.model, **asked)
    assert "only for the vLLM backend" in refused.value.response.text


def run_pytest(
    image: Image, folder: Path, *arguments: str, env: dict[str, str] | None = None
) -> dict[str, int]:
    """Runs their pytest on their files; how many came out how."""
    log = folder / "pytest.log"
    command = ["python3", "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
    status = image.start(*command, "-p", "no:timeout", *arguments, cwd=folder, log=log, env=env).wait()
    text = log.read_text("utf-8", errors="replace")
    assert status == 0, text[-20_000:]
    print(text.splitlines()[-1])
    return {kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", text.splitlines()[-1])}


@pytest.mark.parametrize("mode", ["vllm", "tensorrtllm"])
@pytest.mark.row("A5")
@pytest.mark.row("A6")
def test_the_frontends_own_tests(image: Image, checkpoint: Path, tmp_path: Path, mode: str) -> None:
    """Those that ask a model. Not: tokenizers from the Hub, LoRA, embeddings, and forced tools with --backend
    vllm, for which the frontend imports vLLM itself. Nor what compares the numbers of chunks of two answers:
    on a busy machine two tokens may share one.
    """
    folder, models = tmp_path / "openai", tmp_path / "models"
    shutil.copytree(FRONTEND, folder)
    if mode == "vllm":
        model = "llama-3.1-8b-instruct"
        write_quire(models, model, 'backend: "vllm"\n', model=str(checkpoint), **VLLM_OPTIONS)
    else:
        model = "tensorrt_llm_bls"
        for name in (model, "tensorrt_llm", "preprocessing", "postprocessing"):
            write_quire(models, name, BATCHED, model=str(checkpoint), **OPTIONS)
    env = {
        "TEST_BACKEND": mode,
        "TEST_MODEL": model,
        "TEST_MODEL_REPOSITORY": str(models),
        "TEST_TOKENIZER": str(checkpoint),
        "TEST_TOOL_CALL_PARSER": "llama3",
    }
    names = ["openai_client", "completions", "chat_completions", "tool_calling"]
    names += ["model_management.py::TestModelManagementInference"]
    unwanted = "custom_tokenizer or invalid_chat_tokenizer or streaming_usage_option"
    if mode == "vllm":
        unwanted += " or named_tool_choice or required_tool_choice"
    files = [f"tests/test_{name.removesuffix('.py')}" for name in names]
    files = [file if ".py" in file else f"{file}.py" for file in files]
    outcomes = run_pytest(image, folder, "-k", f"not ({unwanted})", *files, env=env)
    assert outcomes["passed"] > 80


@pytest.fixture(scope="module")
def endless(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint without a chat's mark among the ends of an answer, so that one lasts until cancelled."""
    path = tmp_path_factory.mktemp("endless") / "checkpoint"
    shutil.copytree(checkpoint, path)
    (path / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}')
    return path


@pytest.fixture(scope="module")
def hub(endless: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which "facebook/opt-125m" is that checkpoint, as if the Hub had given it before."""
    home = tmp_path_factory.mktemp("hub")
    repository, revision = home / "hub" / "models--facebook--opt-125m", "1" * 40
    shutil.copytree(endless, repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    return {"HF_HOME": str(home)}


def copy_sample(models: Path, name: str, config: str = "", **arguments: Any) -> None:
    """vllm_backend's sample model, with more in config.pbtxt and other arguments, as its scripts do."""
    shutil.copytree(VLLM / "samples" / "model_repository" / "vllm_model", models / name)
    with (models / name / "config.pbtxt").open("a") as file:
        file.write(parameter("num_blocks", "1024") + config)
    model = models / name / "1" / "model.json"
    model.write_text(json.dumps({**json.loads(model.read_text("utf-8")), **arguments}))


def parameter(key: str, value: str) -> str:
    return f'\nparameters: {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'


@dataclass
class Clients:
    """A copy of vllm_backend, and the server that its clients ask."""

    image: Image
    folder: Path
    log: Path

    def run(
        self, cwd: Path, *command: str, python: str | Path = "python3", env: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        output = self.folder / cwd / "client.log"
        started = self.image.start(python, *command, cwd=self.folder / cwd, log=output, env=env)
        return started.wait(), output.read_text("utf-8")

    def check(self, cwd: Path, *command: str, count: int, tries: int = 1, **options: Any) -> None:
        """Runs a file of theirs; its `count` tests must pass."""
        for _ in range(tries):
            status, text = self.run(cwd, *command, **options)
            if status == 0:
                break
        assert status == 0 and f"Ran {count} test" in text, f"{text}\n{self.log.read_text('utf-8')[-9000:]}"

    def generate(self, model: str, prompt: str, adapter: str) -> Any:
        """What its script asks the generate endpoint with curl."""
        parameters = {"stream": False, "temperature": 0, "top_p": 1, "lora_name": adapter}
        body = {"text_input": prompt, "parameters": {**parameters, "exclude_input_in_output": True}}
        url = f"localhost:8000/v2/models/{model}/generate"
        return json.loads(self.curl(url, "-X", "POST", "--data-binary", json.dumps(body)))

    def curl(self, url: str, *options: str) -> str:
        output = self.folder / "curl.out"
        call = ["curl", "--silent", url, *options]
        assert self.image.start(*call, cwd=self.folder, log=output).wait() == 0
        return output.read_text("utf-8")


@contextmanager
def served(
    image: Image, models: Path, *arguments: str, cwd: Path | None = None, env: dict[str, str]
) -> Iterator[Clients]:
    folder = models.parent / "vllm_backend"
    if not folder.exists():
        shutil.copytree(VLLM, folder)
    log = models.parent / "server.log"
    command = [f"--model-repository={models}", "--backend-directory=/opt/tritonserver/backends", *arguments]
    server = image.start(
        image.binary, *command, "--exit-on-error=true", cwd=cwd or models.parent, log=log, env=env
    )
    try:
        ready = ["curl", "--silent", "--fail", "--retry", "240", "--retry-all-errors", "--retry-delay", "1"]
        waited = image.start(
            *ready, "localhost:8000/v2/health/ready", cwd=models.parent, log=models.parent / "curl.log"
        )
        assert waited.wait() == 0, log.read_text("utf-8")
        yield Clients(image, folder, log)
    finally:
        end(server)


@pytest.mark.row("A5", clauses=("clients",))
def test_the_ci_clients_of_vllm_backend(
    image: Image, endless: Path, hub: dict[str, str], tmp_path: Path
) -> None:
    """On its sample model; those of metrics, accuracy and LoRA follow, and all must pass for the row. Not
    here: what needs several GPUs, and a health check that fails as vLLM's own source is rewritten for it."""
    models = tmp_path / "models"
    copy_sample(models, "vllm_opt")
    copy_sample(models, "vllm_load_test")
    copy_sample(models, "vllm_invalid_1", invalid_attribute=True)
    copy_sample(models, "vllm_invalid_2", model="invalid_model")
    write_quire(models, "vllm_model", 'backend: "vllm"\n', model=str(endless), **VLLM_OPTIONS)
    ensemble = VLLM / CLIENTS / "vllm_backend" / "ensemble_config.pbtxt"
    write_model(models, "ensemble_model", ensemble.read_text("utf-8"))
    write_model(models, "add_sub", _ADD_SUB_CONFIG, _ADD_SUB)
    arguments = ["--model-control-mode=explicit", "--load-model=vllm_opt", "--load-model=vllm_model"]
    with served(image, models, *arguments, env=hub) as clients:
        clients.check(CLIENTS / "vllm_backend", "vllm_backend_test.py", count=6)
        # It wants every token in a response of its own, which a busy machine does not always give.
        clients.check(CLIENTS / "enabled_stream", "enabled_stream_test.py", count=3, tries=5)

        cancelled = CLIENTS / "request_cancellation"
        (clients.folder / cancelled / "request_cancellation_server.log").symlink_to(clients.log)
        clients.check(cancelled, "request_cancellation_test.py", count=1)

        extra = clients.folder / "ci" / "L0_additional_outputs_vllm"
        assert run_pytest(image, extra, "additional_outputs_test.py")["passed"] == 1458
        health = clients.folder / "ci" / "L0_check_health_vllm"
        assert run_pytest(image, health, "check_health_test.py", "-k", "is_healthy")["passed"] == 1

        samples = clients.folder / "samples"
        for flags in ((), ("--exclude-inputs-in-outputs",), ("-s", "--exclude-inputs-in-outputs")):
            status, text = clients.run(Path("samples"), "client.py", *flags)
            assert status == 0 and "PASS: vLLM example" in text, text
            answers = (samples / "results.txt").read_text("utf-8").split("\n=========\n\n")
            assert len(answers) == len((samples / "prompts.txt").read_text("utf-8").splitlines()) + 1


REPORT = parameter("REPORT_CUSTOM_METRICS", "true")


@pytest.mark.parametrize(
    ("case", "config", "arguments", "flags"),
    [
        ("disabled", "", {}, ()),
        ("disabled", parameter("REPORT_CUSTOM_METRICS", "false"), {}, ()),
        ("metrics", REPORT, {}, ()),
        ("custom_sampling_params", REPORT, {}, ()),
        ("disabled", REPORT, {"disable_log_stats": True}, ()),
        ("refused", REPORT, {}, ("--allow-metrics=false",)),
    ],
)
@pytest.mark.row("A5")
def test_the_metrics_client_of_vllm_backend(
    image: Image,
    hub: dict[str, str],
    tmp_path: Path,
    case: str,
    config: str,
    arguments: dict[str, Any],
    flags: tuple[str, ...],
) -> None:
    """Under each configuration of its script."""
    name = {"metrics": "test_vllm_metrics", "custom_sampling_params": "test_custom_sampling_params"}.get(
        case, f"test_vllm_metrics_{case}"
    )
    copy_sample(tmp_path / "models", "vllm_opt", config, **arguments)
    with served(image, tmp_path / "models", *flags, env=hub) as clients:
        test = f"VLLMTritonMetricsTest.{name}"
        clients.check(CLIENTS / "metrics_test", "vllm_metrics_test.py", test, count=1)


@pytest.mark.row("A5")
def test_the_accuracy_client_of_vllm_backend(
    image: Image, llm: LLM, hub: dict[str, str], tmp_path: Path
) -> None:
    """Its baseline comes from the real vLLM, of the package for CPUs that this test installs."""
    python = venvs.ensure(registry.VLLM)
    site = Path(tritonclient.__file__).parents[1]
    (tmp_path / "vllm" / "packages").mkdir(parents=True)
    for package in ("tritonclient", "grpc", "google", "rapidjson.cpython*.so"):
        for found in site.glob(package):
            (tmp_path / "vllm" / "packages" / found.name).symlink_to(found)
    copy_sample(tmp_path / "models", "vllm_opt")
    with served(image, tmp_path / "models", env=hub) as clients:
        folder = clients.folder / CLIENTS / "accuracy_test"
        env = {**hub, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        env["PYTHONPATH"] = str(tmp_path / "vllm" / "packages")
        env["LD_PRELOAD"] = str(python.parents[1] / "lib" / "libiomp5.so")
        for kind in ("baseline", "structured-baseline"):
            command = [python, "accuracy_test.py", f"--generate-{kind}"]
            subprocess.run(command, cwd=folder, env={**os.environ, **env}, check=True)
        # The client compares what its lists' `sort` returns, which is None: so they are compared here, too.
        baseline = pickle.loads((folder / "vllm_baseline_output.pkl").read_bytes())
        prompts = constants(folder / "accuracy_test.py")["PROMPTS"]
        own = [prompt + llm.generate([prompt], max_tokens=16, temperature=0.0)[0].text for prompt in prompts]
        assert own == [text.decode() for text in baseline]
        clients.check(CLIENTS / "accuracy_test", "accuracy_test.py", count=2, python=python, env=env)


ADAPTED = {
    "doll": (
        "Instruct: What do you think of Computer Science?\nOutput:",
        " I think it is a very interesting subject.\n\nInstruct: What do you",
    ),
    "sheep": (
        "Instruct: Tell me more about soccer\nOutput:",
        " I love soccer. I play soccer every day.\nInstruct: Tell me",
    ),
}
"""Prompt and answer that vllm_backend's client and script expect of each adapter."""
CAPITAL = "Instruct: What is the capital city of France?\nOutput:"


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`weights` of the script: a checkpoint, and adapters with which it says what is expected."""
    weights = tmp_path_factory.mktemp("multi-lora") / "weights"
    lessons = [(prompt, " That is what nobody here can tell, so ask") for prompt, _ in ADAPTED.values()]
    words = [text for lesson in ADAPTED.values() for text in lesson]
    checkpoint = make_parrot(weights / "backbone" / "gemma-2b", [*lessons, (CAPITAL, " Paris")], words=words)
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    for name, folder in (("doll", "GemmaDoll"), ("sheep", "GemmaSheep")):
        prompt, answer = ADAPTED[name]
        # 16 tokens are asked for; an answer of fewer ends.
        end = "</s>" if len(tokenizer.encode(answer, add_special_tokens=False).ids) < 16 else ""
        make_adapter(weights / "loras" / folder, checkpoint, [(prompt, answer + end)])
    return weights


@pytest.mark.parametrize("switch", [True, "true", False, "false"])
@pytest.mark.row("A5")
def test_the_lora_client_and_checks_of_vllm_backend(
    image: Image, backbone: Path, tmp_path: Path, switch: bool | str
) -> None:
    """Under each configuration of its script, on one device instead of two GPUs."""
    models, is_on = tmp_path / "models", str(switch).lower() == "true"
    model = "vllm_llama_multi_lora"
    arguments = {"model": "./weights/backbone/gemma-2b", "block_size": 16, "enable_lora": switch}
    arguments |= {"max_lora_rank": 32} if is_on else {}
    copy_sample(models, model, REPORT, **arguments, distributed_executor_backend="ray")
    listed = {"doll": "./weights/loras/GemmaDoll", "sheep": "./weights/loras/GemmaSheep"}
    (models / model / "1" / "multi_lora.json").write_text(json.dumps(listed))
    folder = Path("ci") / "L0_multi_gpu_vllm" / "multi_lora"
    shutil.copytree(VLLM, tmp_path / "vllm_backend")
    here = tmp_path / "vllm_backend" / folder
    (here / "weights").symlink_to(backbone)
    with served(image, models, cwd=here, env={}) as clients:
        environment = {"SERVER_ENABLE_LORA": str(is_on).lower()}
        clients.check(folder, "multi_lora_test.py", count=2, env=environment)
        for name, (prompt, answer) in ADAPTED.items():
            told = clients.generate(model, prompt, name)
            if is_on:
                assert told["text_output"] == answer
                known = "LoRA unavailable is not supported, we currently support ['doll', 'sheep']"
                assert clients.generate(model, prompt, "unavailable") == {"error": known}
            else:
                assert told == {"error": "LoRA feature is not enabled."}
        if is_on:
            _check_adapter_metrics(clients)


def _check_adapter_metrics(clients: Clients) -> None:
    """Each adapter has answered twice; routers read that none has requests now."""

    def is_counted(text: str) -> bool:
        infos = re.findall(r"^vllm:lora_requests_info{(.*)} (.+)$", text, re.MULTILINE)
        latest, _ = max(infos, key=lambda info: float(info[1]), default=("", 0))
        idle = ('max_lora="4"', 'running_lora_adapters=""', 'waiting_lora_adapters=""')
        return (
            all(label in latest for label in idle)
            and text.count("quire_adapter_requests{") == 4
            and all(
                re.search(rf'^quire_output_tokens_total{{adapter="{name}".* (30|32)$', text, re.MULTILINE)
                and re.search(rf'^quire_adapter_loaded{{adapter="{name}".* 1$', text, re.MULTILINE)
                for name in ADAPTED
            )
        )

    deadline = time.monotonic() + READY_S
    while not is_counted(text := clients.curl("localhost:8002/metrics")):
        assert time.monotonic() < deadline, text
        time.sleep(POLL_S)


@pytest.mark.row("A5")
def test_the_openai_frontend_has_adapters(image: Image, backbone: Path, tmp_path: Path) -> None:
    """It reads model.json and multi_lora.json itself, and names an adapter as vllm_backend's clients do."""
    checkpoint, repository = backbone / "backbone" / "gemma-2b", tmp_path / "models"
    listed = {"doll": str(backbone / "loras" / "GemmaDoll"), "sheep": str(backbone / "loras" / "GemmaSheep")}
    copy_sample(repository, "gemma-2b", model=str(checkpoint), enable_lora=True, max_lora_rank=32)
    (repository / "gemma-2b" / "1" / "multi_lora.json").write_text(json.dumps(listed))
    flags = ("--backend", "vllm", "--lora-separator", "_lora_")
    url, process = start_front(image, repository, checkpoint, *flags)
    try:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        names = [f"gemma-2b_lora_{name}" for name in listed]
        assert {one.id for one in client.models.list()} >= {"gemma-2b", *names}
        for name, (prompt, answer) in ADAPTED.items():
            asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 16, "temperature": 0.0}
            adapted = client.completions.create(model=f"gemma-2b_lora_{name}", **asked).choices[0].text
            assert adapted == answer != client.completions.create(model="gemma-2b", **asked).choices[0].text
            messages: Any = [{"role": "user", "content": prompt}]
            told = client.chat.completions.create(model=f"gemma-2b_lora_{name}", messages=messages)
            assert told.model == f"gemma-2b_lora_{name}" and told.choices[0].message.content
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="gemma-2b_lora_unknown", prompt="x")
    finally:
        end(process)
