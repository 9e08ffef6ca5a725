"""Images through the ensemble `vision_chat` of a real server; transformers' whole model is the oracle."""

from __future__ import annotations

import base64
import json
import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire_client import Client, InvalidArgument
from quire_ensemble.triton_vision_encoder import NICENESS
from tests.e2e.conftest import held
from tests.e2e.triton_calls import stream
from tests.e2e.vision import VISION_KINDS, VisionServer, picture
from tests.fixtures.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

MAX_TOKENS = 12
SIZES = ((64, 48), (30, 90), (120, 56))


def conversation(num_images: int, text: str) -> list[dict[str, Any]]:
    parts = [{"type": "image"} for _ in range(num_images)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def ask(vision: VisionServer, model: str, messages: list[dict[str, Any]], images: list[bytes]) -> list[int]:
    inputs: dict[str, Any] = {
        "messages": json.dumps(messages),
        "stream": True,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
    }
    if images:
        inputs["image"] = list(images)
    reply = stream(vision.server.grpc_url, model, inputs)
    assert reply.error is None, reply.error
    assert reply.finals == 1
    return reply.token_ids


@pytest.mark.row("H1", clauses=("tokens", "bytes"))
@pytest.mark.row("H2", clauses=("equal",))
@pytest.mark.row("H3", clauses=("accepts",))
@pytest.mark.row("H4", clauses=("llava",))
@pytest.mark.row("H5", clauses=("tokens", "qwen3"))
@pytest.mark.row("A39", clauses=("vision",))
@pytest.mark.parametrize("kind", VISION_KINDS)
def test_answers_are_those_of_transformers(vision: VisionServer, kind: str) -> None:
    model = f"{kind}_vision_chat"
    for count in (0, 1, 3):
        images = [picture(count * 10 + i, SIZES[i]) for i in range(count)]
        messages = conversation(count, f"look at {count}")
        expected = vision.whole[kind].answer(messages, images, MAX_TOKENS)
        assert ask(vision, model, messages, images) == expected, f"{count} images"
    other = ask(vision, model, conversation(1, "look at 1"), [picture(99, SIZES[0])])
    first = ask(vision, model, conversation(1, "look at 1"), [picture(10, SIZES[0])])
    assert first != other, "the answers must depend on the image for this test to see anything"


@pytest.mark.row("H1", clauses=("logits",))
@pytest.mark.row("H4", clauses=("logits",))
@pytest.mark.row("H5", clauses=("logits",))
@pytest.mark.parametrize("kind", VISION_KINDS)
def test_log_probabilities_are_those_of_transformers(vision: VisionServer, kind: str) -> None:
    for count in (0, 1, 3):
        images = [picture(count * 20 + i, SIZES[i]) for i in range(count)]
        messages = conversation(count, f"what of {count}")
        token_ids, expected = vision.whole[kind].generate(messages, images, MAX_TOKENS)
        inputs: dict[str, Any] = {"messages": json.dumps(messages), "stream": True, "max_tokens": MAX_TOKENS}
        inputs |= {"ignore_eos": True, "num_logprobs": 20, **({"image": images} if images else {})}
        reply = stream(vision.server.grpc_url, f"{kind}_vision_chat", inputs)
        assert (reply.error, reply.token_ids) == (None, token_ids)
        entries = [entry for r in reply.results for entry in json.loads(r.as_numpy("logprobs")[0])]
        assert len(entries) == MAX_TOKENS
        for entry, row in zip(entries, expected, strict=True):
            values = list(entry["top"].values())
            assert values == pytest.approx(row[list(map(int, entry["top"]))].tolist(), abs=1e-4)
            assert values == pytest.approx(row.topk(20).values.tolist(), abs=1e-4), "the best, best first"


@pytest.mark.row("H11", whole=True)
@pytest.mark.row("B19", clauses=("cache",))
@pytest.mark.parametrize("kind", VISION_KINDS)
def test_the_second_use_of_an_image_runs_no_encoder(vision: VisionServer, kind: str) -> None:
    images = [picture(200 + i, SIZES[i]) for i in range(2)]
    messages = conversation(2, "twice")
    first = ask(vision, f"{kind}_vision_chat", messages, images)
    runs = vision.metric("quire_vision_encoder_runs_total", kind)
    hits = vision.metric("quire_vision_cache_hits_total", kind)
    assert runs >= 1
    # Another text before the image: the prefix cache does not help, only the encoder's does.
    elsewhere = [{"role": "user", "content": "first"}, *messages]
    expected = vision.whole[kind].answer(
        [{"role": "user", "content": [{"type": "text", "text": "first"}]}, *messages], images, MAX_TOKENS
    )
    assert ask(vision, f"{kind}_vision_chat", messages, images) == first
    assert ask(vision, f"{kind}_vision_chat", elsewhere, images) == expected
    assert vision.metric("quire_vision_encoder_runs_total", kind) == runs
    assert vision.metric("quire_vision_cache_hits_total", kind) == hits + 4


@pytest.mark.row("H1", clauses=("others",))
@pytest.mark.parametrize("how", ["base64", "data URL in the messages", "raw pixels", "base64 over HTTP"])
def test_every_way_to_give_an_image(vision: VisionServer, how: str) -> None:
    raw = picture(300, (56, 56))
    messages = conversation(1, "any way")
    expected = vision.whole["qwen2_vl"].answer(messages, [raw], MAX_TOKENS)
    text = base64.b64encode(raw).decode()
    inputs: dict[str, Any] = {
        "messages": json.dumps(messages),
        "stream": True,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
    }
    if how == "base64 over HTTP":
        body = json.dumps({**inputs, "image": [text]}).encode()
        url = f"http://{vision.server.http_url}/v2/models/qwen2_vl_vision_chat/generate_stream"
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=120) as reply:
            events = [json.loads(line[6:]) for line in reply.read().decode().splitlines() if line]
        got: list[int] = []
        for event in events:
            ids = event["output_ids"]
            got += ids if isinstance(ids, list) else [ids]
        assert got == expected
        return
    if how == "base64":
        inputs["image"] = [text]
    elif how == "raw pixels":
        import io

        inputs["image_pixels"] = np.asarray(Image.open(io.BytesIO(raw)))[None]
    else:
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}
        messages[0]["content"][0] = part
        inputs["messages"] = json.dumps(messages)
    assert stream(vision.server.grpc_url, "qwen2_vl_vision_chat", inputs).token_ids == expected


@pytest.mark.row("H2", clauses=("batch",))
@pytest.mark.row("B23", clauses=("vision",))
@pytest.mark.row("H1")
def test_thirty_two_mixed_requests_at_once(vision: VisionServer) -> None:
    """Text and images together: every stream has the tokens of its own images, in order, and both models
    before the generator work on several requests at a time."""
    whole = vision.whole["llava"]
    work = []
    for index in range(32):
        images = [] if index % 2 else [picture(400 + index, SIZES[index % 3])]
        messages = conversation(len(images), f"mixed {index}")
        work.append((messages, images, whole.answer(messages, images, MAX_TOKENS)))
    steps = ("llava_vision_preprocessor", "llava_vision_encoder")
    before = {step: num_batches(vision, step) for step in steps}
    with ThreadPoolExecutor(32) as pool, ExitStack() as stack:
        holds = [stack.enter_context(ExitStack()) for _ in steps]
        waiting = [
            hold.enter_context(held(vision.server, step)) for hold, step in zip(holds, steps, strict=True)
        ]
        got = [pool.submit(ask, vision, "llava_vision_chat", *item[:2]) for item in work]
        for hold, num_waiting in zip(holds, waiting, strict=True):
            wait_until(lambda num_waiting=num_waiting: num_waiting() >= 24)  # type: ignore[misc]
            hold.close()
    assert [one.result() for one in got] == [expected for _, _, expected in work]
    assert all(num_batches(vision, step) > before[step] for step in steps)


def test_the_encoder_gives_way_to_decoding(vision: VisionServer) -> None:
    (stub,) = vision.server.running("/llava_vision_encoder/1/model.py")
    threads = Path(f"/proc/{stub.pid}/task").iterdir()
    found = max(os.getpriority(os.PRIO_PROCESS, int(thread.name)) for thread in threads)
    assert found == min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)


def num_batches(vision: VisionServer, model: str) -> int:
    """How many batches of several requests a model has computed."""
    entries = vision.statistics(model).batch_stats
    return sum(int(entry.compute_infer.count) for entry in entries if entry.batch_size > 1)


@pytest.mark.row("H1")
def test_our_client_sends_images(vision: VisionServer, tmp_path: Path) -> None:
    raw = picture(500)
    file = tmp_path / "picture.png"
    file.write_bytes(raw)
    expected = vision.whole["llava"].answer(conversation(1, "client"), [raw], MAX_TOKENS)
    with Client(vision.server.grpc_url) as client:
        for image in (raw, file):
            result = client.chat(
                "client", images=[image], model="llava_vision_chat", max_tokens=MAX_TOKENS, ignore_eos=True
            )
            assert list(result.token_ids) == expected
        with pytest.raises(InvalidArgument, match=r"image\[0\]"):
            client.chat("client", images=[b"no image"], model="llava_vision_chat")


@pytest.mark.row("H3")
def test_the_generator_takes_embeddings(vision: VisionServer) -> None:
    """Rows of a random image and none of our vision models: what a user's own encoder would send."""
    whole = vision.whole["llava"]
    hidden = whole.model.config.text_config.hidden_size
    rng = np.random.default_rng(0)
    token_ids = np.array([5, 6, *[whole.image_token] * 4, 7], dtype=np.int32)
    inputs: dict[str, Any] = {
        "input_ids": token_ids,
        "image_embeds": rng.standard_normal((4, hidden), dtype=np.float32),
        "image_spans": np.array([[2, 4]], dtype=np.int32),
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
    }
    first = stream(vision.server.grpc_url, "llava_generator", inputs)
    assert first.error is None
    assert stream(vision.server.grpc_url, "llava_generator", inputs).token_ids == first.token_ids
    inputs["image_embeds"] = rng.standard_normal((4, hidden), dtype=np.float32)
    assert stream(vision.server.grpc_url, "llava_generator", inputs).token_ids != first.token_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_spans": np.array([[2, 3]], dtype=np.int32)}, "image_embeds: 4 rows, but image_spans hold 3"),
        ({"image_spans": np.array([[5, 4]], dtype=np.int32)}, "image_spans: .0. .5, 4. must"),
        ({"image_embeds": np.zeros((4, 5), dtype=np.float32)}, "rows of 5 numbers, .* hidden size of"),
        ({"position_ids": np.zeros((3, 7), dtype=np.int32)}, "position_ids: the model has no M-RoPE"),
        ({"text_input": "x", "input_ids": None}, "must be given as input_ids"),
    ],
)
def test_wrong_embeddings_are_refused(vision: VisionServer, change: dict[str, Any], message: str) -> None:
    whole = vision.whole["llava"]
    hidden = whole.model.config.text_config.hidden_size
    inputs: dict[str, Any] = {
        "input_ids": np.array([5, 6, *[whole.image_token] * 4, 7], dtype=np.int32),
        "image_embeds": np.zeros((4, hidden), dtype=np.float32),
        "image_spans": np.array([[2, 4]], dtype=np.int32),
        **change,
    }
    given = {name: value for name, value in inputs.items() if value is not None}
    reply = stream(vision.server.grpc_url, "llava_generator", given)
    assert reply.error is not None
    assert "INVALID_ARGUMENT" in str(reply.error.status()) or reply.error.status() is None
    import re

    assert re.search(message, reply.error.message()), reply.error.message()
