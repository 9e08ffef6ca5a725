"""Scores on the wire: how they are asked for, of which texts, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.config import FrontendConfig  # noqa: E402
from quire.errors import InvalidArgumentError  # noqa: E402
from quire.layers.pooling import Classifier, Pooling  # noqa: E402
from quire.request.sampling_params import PoolingParams, SamplingParams  # noqa: E402
from quire.triton.request_handle import RequestHandle  # noqa: E402
from quire.triton.request_parser import RequestParser  # noqa: E402
from quire_ensemble.tokenizer import Tokenizer  # noqa: E402
from tests.fixtures.encoders import set_template  # noqa: E402
from tests.fixtures.fake_pb_utils import InferenceRequest  # noqa: E402
from tests.fixtures.fake_runner import generate_alone  # noqa: E402
from tests.triton.test_request_parser import INFO, text, tokenizer  # noqa: E402, F401
from tests.triton.test_responder import MAX_MODEL_LEN  # noqa: E402
from tests.triton.test_usage import Harness, data, harness, texts  # noqa: E402, F401

POOLING = Pooling(classifier=Classifier(("no",), "sigmoid"), generates=False, why_not="it gives scores")
WANTED = {"return_scores": np.array([True])}
IDS = {"input_ids": np.array([5, 6, 7], np.int32)}


def parse(tokenizer: Any, inputs: dict[str, Any], pooling: Pooling = POOLING, **options: Any) -> Any:  # noqa: F811
    info = msgspec.structs.replace(INFO, pooling=pooling)
    config = FrontendConfig(max_prompt_bytes=1000)
    parser = RequestParser(tokenizer, SamplingParams(), lambda: info, config, decoupled=True)
    return parser.parse(parser.read(InferenceRequest(inputs, **options)))


def strings(*values: str) -> np.ndarray:
    return np.array([value.encode() for value in values], np.object_)


def test_who_asks_for_them_gets_no_tokens(tokenizer: Tokenizer) -> None:  # noqa: F811
    """By the name of an output or by a flag; with the activation of the checkpoint, or without."""
    named = parse(tokenizer, IDS, requested=["scores"])
    whole = SamplingParams(dimensions=1, pooling=PoolingParams(task="classify"), max_tokens=1)
    assert named.params == whole and named.final_outputs == {"scores"} and named.labels == ("no",)
    flagged = parse(tokenizer, {**IDS, **WANTED, "use_activation": np.array([False])})
    assert flagged.params.pooling == PoolingParams(task="classify", use_activation=False)
    assert flagged.final_outputs == {"scores", "label", "finish_reason", "num_input_tokens"}
    longest = np.array([5] * INFO.max_model_len, np.int32)
    assert len(parse(tokenizer, {"input_ids": longest, **WANTED}).prompt_token_ids) == INFO.max_model_len


def test_pairs_of_texts(tokenizer: Tokenizer, tmp_path: Path) -> None:  # noqa: F811
    """As many first texts, or one for all; the token where the second text begins is known."""
    tokenizer.hf.save_pretrained(tmp_path)
    set_template(tmp_path, "<s> $A </s>", "<s> $A </s> $B:1 </s>:1")
    own = Tokenizer(tmp_path)
    ids = {name: own.encode(name, add_special_tokens=False) for name in ("a", "b", "fox")}
    for firsts in (("a",), ("a", "a")):
        pairs = {"text_input": strings(*firsts), "text_pair": strings("b", "fox")}
        parsed = parse(own, {**pairs, **WANTED})
        assert "batch_index" in parsed.final_outputs
        for prompt, second in zip((parsed, *parsed.others), ("b", "fox"), strict=True):
            assert prompt.prompt_token_ids == [1, *ids["a"], 2, *ids[second], 2]
            assert prompt.params.pooling.second_text == len(ids["a"]) + 2


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (IDS, "return_scores: must be true: this checkpoint generates no tokens"),
        ({**IDS, "return_embedding": np.array([True])}, "embedding: is not supported: it gives scores"),
        ({**IDS, **WANTED, "return_embedding": np.array([True])}, "return_scores: must not be true beside"),
        ({**IDS, **WANTED, "dimensions": np.array([3], np.int32)}, "dimensions: is of an embedding, and"),
        ({**IDS, "use_activation": np.array([True])}, "use_activation: is of scores"),
        ({**IDS, **WANTED, "n": np.array([2], np.int32)}, "n: must not be given where an embedding or"),
        ({**IDS, **WANTED, "text_pair": strings("a")}, "text_pair: needs text_input and return_scores"),
        (
            {"text_input": strings("a", "b"), "text_pair": strings("a", "b", "c"), **WANTED},
            r"text_pair: must hold as many texts as text_input \(2\), got 3",
        ),
        (
            {"text_input": strings("a"), "text_pair": strings("b", "fox " * 100), **WANTED},
            r"text_pair\[1\]: .*at most 64 \(max_model_len\)",
        ),
        (
            {"text_input": strings("a" * 100), "text_pair": strings(*["b"] * 10), **WANTED},
            "text_pair: at most 1000 bytes, got 1010",
        ),
        (
            {"text_input": strings("a"), "text_pair": np.array([b"\xff"], np.object_), **WANTED},
            "text_pair: invalid UTF-8",
        ),
        ({"input_ids": np.array([5] * 65, np.int32), **WANTED}, r"prompt: 65 tokens, at most 64"),
    ],
    ids=range(12),
)
def test_what_is_wrong_is_named(tokenizer: Tokenizer, inputs: dict[str, Any], message: str) -> None:  # noqa: F811
    with pytest.raises(InvalidArgumentError, match=message):
        parse(tokenizer, inputs)


def test_a_model_without_scores_says_so(tokenizer: Tokenizer) -> None:  # noqa: F811
    with pytest.raises(InvalidArgumentError, match="scores: are not supported: the checkpoint is no class"):
        parse(tokenizer, {**IDS, **WANTED}, Pooling())
    with pytest.raises(InvalidArgumentError, match="text_pair: needs text_input and return_scores"):
        parse(tokenizer, {"text_input": text("a"), "text_pair": strings("b")}, Pooling())


def test_a_response_has_scores_and_the_largest_ones_label(harness: Harness) -> None:  # noqa: F811
    harness.core.info = dataclasses.replace(harness.core.info, pooling=POOLING)
    parsed = parse(None, {**IDS, **WANTED})
    sender = fake_pb_utils.ResponseSender()
    harness.responder.submit(RequestHandle(sender, "s", "s"), parsed)
    (response,) = data(sender)
    expected = generate_alone([5, 6, 7], SamplingParams(dimensions=1), MAX_MODEL_LEN)[0][0]
    assert response.tensors["scores"].tobytes() == expected.to_bytes(4, "little")
    assert texts([response], "label") == ["no"]
