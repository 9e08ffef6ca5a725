"""Clients that others wrote, at the versions of docs/clients.md, against the server and the gateway.

They are installed from the package index. Their answers must be those of `quire_client`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from quire_client import Client
from quire_ensemble.builder import build_repository
from tests.e2e.conftest import write_generator
from tests.e2e.test_openai_gateway import gateway
from tests.fixtures.server import MODEL_REPOSITORY, ROOT, ServerProcess

pytestmark = pytest.mark.timeout(1200)

CLIENTS = (
    "openai==3.57.0",
    "langchain-openai==1.7.4",
    "litellm==1.110.2",
    "llama-index-llms-nvidia-triton==0.6.0",
    "tritonclient[http,grpc]==2.73.0",
    "lm-eval[api]==0.4.13",
)
TOKENIZERS = "transformers==5.24.0"
"""lm-eval's, of which it does not say that it needs it."""
AIPERF = "aiperf==0.13.0"
DEMO = MODEL_REPOSITORY / "generator" / "1" / "demo"
QUESTION = "What is 12 + 7?"
PROMPTS = [QUESTION, "What is 3 + 4?", "Hello", "What is 20 + 5?", "Reverse abc"]
CONTINUATION = " 12 + 7"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
LOADED = ("chat", "generator_unary", "tools-chat", "ensemble")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The demo, and beside it a model whose template has tools, and one with TensorRT-LLM's names."""
    folder = tmp_path_factory.mktemp("clients-server")
    models, taught = folder / "models", folder / "tools"
    shutil.copytree(DEMO, taught)
    template = taught / "chat_template.jinja"
    tools = "{% if tools %}<|system|><tool_call>{{ tools | tojson }}</tool_call><|end|>{% endif %}"
    template.write_text(tools + template.read_text("utf-8"), "utf-8")
    build_repository(taught, models, name_prefix="tools-", placement="path")
    config = "max_batch_size: 64\ninstance_group [{ count: 1, kind: KIND_MODEL }]\n"
    write_generator(models, "ensemble", DEMO, config=config)
    arguments = (f"--model-repository={models}", *(f"--load-model={name}" for name in LOADED))
    with ServerProcess(MODEL_REPOSITORY, folder, arguments) as one:
        yield one


def install(folder: Path, *packages: str) -> Path:
    """The `bin` of a new environment with these packages."""
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([*uv, "pip", "install", "--quiet", "--python", python, *packages], check=True)
    return folder / "bin"


def expected(grpc_url: str) -> dict[str, Any]:
    """What `quire_client` is told."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    with Client(grpc_url) as client:
        chat = client.chat(QUESTION, logprobs=0)
        forced = {"tools": [TOOL], "tool_choice": "required"}
        (call,) = client.chat(QUESTION, model="tools-chat", **forced).tool_calls
        likelihoods = []
        for prompt in PROMPTS:
            asked: dict[str, Any] = {"input_ids": ids(prompt + CONTINUATION), "prompt_logprobs": 0}
            (tokens,) = client.generate(model="generator", max_tokens=1, **asked).prompt_logprobs
            likelihoods.append(sum(token["logprob"] for token in tokens[len(ids(prompt)) :]))
        limits: Any = {"model": "generator", "max_tokens": 8}
        return {
            "chat": chat.text,
            "logprob": sum(token["logprob"] for part in chat.choices[0].logprobs for token in part),
            "tool": [call["function"]["name"], json.loads(call["function"]["arguments"])],
            "answer": client.generate(QUESTION, model="generator").text,
            "texts": [client.generate(prompt, **limits).text for prompt in PROMPTS],
            "ids": [client.generate(input_ids=ids(prompt), **limits).text for prompt in PROMPTS],
            "loglikelihood": likelihoods,
        }


def test_versions_are_those_of_the_documents() -> None:
    table = (ROOT / "docs" / "clients.md").read_text("utf-8")
    for pinned in (*CLIENTS, AIPERF):
        name, _, version = pinned.partition("==")
        assert f"**{name.partition('[')[0]} {version}**" in table


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.row("A28")
def test_answers_are_those_of_the_plain_client(server: ServerProcess, tmp_path: Path) -> None:
    python = install(tmp_path / "clients", *CLIENTS, TOKENIZERS) / "python"
    with gateway(server.grpc_url) as client:
        asked = {
            "gateway": str(client.base_url).rstrip("/"),
            "http": server.http_url,
            "grpc": server.grpc_url,
            "checkpoint": str(DEMO),
            "question": QUESTION,
            "prompts": PROMPTS,
            "continuation": CONTINUATION,
            "tool": TOOL,
        }
        # Nothing is looked for at a hub; litellm's list of prices is the one that it brings.
        offline = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        done = subprocess.run(
            [python, ROOT / "tests" / "fixtures" / "foreign_clients.py"],
            env=os.environ | offline,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    right = expected(server.grpc_url)
    assert right["chat"] == right["answer"] == "12 + 7 = 19"
    logprob, likelihoods = (
        pytest.approx(right["logprob"], abs=1e-3),
        pytest.approx(right["loglikelihood"], abs=1e-2),
    )
    whole = {"chat": right["chat"], "stream": right["chat"], "logprob": logprob}
    by_tensors = dict.fromkeys(("http", "http.aio", "grpc", "grpc.aio", "stream"), right["answer"])
    by_harness = {"loglikelihood": likelihoods, "completions": right["ids"]}
    assert answers == {
        "openai": {**whole, "tool": right["tool"], "completions": right["texts"]},
        "langchain-openai": {
            **whole,
            "async": right["chat"],
            "tool": right["tool"],
            "completions": right["texts"],
        },
        "litellm openai": {**whole, "tool": right["tool"]},
        "litellm hosted_vllm": whole,
        "litellm triton": dict.fromkeys(("generate", "infer", "stream"), right["answer"]),
        "llama-index": dict.fromkeys(("complete", "stream"), right["answer"]),
        "tritonclient": by_tensors,
        "lm-eval 1": by_harness,
        "lm-eval 4": by_harness,
    }


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.row("G24")
def test_aiperf_measures_the_gateway(server: ServerProcess, tmp_path: Path) -> None:
    programs = install(tmp_path / "aiperf", AIPERF)
    with gateway(server.grpc_url) as client:
        url = str(client.base_url).removesuffix("/v1/")
        command = [programs / "aiperf", "profile", "--url", url, "--model", "chat", "--endpoint-type", "chat"]
        command += ["--streaming", "--tokenizer", DEMO, "--request-count", "10", "--concurrency", "2"]
        command += ["--extra-inputs", "ignore_eos:true"]
        command += ["--isl", "20", "--osl", "10", "--ui", "none", "--artifact-dir", tmp_path / "figures"]
        environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        with tempfile.TemporaryDirectory() as leftovers:  # of a short name, for its sockets
            environment["TMPDIR"] = leftovers
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures" / "profile_export_aiperf.json").read_text("utf-8"))
    assert (figures["request_count"]["avg"], figures["error_summary"]) == (10, [])
    assert figures["total_usage_completion_tokens"]["avg"] == 10 * 10
    assert figures["time_to_first_token"]["min"] > 0
