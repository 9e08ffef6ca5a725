"""Wrong images through the real server: each is refused by name, and a good request beside it undisturbed."""

from __future__ import annotations

import base64
import io
import json
import re
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from tests.e2e.triton_calls import Reply, stream
from tests.e2e.vision import VisionServer, picture
from tests.fixtures.server import ServerProcess

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

GOOD = picture(1)


@dataclass
class Served:
    server: ServerProcess
    expected: list[int]
    """What the good request is answered when it is alone."""

    def preprocessor(self) -> psutil.Process:
        (found,) = self.server.running("llava_vision_preprocessor/1/model.py")
        return found


def request(content: Any, **inputs: Any) -> dict[str, Any]:
    messages = json.dumps([{"role": "user", "content": content}])
    return {"messages": messages, "stream": True, "max_tokens": 8, "ignore_eos": True, **inputs}


def parts(count: int) -> list[dict[str, Any]]:
    return [*({"type": "image"} for _ in range(count)), {"type": "text", "text": "what?"}]


def url_part(url: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]


def send(server: ServerProcess, inputs: dict[str, Any]) -> Reply:
    return stream(server.grpc_url, "llava_vision_chat", inputs)


@pytest.fixture(scope="module")
def served(vision: VisionServer) -> Served:
    reply = send(vision.server, request(parts(1), image=[GOOD]))
    assert reply.error is None
    return Served(vision.server, reply.token_ids)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims a size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(100))), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def one_colour(width: int, height: int) -> bytes:
    """A WebP of 40 bytes, whole and in order, of any size."""
    out = io.BytesIO()
    Image.new("RGB", (width, height), (9, 80, 200)).save(out, "WEBP", lossless=True, method=0)
    return out.getvalue()


def encoded(kind: str, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.new(mode, (32, 32)).save(out, kind)
    return out.getvalue()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "not an image": (request(parts(1), image=[b"hello"]), r"image\[0\]"),
    "the second is not an image": (request(parts(2), image=[GOOD, b"hello"]), r"image\[1\]"),
    "truncated": (request(parts(1), image=[GOOD[: len(GOOD) // 2]]), r"image\[0\]"),
    "a bomb": (request(parts(1), image=[bomb(50_000, 50_000)]), r"image\[0\].*33554432"),
    "many pixels in all": (
        request(parts(3), image=[one_colour(5000, 5000)] * 3),
        r"67108864 pixels.*max_request_pixels",
    ),
    "too many bytes": (request(parts(1), image=[GOOD + bytes(20 * 2**20)]), r"image\[0\].*20971520"),
    "unsupported format": (request(parts(1), image=[encoded("TIFF")]), r"image\[0\].*JPEG"),
    "too many images": (request(parts(17), image=[GOOD] * 17), r"16"),
    "more placeholders than images": (request(parts(2), image=[GOOD]), r"2 image parts.*1 image"),
    "more images than placeholders": (request(parts(1), image=[GOOD, GOOD]), r"1 image part.*2 images"),
    "no image for a placeholder": (request(parts(1)), r"1 image part.*0 images"),
    "a URL to fetch": (request(url_part("http://127.0.0.1/x.png")), r"http"),
    "a file": (request(url_part("file:///etc/passwd")), r"file"),
    "broken base64": (request(url_part("data:image/png;base64,@@@")), r"base64"),
    "both kinds of images": (
        request(parts(1), image=[GOOD], image_pixels=np.zeros((1, 8, 8, 3), np.uint8)),
        r"image_pixels",
    ),
}


@pytest.mark.row("H1")
@pytest.mark.parametrize("name", BAD)
def test_wrong_images_are_refused_and_nothing_else_is_disturbed(served: Served, name: str) -> None:
    inputs, message = BAD[name]
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(send, served.server, request(parts(1), image=[GOOD]))
        reply = pool.submit(send, served.server, inputs).result()
    assert reply.error is not None and not reply.results
    assert re.search(message, reply.error.message()), reply.error.message()
    assert good.result().token_ids == served.expected
    assert send(served.server, request(parts(1), image=[GOOD])).token_ids == served.expected


def test_status_codes_are_invalid_argument(served: Served) -> None:
    """The unary call tells the code, which a stream of this server does not."""
    from quire_client import Client, InvalidArgument

    with Client(served.server.grpc_url) as client:
        for image in (b"hello", bomb(50_000, 50_000)):
            with pytest.raises(InvalidArgument, match=r"image\[0\]"):
                client.chat("what?", images=[image], model="llava_vision_chat", max_tokens=4)


def test_a_bomb_costs_no_memory_and_twenty_megapixels_little(served: Served) -> None:
    process = served.preprocessor()

    def peak() -> float:
        with open(f"/proc/{process.pid}/status") as status:
            line = next(line for line in status if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024

    before = peak()
    for _ in range(4):
        assert send(served.server, request(parts(1), image=[bomb(50_000, 50_000)])).error is not None
    after_bomb = peak()
    assert after_bomb - before < 200, "MiB; decoded it would be 7153"
    large = picture(2, (5000, 4000), kind="JPEG")
    reply = send(served.server, request(parts(1), image=[base64.b64encode(large)]))
    assert reply.error is None and len(reply.token_ids) == 8
    after_large = peak()
    print(f"\npreprocessor peak: {before:.0f} MiB, bomb {after_bomb:.0f} MiB, 20 MP {after_large:.0f} MiB")
    assert after_large - before < 600, "MiB; 57 MiB of pixels, and what the image processor makes of them"
