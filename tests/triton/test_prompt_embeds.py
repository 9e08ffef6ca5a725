"""A prompt given as embeddings: checked like any other, and known to the prefix cache by its content."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from quire.errors import InvalidArgumentError
from tests.triton import test_request_parser
from tests.triton.test_request_parser import INFO, parse

ROWS = np.arange(24, dtype=np.float32).reshape(3, 8)


@pytest.mark.row("A33")
def test_all_of_the_prompt_is_one_span_of_rows() -> None:
    parsed = parse(None, {"prompt_embeds": ROWS})
    assert parsed.prompt_token_ids == [0, 0, 0] and parsed.embeds.spans == [(0, 3)]
    assert np.array_equal(parsed.embeds.embeds.open(), ROWS)
    (same,) = parse(None, {"prompt_embeds": ROWS.copy()}).embeds.hashes
    (other,) = parse(None, {"prompt_embeds": ROWS + 1}).embeds.hashes
    assert parsed.embeds.hashes == [same] and same != other


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"prompt_embeds": ROWS[:0]}, "prompt_embeds: must hold at least one row"),
        (
            {"prompt_embeds": ROWS[:, :4]},
            "prompt_embeds: rows of 4 numbers, the model has a hidden size of 8",
        ),
        ({"prompt_embeds": np.zeros((65, 8), np.float32)}, "prompt_embeds: at most 512 elements"),
        ({"prompt_embeds": ROWS, "input_ids": np.array([1], np.int32)}, "prompt: exactly one of"),
        ({"prompt_embeds": ROWS, "image_embeds": ROWS}, "prompt_embeds: must not be given with image_embeds"),
        ({"image_embeds": ROWS, "prompt_embeds": ROWS}, "prompt_embeds: must not be given with image_embeds"),
        ({"prompt_embeds": ROWS, "image_spans": np.array([[0, 3]], np.int32)}, "image_spans: must not be"),
        ({"prompt_embeds": ROWS, "prompt_logprobs": np.array([1], np.int32)}, "prompt_logprobs: a prompt"),
        ({"prompt_embeds": ROWS, "exclude_input_in_output": np.array([False])}, "exclude_input_in_output: "),
    ],
    ids=range(9),
)
def test_what_is_wrong_is_named(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        parse(None, inputs)


def test_a_model_with_three_axes_wants_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    info = msgspec.structs.replace(INFO, takes_position_ids=True)
    monkeypatch.setattr(test_request_parser, "INFO", info)
    with pytest.raises(InvalidArgumentError, match="position_ids: the model has M-RoPE and needs them"):
        parse(None, {"prompt_embeds": ROWS})
    positions = np.tile(np.arange(3, dtype=np.int32), (3, 1))
    assert parse(None, {"prompt_embeds": ROWS, "position_ids": positions}).embeds.position_ids
