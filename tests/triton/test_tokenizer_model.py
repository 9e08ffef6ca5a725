"""The `tokenizer` model: with stand-in Triton utilities, as a program in the C locale, and in the server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from quire_ensemble.pbtxt import tokenizer_config
from quire_ensemble.text_limits import TextLimits
from quire_ensemble.triton_tokenizer import LONG_BYTES, TokenizerModel
from tests.fixtures import fake_pb_utils
from tests.fixtures.chat_templates import CONVERSATIONS, TEMPLATES
from tests.fixtures.checkpoints import write_tokenizer
from tests.fixtures.server import ServeRepository

ROOT = Path(__file__).resolve().parents[2]
SERVED_FILE = ROOT / "model_repository" / "tokenizer" / "1" / "model.py"
MESSAGES = [{"role": "user", "content": "Grüße, 日本"}]


class Model(TokenizerModel):
    pb_utils: ClassVar[Any] = fake_pb_utils


def arguments(directory: Path, checkpoint: str | None) -> dict[str, str]:
    parameters = {} if checkpoint is None else {"checkpoint": {"string_value": checkpoint}}
    config = json.dumps({"parameters": parameters})
    return {
        "model_config": config,
        "model_repository": str(directory),
        "model_instance_name": "tokenizer_0",
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model repository's tokenizer directory, with the checkpoint where the builder puts it."""
    repository = tmp_path_factory.mktemp("repository")
    write_tokenizer(repository / "generator" / "1" / "tiny")
    (repository / "tokenizer").mkdir()
    return repository / "tokenizer"


@pytest.fixture(scope="module")
def model(directory: Path) -> Iterator[Model]:
    model = Model()
    model.initialize(arguments(directory, "../generator/1/tiny"))
    yield model
    model.finalize()


def request(**inputs: bytes | str | list[Any]) -> fake_pb_utils.InferenceRequest:
    return fake_pb_utils.InferenceRequest(
        {
            name: np.array([value if isinstance(value, list) else [value]], dtype=object)
            for name, value in inputs.items()
        }
    )


def test_prompts_that_are_too_long_are_refused_unread(directory: Path) -> None:
    """The tokenizer of an ensemble had no limit at all: whatever a client sent was tokenized."""
    model = Model()
    args = arguments(directory, "../generator/1/tiny")
    config = json.loads(args["model_config"])
    config["parameters"] |= {name: {"string_value": "1000"} for name in ("max_prompt_bytes", "max_model_len")}
    model.initialize({**args, "model_config": json.dumps(config)})
    nested = '[{"role": "user", "content": "x", "a": ' + "[" * 200 + "]" * 200 + "}]"
    for inputs, words in (
        ({"text_input": b"x" * 1001}, "text_input: at most 1000 bytes, got 1001"),
        ({"messages": json.dumps([{"role": "user", "content": "x" * 1000}])}, "messages: at most 1000 bytes"),
        ({"messages": nested}, "messages: JSON nested too deeply, at most 64 levels"),
    ):
        (response,) = model.execute([request(**inputs)])
        assert words in response.error.message()
        assert response.error.code() == fake_pb_utils.TritonError.INVALID_ARG
    (directory.parent / "generator" / "1" / "tiny" / "config.json").write_text(
        '{"text_config": {"max_position_embeddings": 10}}', "utf-8"
    )
    model.initialize(args)
    long = request(text_input=b"x" * 2**20)
    assert model.execute([long]) == [None] and long.sender.final.wait(60)
    (response,) = long.sender.responses
    assert "1048576 bytes are more than 10 tokens can hold" in response.error.message()
    config["parameters"]["max_prompt_bytes"]["string_value"] = "many"
    with pytest.raises(fake_pb_utils.TritonModelException, match="'max_prompt_bytes' must be an integer"):
        model.initialize({**args, "model_config": json.dumps(config)})
    (directory.parent / "generator" / "1" / "tiny" / "config.json").unlink()


def test_text_and_messages_become_int32_ids(model: Model) -> None:
    text, chat, as_str = model.execute(
        [
            request(text_input="Grüße".encode()),
            request(messages=json.dumps(MESSAGES).encode()),
            request(text_input="Grüße"),
        ]
    )
    for response in (text, chat, as_str):
        assert response.error is None
        assert response.tensors["input_ids"].dtype == np.int32
        assert response.tensors["input_ids"].shape[0] == 1
    tokenizer = model.tokenizer
    assert text.tensors["input_ids"].tolist() == [tokenizer.encode("Grüße")]
    assert as_str.tensors["input_ids"].tolist() == [tokenizer.encode("Grüße")]
    rendered = "<|im_start|>user\nGrüße, 日本<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.hf.decode(chat.tensors["input_ids"][0].tolist()) == rendered


def test_wrong_requests_fail_alone_with_invalid_arg(model: Model) -> None:
    wrong = {
        "text_input, messages: exactly one is needed, none is given": request(),
        "text_input, messages: exactly one is allowed, both are given": request(
            text_input=b"a", messages=json.dumps(MESSAGES).encode()
        ),
        "text_input: must not be empty": request(text_input=b""),
        "text_input: invalid UTF-8 at byte 1 of 2": request(text_input=b"a\xff"),
        "text_input: must have shape [1, 1], got [1, 2]": request(text_input=[b"a", b"b"]),
        "messages: must have shape [1, 1], got [1, 0]": request(messages=[]),
        "messages: invalid JSON at line 1 column 2": request(messages=b"["),
        "messages: [0].role must be a non-empty string": request(messages=b"[{}]"),
    }
    good = request(text_input=b"good")
    responses = model.execute([good, *wrong.values(), good])
    assert len(responses) == len(wrong) + 2
    for response, message in zip(responses[1:-1], wrong, strict=True):
        assert response.error is not None
        assert response.error.message().startswith(message)
        assert response.error.code() == fake_pb_utils.TritonError.INVALID_ARG
        assert response.tensors == {}
    for response in (responses[0], responses[-1]):
        assert response.tensors["input_ids"].tolist() == [model.tokenizer.encode("good")]


LONG = "a text that is long " * 1000


class Held:
    """`TextLimits.encode_chat` that waits with long texts until it is released."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        encode = TextLimits.encode_chat

        def held(limits: TextLimits, tokenizer: Any, text: bytes | None, messages: bytes | None) -> Any:
            if len(text or messages or b"") > LONG_BYTES:
                assert self.release.wait(60)
            return encode(limits, tokenizer, text, messages)

        monkeypatch.setattr(TextLimits, "encode_chat", held)


def test_a_long_text_does_not_hold_up_short_ones(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """All who came while a text of megabytes was tokenized waited for it, in its batch or behind it."""
    held = Held(model, monkeypatch)
    long = [request(text_input=LONG), request(text_input=LONG.encode() + b"\xff")]
    short = request(text_input=b"short")
    first = model.execute([long[0], short, long[1]])
    assert [response is None for response in first] == [True, False, True]
    (again,) = model.execute([short])
    for response in (first[1], again):
        assert response.tensors["input_ids"].tolist() == [model.tokenizer.encode("short")]
    assert not any(request.sender.final.is_set() for request in long)
    held.release.set()
    assert all(request.sender.final.wait(60) for request in long)
    (right,), (wrong,) = (request.sender.responses for request in long)
    assert right.tensors["input_ids"].tolist() == [model.tokenizer.encode(LONG)]
    assert "text_input: invalid UTF-8 at byte 20000" in wrong.error.message()
    assert wrong.error.code() == fake_pb_utils.TritonError.INVALID_ARG


@pytest.mark.parametrize("num_lacking", [1, 3])
def test_a_long_text_for_whose_ids_memory_lacks_gets_an_error(
    model: Model, monkeypatch: pytest.MonkeyPatch, num_lacking: int
) -> None:
    """A response with FINAL that Triton has no shared memory for is lost, and its client would hang. So would
    that of an error, which was sent unasked where there was no memory at all."""
    long = request(text_input=LONG)
    long.sender.fails = range(num_lacking)
    monkeypatch.setattr(fake_pb_utils, "on_allocation", long.sender.allocate)
    assert model.execute([long]) == [None]
    assert long.sender.final.wait(60)
    assert not long.sender.errors
    (response,) = long.sender.responses
    assert "shared memory" in response.error.message()
    assert response.error.code() == fake_pb_utils.TritonError.INTERNAL


def test_what_nobody_foresaw_ends_its_own_request_only(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of `execute` would end all requests of its batch."""
    encode = model.tokenizer.encode

    def broken(text: str, *args: Any, **kwargs: Any) -> list[int]:
        if text == "unknown":
            raise RuntimeError("WordLevel error: Missing [UNK] token\nfrom the vocabulary")
        return encode(text, *args, **kwargs)

    monkeypatch.setattr(model.tokenizer, "encode", broken)
    good, bad = model.execute([request(text_input=b"good"), request(text_input=b"unknown")])
    assert good.tensors["input_ids"].tolist() == [encode("good")]
    assert bad.error.message() == "WordLevel error: Missing [UNK] token from the vocabulary"
    assert bad.error.code() == fake_pb_utils.TritonError.INTERNAL


@pytest.mark.parametrize(
    ("checkpoint", "reason"),
    [
        (None, "config.pbtxt: parameter 'checkpoint' must name the checkpoint directory"),
        ("../absent", "absent: tokenizer directory does not exist"),
        (".", "no tokenizer files; expected one of tokenizer.json"),
    ],
)
def test_an_unusable_checkpoint_fails_the_load_with_one_line(
    checkpoint: str | None, reason: str, directory: Path
) -> None:
    with pytest.raises(fake_pb_utils.TritonModelException, match=reason) as refused:
        Model().initialize(arguments(directory, checkpoint))
    assert str(directory.parent) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_files_that_are_none_fail_the_load(directory: Path, tmp_path: Path) -> None:
    """config.json was read for its lengths before anything looked at it: a pipe's reader waits for ever."""
    shutil.copytree(directory.parent / "generator" / "1" / "tiny", tmp_path / "tiny")
    config = tmp_path / "tiny" / "config.json"
    os.mkfifo(config)
    with pytest.raises(
        fake_pb_utils.TritonModelException, match=r"'config\.json' is neither a file nor a dir"
    ):
        Model().initialize(arguments(directory, str(config.parent)))
    config.unlink()
    config.write_text('{"a":' * 100_000)
    with pytest.raises(fake_pb_utils.TritonModelException, match="cannot be loaded: maximum recursion depth"):
        Model().initialize(arguments(directory, str(config.parent)))
    config.unlink()
    (tmp_path / "tiny" / "chat_template.jinja").unlink()
    (tmp_path / "tiny" / "chat_template.json").write_text('{"a":' * 100_000)
    with pytest.raises(fake_pb_utils.TritonModelException, match=r"chat_template\.json: cannot be read: max"):
        Model().initialize(arguments(directory, str(config.parent)))


def test_the_served_file_works_in_the_c_locale_and_without_torch(directory: Path) -> None:
    """Triton's stub runs model.py in the C locale; importing torch would triple the process's size."""
    program = f"""
import importlib.util, json, sys
import numpy as np
from tests.fixtures import fake_pb_utils
fake_pb_utils.install()
assert "torch" not in sys.modules
spec = importlib.util.spec_from_file_location("model", {str(SERVED_FILE)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert "transformers" not in sys.modules, "the auto-complete stub would pay for it too"
model = module.TritonPythonModel()
model.initialize({arguments(directory, "../generator/1/tiny")!r})
messages = np.array([[{json.dumps(MESSAGES).encode()!r}]], dtype=object)
request = fake_pb_utils.InferenceRequest({{"messages": messages}})
(response,) = model.execute([request])
assert sys.modules.get("torch") is None
print(json.dumps(response.tensors["input_ids"][0].tolist()))
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))}
    env |= {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=env, check=False
    )
    assert ran.returncode == 0, ran.stderr
    model = Model()
    model.initialize(arguments(directory, "../generator/1/tiny"))
    assert json.loads(ran.stdout) == model.tokenizer.encode_chat(json.dumps(MESSAGES))[0]


@pytest.mark.row("A27", clauses=("grpc",))
def test_messages_and_tools_through_grpc_equal_transformers(
    serve_repository: ServeRepository, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    checkpoint = tmp_path / "repository" / "tokenizer" / "1" / "checkpoint"
    write_tokenizer(checkpoint)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATES["chatml_tools"], "utf-8")
    home = checkpoint.parents[1]
    (home / "config.pbtxt").write_text(tokenizer_config("tokenizer", checkpoint="1/checkpoint"), "utf-8")
    shutil.copy(SERVED_FILE, home / "1")
    server = serve_repository(home.parent, "--", "--disable-auto-complete-config")
    hf: Any = AutoTokenizer.from_pretrained(str(checkpoint), local_files_only=True)

    def infer(**inputs: bytes) -> list[int]:
        tensors = []
        for name, value in inputs.items():
            tensors.append(grpc.InferInput(name, [1, 1], "BYTES"))
            tensors[-1].set_data_from_numpy(np.array([[value]], dtype=object))
        return client.infer("tokenizer", tensors).as_numpy("input_ids")[0].tolist()

    with grpc.InferenceServerClient(server.grpc_url) as client:
        for messages, tools in CONVERSATIONS["chatml_tools"]:
            expected = hf.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, return_dict=False
            )
            body = {"messages": messages, "tools": tools}
            assert infer(messages=json.dumps(body, ensure_ascii=False).encode()) == expected
        assert infer(text_input="Grüße".encode()) == hf("Grüße")["input_ids"]
        for wrong, message in (
            ({}, "request has 0 inputs"),  # Triton's own words: it looks for the size of the batch there
            ({"text_input": b"a", "messages": b"[]"}, "exactly one is allowed, both are given"),
            ({"text_input": b"a\xff"}, "text_input: invalid UTF-8 at byte 1 of 2"),
            ({"messages": b"[{}]"}, "messages: [0].role must be a non-empty string"),
        ):
            with pytest.raises(InferenceServerException, match=re.escape(message)) as refused:
                infer(**wrong)
            assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"
