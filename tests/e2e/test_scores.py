"""Encoders, rerankers and reward models behind a real server: tensors, the client library and the gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from quire_client import Client
from quire_client.openai.app import GatewaySettings
from tests.fixtures.encoders import make_encoder
from tests.fixtures.server import ServeRepository
from tests.unit.test_classifiers import make_classifier
from tests.unit.test_openai_gateway import WAIT, gateway

pytestmark = pytest.mark.server

TEXTS = ["a red fox", "the quick brown fox", "two old friends " * 9]
QUERY = "which fox is quick?"


@pytest.mark.row("A30", clauses=("many", "scores"))
@pytest.mark.row("E11", clauses=("equal",))
def test_scores_and_embeddings_of_many_texts(tmp_path: Path, serve_repository: ServeRepository) -> None:
    from transformers import AutoTokenizer

    repository = tmp_path / "repository"
    folders = {name: repository / name / "1" for name in ("encoder", "reranker", "reward")}
    encoder = make_encoder("Bert", folders["encoder"])
    labels = {"num_labels": 1, "id2label": {0: "relevant"}}
    reranker = make_encoder("XLMRoberta", folders["reranker"], head="ForSequenceClassification", **labels)
    reward = make_classifier("llama", folders["reward"], "Llama", 1)
    for name in folders:
        (repository / name / "config.pbtxt").write_text('backend: "quire"\n')
    server = serve_repository(repository)
    tokenizers = {name: AutoTokenizer.from_pretrained(folder) for name, folder in folders.items()}

    def logit(model: Any, name: str, *texts: str) -> float:
        ids = torch.tensor([tokenizers[name](*texts)["input_ids"]])
        with torch.inference_mode():
            return float(model(ids).logits[0, 0])

    raw = [logit(reranker, "reranker", QUERY, text) for text in TEXTS]
    expected = torch.tensor(raw).sigmoid().numpy()
    with Client(server.grpc_url) as client:
        chunks = list(
            client.stream(
                [QUERY], text_pair=TEXTS, model="reranker", outputs=["scores", "label", "batch_index"]
            )
        )
        found = {chunk.extras.batch_index: chunk.extras for chunk in chunks if chunk.extras.scores}
        assert {one.label for one in found.values()} == {"relevant"}
        np.testing.assert_allclose([found[item].scores[0] for item in range(3)], expected, atol=1e-5)
        logits = client.score(QUERY, TEXTS, model="reranker", use_activation=False)
        np.testing.assert_allclose([one for (one,) in logits.values], raw, atol=1e-5)
        rewards = client.classify(TEXTS, model="reward", use_activation=False)
        wanted = [logit(reward, "reward", text) for text in TEXTS]
        np.testing.assert_allclose([one for (one,) in rewards.values], wanted, atol=1e-4)
        for text, vector in zip(TEXTS, client.embed(TEXTS, model="encoder").vectors, strict=True):
            with torch.inference_mode():
                state = encoder(torch.tensor([tokenizers["encoder"](text)["input_ids"]])).last_hidden_state
            np.testing.assert_allclose(vector, torch.nn.functional.normalize(state[0, 0], dim=0), atol=1e-5)
    with gateway(GatewaySettings(server.grpc_url)) as base:

        def ask(path: str, **body: Any) -> Any:
            return httpx.post(f"{base}/v1/{path}", json=body, timeout=WAIT).json()

        answer = ask("rerank", model="reranker", query=QUERY, documents=TEXTS, top_n=2)
        best = np.argsort(-expected)[:2]
        assert [one["index"] for one in answer["results"]] == best.tolist()
        assert [one["document"]["text"] for one in answer["results"]] == [TEXTS[index] for index in best]
        np.testing.assert_allclose(
            [one["relevance_score"] for one in answer["results"]], expected[best], atol=1e-5
        )
        answer = ask("score", model="reranker", text_1=QUERY, text_2=TEXTS)
        np.testing.assert_allclose([one["score"] for one in answer["data"]], expected, atol=1e-5)
        messages = [{"role": "user", "content": QUERY}, {"role": "assistant", "content": TEXTS[0]}]
        (one,) = ask("classify", model="reward", messages=messages, use_activation=False)["data"]
        rendered = tokenizers["reward"].apply_chat_template(messages, tokenize=False)
        ids = tokenizers["reward"](rendered, add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            wanted = float(reward(torch.tensor([ids])).logits[0, 0])
        np.testing.assert_allclose(one["probs"], [wanted], atol=1e-4)
        assert (one["label"], one["num_classes"]) == ("LABEL_0", 1)
        for path, body, param, reason in (
            ("score", {"model": "encoder", "text_1": "a", "text_2": ["b"]}, "scores", "no classifier"),
            ("classify", {"model": "reranker", "input": "fox " * 600}, "input", "at most 128"),
            ("rerank", {"model": "reranker", "query": "a", "documents": []}, "documents", "1 to 2048"),
            ("completions", {"model": "reward", "prompt": "a"}, "return_scores", "generates no tokens"),
        ):
            error = ask(path, **body)["error"]
            assert (error["param"], reason in error["message"]) == (param, True), json.dumps(error)
