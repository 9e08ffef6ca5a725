"""Models behind a real server that are no plain decoders: on transformers' code, by a file of their own, with
states in place of keys and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.drive import hf_greedy, hf_model
from tests.fixtures.plain_checkpoint import make_plain_checkpoint
from tests.fixtures.server import ServeRepository

pytestmark = pytest.mark.server

PROMPT = [*range(10, 40)]
CONFIG = 'backend: "quire"\nparameters { key: "%s" value { string_value: "%s" } }\n'


def ask(url: str, **body: Any) -> Any:
    data = json.dumps(body).encode() if body else None
    with urlopen(Request(f"http://{url}", data)) as answer:
        return json.load(answer)


@pytest.mark.row("E12", clauses=("generic",))
@pytest.mark.row("E13", clauses=("sample",))
def test_models_without_a_family_are_served(tmp_path: Path, serve_repository: ServeRepository) -> None:
    repository = tmp_path / "repository"
    stated = {"general": ("model_impl", "transformers"), "own": ("model_class", "plain_model.py:PlainModel")}
    make_checkpoint("cohere2", repository / "general" / "1")
    make_plain_checkpoint(repository / "own" / "1")
    for name, parameter in stated.items():
        (repository / name / "config.pbtxt").write_text(CONFIG % parameter)
    server = serve_repository(repository)
    answers = {}
    for name, (key, value) in stated.items():
        url = f"{server.http_url}/v2/models/{name}"
        assert ask(f"{url}/config")["parameters"] == {key: {"string_value": value}}
        answers[name] = ask(f"{url}/generate", input_ids=PROMPT, max_tokens=16, ignore_eos=True)["output_ids"]
    assert answers["general"] == hf_greedy(hf_model(repository / "general" / "1"), PROMPT, 16)
    assert len(set(answers["own"])) > 8
    (line,) = (line for line in server.log_text().splitlines() if "transformers 5" in line)
    assert "Cohere2ForCausalLM; model_impl" in line and "a step takes longer" in line


def test_a_turn_of_a_chat_computes_its_new_tokens_where_layers_keep_states(
    tmp_path: Path, serve_repository: ServeRepository
) -> None:
    repository = tmp_path / "repository"
    families = ("qwen3_5", "nemotron_h", "lfm2")
    for family in families:
        make_checkpoint(family, repository / family / "1")
        (repository / family / "config.pbtxt").write_text('backend: "quire"\n')
    server = serve_repository(repository)
    for family in families:
        url = f"{server.http_url}/v2/models/{family}/generate"
        model, history = hf_model(repository / family / "1"), list[int]()
        for turn in range(6):
            question = [(7 * place + 31 * turn) % 500 + 5 for place in range(9 + 4 * turn)]
            prompt = history + question
            answer = ask(url, input_ids=prompt, max_tokens=12, ignore_eos=True, return_num_cached_tokens=True)
            assert answer["output_ids"] == hf_greedy(model, prompt, 12), (family, turn)
            assert len(prompt) - answer["num_cached_tokens"] <= len(question) + 64, "its tokens and a block"
            history = prompt + answer["output_ids"]
        assert answer["num_cached_tokens"] >= 64
