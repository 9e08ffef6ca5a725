"""The attack set: what a client, a checkpoint or a web server may try, each refused and without effect.

What attacks do not reach is looked at too: files that code would leave, connections that would be opened,
memory that would be taken. Attacks on the running server are in tests/fault (crowds, hostile messages, fuzz).
"""

from __future__ import annotations

import asyncio
import base64
import http.server
import io
import json
import os
import pickle
import resource
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.fixtures import fake_pb_utils

fake_pb_utils.install()

from quire.config import FrontendConfig, ModelConfig  # noqa: E402
from quire.errors import CheckpointError, InvalidArgumentError  # noqa: E402
from quire.loader.load import load_model  # noqa: E402
from quire.request.sampling_params import SamplingParams  # noqa: E402
from quire.request.validation import check_logits_processors  # noqa: E402
from quire.triton.request_parser import RequestParser  # noqa: E402
from quire_client.openai.errors import RequestError  # noqa: E402
from quire_client.openai.images import ImageFetcher, ImagePolicy  # noqa: E402
from quire_client.openai.images import resolve as resolve_really  # noqa: E402
from quire_client.openai.intake import Intake  # noqa: E402
from quire_common.errors import InputError  # noqa: E402
from quire_ensemble.errors import TokenizerError  # noqa: E402
from quire_ensemble.images import ImageLimits, read_image  # noqa: E402
from quire_ensemble.tokenizer import Tokenizer  # noqa: E402
from tests.fixtures.checkpoints import make_checkpoint  # noqa: E402
from tests.triton.test_result_cache import make_info  # noqa: E402

ROOM = 256 * 2**20
"""Bytes that an attack may take beside what is in use."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path / "llama")


# --- checkpoints that bring code ---


class Evil:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.proof}",))


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def load(path: Path, **values: Any) -> None:
    load_model(ModelConfig(model=str(path), **values), torch.device("cpu"))


def named_code(file: str, checkpoint: Path, tmp_path: Path) -> None:
    """`auto_map` and classes of its own: what is known is loaded without them, what is not is refused."""
    proof = tmp_path / "proof"
    code = f"open({str(proof)!r}, 'w')\nclass Evil:\n    pass\n"
    (checkpoint / "evil.py").write_text(code)
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    edit(checkpoint / file, auto_map=dict.fromkeys(names, "evil.Evil"))
    Tokenizer(checkpoint)
    load(checkpoint)
    edit(checkpoint / file, auto_map=dict.fromkeys(names, "evil.Evil"), tokenizer_class="Evil")
    edit(checkpoint / "config.json", architectures=["Evil"], model_type="evil")
    with pytest.raises(CheckpointError, match="architecture 'Evil' is not supported"):
        load(checkpoint)
    try:
        Tokenizer(checkpoint)
    except TokenizerError:
        pass
    assert not proof.exists()


def code_in_pickles(name: str, form: str, checkpoint: Path, tmp_path: Path) -> None:
    """Refused unread, and where pickles are allowed refused as well; one that would unpack to 4 GB, too."""
    proof = tmp_path / "proof"
    (checkpoint / "model.safetensors").unlink()
    if form == "torch":
        torch.save({"a": torch.zeros(2), "evil": Evil(proof)}, checkpoint / name)
    elif form == "pickle":
        (checkpoint / name).write_bytes(pickle.dumps({"evil": Evil(proof)}))
    else:
        with zipfile.ZipFile(checkpoint / name, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("archive/data.pkl", pickle.dumps({"evil": Evil(proof)}))
            with archive.open("archive/data/0", "w") as data:
                for _ in range(256):
                    data.write(bytes(2**20))
    with pytest.raises(CheckpointError, match="weights are pickles, which may hold code"):
        load(checkpoint)
    with pytest.raises(CheckpointError, match=name):
        load(checkpoint, load_format="bin")
    assert not proof.exists()


def weights_elsewhere(shard: Any, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    (checkpoint / "model.safetensors").unlink()
    index = {"weight_map": {"model.embed_tokens.weight": shard}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises((CheckpointError, ValueError), match=r"not the name of a .* file|not found|null byte"):
        load(checkpoint)


def heads() -> dict[str, tuple[str, bytes]]:
    """Files whose first bytes promise more than there is."""
    return {
        "a header of 2^60 bytes": ("model.safetensors", struct.pack("<Q", 2**60) + b"{}"),
        "a tensor of 2^50 bytes": (
            "model.safetensors",
            _with_length(
                b'{"a": {"dtype": "F32", "shape": [281474976710656], "data_offsets": [0, 1125899906842624]}}'
            ),
        ),
        "2^60 keys": ("model.gguf", b"GGUF" + struct.pack("<IQQ", 3, 1, 2**60)),
        "2^60 tensors": ("model.gguf", b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0)),
        "a text of 2^60 bytes": ("model.gguf", b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60)),
        "JSON nested 100 000 deep": ("config.json", b"[" * 100_000),
        "no object": ("config.json", b"[1]"),
        "not JSON": ("generation_config.json", b"\xff\xfe"),
    }


def _with_length(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


def head_that_promises_too_much(case: str, checkpoint: Path, tmp_path: Path) -> None:
    name, data = heads()[case]
    if name == "model.gguf":
        for file in checkpoint.iterdir():
            file.unlink()
    (checkpoint / name).write_bytes(data)
    with pytest.raises(CheckpointError) as refused:
        load(checkpoint)
    assert name in str(refused.value) and len(str(refused.value)) < 1000


# --- requests ---


def parse(tokenizer: Tokenizer, parameters: dict[str, Any] | None = None, **tensors: Any) -> Any:
    inputs = {}
    for name, value in tensors.items():
        values = value if isinstance(value, list | np.ndarray) else [value]
        is_text = len(values) and isinstance(values[0], str | bytes)
        if is_text:
            values = [one.encode() if isinstance(one, str) else one for one in values]
        inputs[name] = np.array(values, dtype=np.object_) if is_text else np.asarray(values)
    request = fake_pb_utils.InferenceRequest(inputs, parameters=json.dumps(parameters or {}))
    info = make_info(max_model_len=2048, vocab_size=512)
    config = FrontendConfig(max_prompt_bytes=2**20)
    parser = RequestParser(tokenizer, SamplingParams(), lambda: info, config, decoupled=True)
    return parser.parse(parser.read(request))


LARGE: dict[str, dict[str, Any]] = {
    "text_input": {"text_input": b"a" * (2**20 + 1)},
    "messages": {"messages": b"[" * 1_000},
    "prompt": {"input_ids": np.zeros(10**6, np.int32)},
    "input_ids": {"input_ids": np.array([512], np.int32)},
    "sampling_parameters": {"text_input": "a", "sampling_parameters": b" " * (2**20 + 1)},
    "sampling_parameters: ": {"text_input": "a", "sampling_parameters": b'{"a":' * 5_000},
    "stop": {"text_input": "a", "stop": ["a"] * 65},
    "stop_token_ids": {"text_input": "a", "stop_token_ids": np.zeros(10**6, np.int32)},
    "bad_words": {"text_input": "a", "bad_words": ["a" * 1_000] * 5},
    "logit_bias": {"text_input": "a", "logit_bias": json.dumps({str(n): 1 for n in range(5_000)})},
    "n": {"text_input": "a", "n": np.array([65], np.int32)},
    "beam_width": {"text_input": "a", "beam_width": np.array([33], np.int32)},
    "tenant": {"text_input": "a", "tenant": "t" * 257},
    "image_spans": {"input_ids": np.array([1], np.int32), "image_spans": np.zeros((10**5, 2), np.int32)},
    "structured_output": {"text_input": "a", "structured_output": json.dumps({"regex": "a" * 20_000})},
    "cache_control": {"cache_control": b'{"command": "' + b"a" * 70_000},
}
"""What is too large, by the field that the refusal names."""


def too_large(field: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        parse(Tokenizer(checkpoint), **LARGE[field])
    assert str(refused.value).startswith(field.rstrip(": ")) and len(str(refused.value)) < 2000


def request_that_names_code(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """Of logits processors only those that the operator lists; every other text is a key of nothing."""
    parsed = parse(
        Tokenizer(checkpoint), text_input="a", logits_processors=json.dumps([name]),
        session=f"../../{name}", cache_salt="/etc/passwd",
    )  # fmt: skip
    with pytest.raises(InvalidArgumentError, match="logits_processors"):
        check_logits_processors(parsed.params, {"a": "listed.py:Listed"})


# --- images ---


def png(width: int, height: int, rows: int) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(rows), 9)) + chunk(b"IEND", b"")


def saved(kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, kind, **options)
    return buffer.getvalue()


def bombs() -> dict[str, bytes]:
    jpeg, gif = bytearray(saved("JPEG")), bytearray(saved("GIF"))
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = struct.pack(">HH", 65_500, 65_500)
    gif[6:10] = struct.pack("<HH", 65_535, 65_535)
    webp = (
        b"VP8L" + struct.pack("<I", 12) + b"\x2f" + (16_383 | 16_383 << 14).to_bytes(4, "little") + bytes(8)
    )
    return {
        "PNG of 4 gigapixels": png(65_000, 65_000, 10**6),
        "PNG of 100 MB in 100 KB": png(10_000, 10_000, 10**8),
        "JPEG of 4 gigapixels": bytes(jpeg),
        "GIF of 4 gigapixels": bytes(gif),
        "WebP of 268 megapixels": b"RIFF" + struct.pack("<I", len(webp) + 4) + b"WEBP" + webp,
        "text of a zip archive": b"PK\x03\x04" + bytes(100),
        "25 MB": b"\x89PNG\r\n\x1a\n" + bytes(25 * 2**20),
    }


def picture_that_unpacks_to_more(case: str, checkpoint: Path, tmp_path: Path) -> None:
    data = bombs()[case]
    for form in (
        data,
        base64.b64encode(data).decode(),
        "data:image/png;base64," + base64.b64encode(data).decode(),
    ):
        with pytest.raises(InputError) as refused:
            read_image(form, 3, ImageLimits()).decode()
        assert refused.value.field == "image[3]"


def image_elsewhere(text: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        read_image(text, 0, ImageLimits())


ATTACKS: dict[str, Callable[[Path, Path], None]] = {
    **{
        f"code named in {file}": partial(named_code, file)
        for file in ("config.json", "tokenizer_config.json")
    },
    **{
        f"code in {name}, {form}": partial(code_in_pickles, name, form)
        for name in ("pytorch_model.bin", "pytorch_model.pt", "model.pt")
        for form in ("torch", "pickle", "deflated")
    },
    **{
        f"weights in {shard!r}": partial(weights_elsewhere, shard)
        for shard in ("../secret.safetensors", "/etc/passwd", "a/b", "..", ".", "", 7, "a\0b")
    },
    **{f"a head with {case}": partial(head_that_promises_too_much, case) for case in heads()},
    **{f"too large: {field}": partial(too_large, field) for field in LARGE},
    **{
        f"a request for {name}": partial(request_that_names_code, name)
        for name in ("os:system", "/tmp/evil.py:Evil", "../evil.py:Evil", "__import__", "b")
    },
    **{case: partial(picture_that_unpacks_to_more, case) for case in bombs()},
    **{
        f"an image at {text}": partial(image_elsewhere, text)
        for text in ("file:///etc/passwd", "/etc/passwd", "../../etc/passwd", "http://127.0.0.1/")
    },
}


@pytest.mark.row("G28", clauses=("attacks",))
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused(attack: str, checkpoint: Path, tmp_path: Path) -> None:
    """And takes no memory to speak of: neither what it says of itself, nor what it would unpack to."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ATTACKS[attack](checkpoint, tmp_path)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < ROOM, f"{grown >> 20} MiB"


# --- the addresses of images ---


class Inside:
    """A web server that only this machine can reach, and must not be reached."""

    def __init__(self, status: int = 200, location: str = "") -> None:
        seen = self.seen = list[str]()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                seen.append(self.headers["Host"])
                self.send_response(status)
                if location:
                    self.send_header("Location", location)
                self.end_headers()
                self.wfile.write(b"GIF89a")

            def log_message(self, *_: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Inside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def fetch(url: str, hosts: tuple[str, ...], resolve: Any = resolve_really, timeout: float = 120.0) -> str:
    """With real connections."""

    async def run() -> str:
        async with ImageFetcher(ImagePolicy(hosts, timeout=timeout), resolve=resolve) as fetcher:
            return await fetcher.fetch(url, "image", Intake().open())

    return asyncio.run(run())


URLS: tuple[str, ...] = (
    "http://127.0.0.1:{port}/", "http://localhost:{port}/", "http://LOCALHOST.:{port}/", "http://127.1:{port}/",
    "http://2130706433:{port}/", "http://0x7f000001:{port}/", "http://0177.0.0.1:{port}/", "http://0:{port}/",
    "http://[::1]:{port}/", "http://[::ffff:127.0.0.1]:{port}/", "http://[::ffff:7f00:1]:{port}/",
    "http://pics.example.com@127.0.0.1:{port}/", "http://pics.example.com#@127.0.0.1:{port}/",
    "http://127.0.0.1:{port}\\@pics.example.com/", "http://169.254.169.254/latest/meta-data/",
    "http://metadata.google.internal/", "file:///etc/passwd",
    "gopher://127.0.0.1:{port}/",
    "//127.0.0.1:{port}/",
    "dict://127.0.0.1:{port}/", "http:///127.0.0.1:{port}/", "https://127.0.0.1:{port}/",
    "http://\u2460\u2461\u2466.0.0.1:{port}/",
)  # fmt: skip


@pytest.mark.row("G28")
@pytest.mark.parametrize("url", URLS)
def test_no_form_of_an_address_leads_inside(url: str) -> None:
    """Neither where no host is allowed, nor where others are, nor where a name below an allowed one has such
    an address: a private one must be allowed by its very name."""

    async def inside(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    with Inside() as server:
        for hosts in ((), ("pics.example.com",), ("*.example.com", "*.internal", "*.0.1", "*.0.0.1")):
            for resolve in (resolve_really, inside):
                with pytest.raises(RequestError):
                    fetch(url.format(port=server.port), hosts, resolve)
        assert not server.seen


@pytest.mark.row("G28", clauses=("urls",))
def test_names_and_redirects_lead_nowhere_else() -> None:
    """A name is resolved once for each hop, and the connection goes to the address that was checked: what a
    second question would bring does not matter. A redirect is a hop like any other. With the real resolver
    and real connections; every form of an address is in the test above, which this belongs to."""
    questions: list[str] = []

    async def rebinding(host: str, port: int) -> list[str]:
        questions.append(host)
        # A public address at first (of a network for documents, where nobody is), ours from then on.
        return ["192.88.99.1"] if len(questions) == 1 else ["127.0.0.1"]

    with Inside() as server:
        with pytest.raises(RequestError, match=r"cannot be fetched|did not come"):
            fetch(f"http://pics.example.com:{server.port}/", ("*.example.com",), rebinding, timeout=1.0)
        assert questions == ["pics.example.com"] and not server.seen
        with pytest.raises(RequestError, match="not public"):
            fetch(f"http://pics.example.com:{server.port}/", ("*.example.com",), rebinding)
        assert not server.seen
        targets = [url.format(port=server.port) for url in URLS]
        for target in [one for one in targets if one.isascii() and "\\" not in one]:
            with Inside(302, target) as outside:
                allowed = ("outside.example.com", "*.internal", "*.0.0.1")

                async def by_name(host: str, port: int) -> list[str]:
                    return (
                        ["127.0.0.1"] if host == "outside.example.com" else await resolve_really(host, port)
                    )

                with pytest.raises(RequestError):
                    fetch(f"http://outside.example.com:{outside.port}/", allowed, by_name)
                assert outside.seen and not server.seen, target
