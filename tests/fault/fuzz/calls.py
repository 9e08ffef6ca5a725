"""Requests as their client means them: valid ones over the whole schema, and what is done to them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from quire.triton.scheduling_fields import HEADERS
from quire_ensemble.generator_schema import (
    CONTROL_INPUTS,
    IMAGE_INPUTS,
    INPUTS,
    OUTPUTS,
    SAMPLING_INPUTS,
    SCHEDULING_INPUTS,
    TensorSpec,
)
from quire_ensemble.vision_schema import PREPROCESSOR_INPUTS
from tests.fault.fuzz import hostile

SPECS: dict[str, TensorSpec] = {spec.name: spec for spec in (*INPUTS, *PREPROCESSOR_INPUTS)}
HIDDEN_SIZE = 64
VOCAB = 500
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "says",
    "hello",
    "to",
    "two",
    "old",
    "friends",
]
IDS = tuple(f"id-{number}" for number in range(8))
"""Request ids that many messages share."""


def words(rng: Random, most: int = 12) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randrange(1, most)))


def token_ids(rng: Random, most: int = 40) -> list[int]:
    return [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, most))]


def messages(rng: Random, *, images: int = 0) -> list[dict[str, Any]]:
    content: Any = words(rng)
    if images:
        content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": content}]
    turns: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if rng.random() < 0.3:
        turns += [{"role": "assistant", "content": words(rng)}, {"role": "user", "content": words(rng)}]
    return turns


def picture(rng: Random) -> bytes:
    """An encoded image of some kind, small."""
    size = rng.choice(((1, 1), (16, 16), (64, 48), (30, 90)))
    mode, kind = rng.choice((("RGB", "PNG"), ("L", "PNG"), ("RGBA", "PNG"), ("RGB", "JPEG"), ("P", "GIF")))
    out = io.BytesIO()
    Image.new(mode, size, rng.randrange(200)).save(out, kind)
    return out.getvalue()


def _cache_command(rng: Random) -> str:
    commands: tuple[dict[str, Any], ...] = (
        {"command": "inspect"},
        {"command": "reset"},
        {"command": "unpin", "all": True},
        {"command": "unpin", "session": rng.choice(IDS), "tenant": "t"},
    )
    return json.dumps(rng.choice(commands))


Draw = Callable[[Random], Any]


def _flag(rng: Random) -> bool:
    return rng.random() < 0.5


DTYPES = {
    "TYPE_BOOL": np.bool_,
    "TYPE_INT32": np.int32,
    "TYPE_UINT64": np.uint64,
    "TYPE_FP32": np.float32,
    "TYPE_STRING": np.object_,
}
"""Of arrays, by Triton's name of a tensor's type."""

VALID: dict[str, Draw] = {
    "text_input": lambda rng: (
        words(rng) if rng.random() < 0.8 else [words(rng) for _ in range(rng.randrange(1, 5))]
    ),
    "text_pair": lambda rng: [words(rng) for _ in range(rng.randrange(1, 5))],
    "messages": lambda rng: json.dumps(messages(rng)),
    "input_ids": token_ids,
    "image_embeds": lambda rng: [[rng.gauss(0, 1)] * HIDDEN_SIZE for _ in range(rng.randrange(1, 5))],
    "prompt_embeds": lambda rng: [[rng.gauss(0, 1)] * HIDDEN_SIZE for _ in range(rng.randrange(1, 9))],
    "image_spans": lambda rng: [[0, rng.randrange(1, 5)]],
    "position_ids": lambda rng: [[]],
    "image": lambda rng: [picture(rng) for _ in range(rng.randrange(1, 3))],
    "image_pixels": lambda rng: [[[[rng.randrange(256)] * 3] * 8] * 8],
    **dict.fromkeys((spec.name for spec in CONTROL_INPUTS), _flag),
    "cancel": lambda rng: rng.random() < 0.8,
    "output_mode": lambda rng: rng.choice(("delta", "cumulative", "final")),
    "lora_name": lambda rng: "",
    "cache_control": _cache_command,
    "sampling_parameters": lambda rng: json.dumps({"max_tokens": rng.randrange(1, 9), "top_k": 5}),
    "max_tokens": lambda rng: rng.randrange(1, 13),
    "thinking_budget": lambda rng: rng.choice((0, 5, 2**31 - 1)),
    "dimensions": lambda rng: rng.choice((3, 8)),
    "min_tokens": lambda rng: rng.randrange(3),
    "temperature": lambda rng: round(rng.random() * 2, 2),
    "top_k": lambda rng: rng.choice((-1, 0, 1, 40, 2**31 - 1)),
    "top_p": lambda rng: rng.choice((0.1, 0.9, 1.0)),
    "min_p": lambda rng: rng.choice((0.0, 0.05, 1.0)),
    "typical_p": lambda rng: rng.choice((0.2, 1.0)),
    "repetition_penalty": lambda rng: rng.choice((0.5, 1.1, 100.0)),
    "presence_penalty": lambda rng: rng.choice((-2.0, 0.5, 2.0)),
    "frequency_penalty": lambda rng: rng.choice((-2.0, 0.5, 2.0)),
    "no_repeat_ngram_size": lambda rng: rng.choice((0, 2, 5, 64)),
    "seed": lambda rng: rng.randrange(2**64),
    "stop": lambda rng: [words(rng, 3) for _ in range(rng.randrange(1, 4))],
    "stop_token_ids": lambda rng: token_ids(rng, 4),
    "bad_words": lambda rng: [words(rng, 3) for _ in range(rng.randrange(1, 4))],
    "ignore_eos": _flag,
    "include_stop_str_in_output": _flag,
    "skip_special_tokens": _flag,
    "logprobs": lambda rng: rng.choice((0, 1, 5, 64)),
    "prompt_logprobs": lambda rng: rng.choice((0, 1, 5, 64)),
    "chat_format": lambda rng: rng.choice(("{}", '{"tool_choice": "auto"}')),
    "logit_bias": lambda rng: json.dumps({str(i): 5.0 for i in token_ids(rng)}),
    "n": lambda rng: rng.randrange(1, 4),
    "best_of": lambda rng: rng.randrange(1, 5),
    "beam_width": lambda rng: rng.randrange(1, 5),
    "length_penalty": lambda rng: rng.choice((-10.0, 0.0, 1.0, 10.0)),
    "early_stopping": _flag,
    "logits_processors": lambda rng: rng.choice(('["a"]', '[{"name": "b", "args": {"x": 1}}]')),
    "structured_output": lambda rng: json.dumps(rng.choice(GRAMMARS)),
    "request_priority": lambda rng: rng.choice((-100, 0, 3, 100)),
    "tenant": lambda rng: rng.choice(("t", "u", "")),
    "ttft_deadline_ms": lambda rng: rng.choice((1, 500, 60_000)),
    "deadline_ms": lambda rng: rng.choice((1, 500, 60_000)),
    "cache_salt": words,
    "cache_retention": lambda rng: rng.randrange(101),
    "cache_ttl_ms": lambda rng: rng.choice((1, 2_000)),
    "cache_pin": _flag,
    "cache_result": _flag,
    "session": lambda rng: rng.choice(IDS),
    "session_end": _flag,
    "num_draft": lambda rng: rng.choice((0, 1, 64)),
}
"""By input, a value that the schema allows; whether a model takes it beside the others is another matter."""

GRAMMARS: tuple[dict[str, Any], ...] = (
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"json_object": True},
    {"regex": "[ab]{1,4}"},
    {"choice": ["yes", "no"], "after": "x"},
    {"grammar": 'start: "a" | "b"'},
)
PROMPTS = ("text_input", "messages", "input_ids")
TUNABLE = tuple(spec.name for spec in (*SAMPLING_INPUTS, *SCHEDULING_INPUTS))
BATCHING = ("tokenizer", "vision_preprocessor")
_LISTS = ("stop", "bad_words", "stop_token_ids")
_TRITON_PARAMETERS = ("priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "headers", "id")
_RESERVED = ("triton_enable_empty_final_response", "triton_final_response", "binary_data_output", "__proto__")


@dataclass
class Call:
    """One request, before any surface writes it down.

    Attributes:
        inputs: by name, the tensor's elements in Python, nested as the shape is; a bare value has shape [1].
        parameters: scalars beside the tensors.
        stated: a JSON object for the tensor `sampling_parameters`, unless `inputs` has one.
    """

    model: str
    inputs: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    stated: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    request_id: str = ""
    outputs: list[str] = field(default_factory=list)

    def tensors(self) -> dict[str, Any]:
        """The inputs with what is stated in JSON, for a batching model as a batch of one."""
        if self.model in BATCHING:
            return {k: [v if isinstance(v, list) else [v]] for k, v in self.inputs.items()}
        if not self.stated or "sampling_parameters" in self.inputs:
            return self.inputs
        return {**self.inputs, "sampling_parameters": hostile.to_json(self.stated)}


def valid_call(rng: Random, model: str, prompts: tuple[str, ...] = PROMPTS) -> Call:
    """A prompt, and for a model that generates some tunables, each in one of its three places.

    `max_tokens` is always among these, so that the answer ends soon.
    """
    call = Call(model)
    prompt = rng.choice(prompts)
    call.inputs[prompt] = VALID[prompt](rng)
    if "image" in prompts and rng.random() < 0.7:
        images = VALID["image"](rng)
        call.inputs |= {"image": images, "messages": json.dumps(messages(rng, images=len(images)))}
        call.inputs.pop("text_input", None)
    if model in BATCHING:
        return call
    for name in ("max_tokens", *rng.sample(TUNABLE, rng.choice((0, 1, 2, 4)))):
        place(rng, call, name, VALID[name](rng))
    if not model.startswith("generator"):
        for name in ("logprobs", "prompt_logprobs"):
            if name in call.inputs:
                call.inputs[SPECS[name].on_ensemble] = call.inputs.pop(name)
    if rng.random() < 0.5:
        call.request_id = rng.choice(IDS)
    if rng.random() < 0.3:
        call.outputs = rng.sample([spec.name for spec in OUTPUTS], 2)
    flags = [spec.name for spec in CONTROL_INPUTS if spec.name not in ("cancel", "stream")]
    if rng.random() < 0.3:
        flag = rng.choice(flags)
        call.inputs[flag] = VALID[flag](rng)
    return call


def place(rng: Random, call: Call, name: str, value: Any) -> None:
    match rng.randrange(4):
        case 0:
            call.stated[name] = value
        case 1:
            call.parameters[name] = (
                value if isinstance(value, bool | int | float | str) else json.dumps(value)
            )
        case _:
            call.inputs[name] = value


# What may be done to a call. Each takes it and changes it in place.


def _hostile_tunable(rng: Random, call: Call) -> None:
    match rng.randrange(3):
        case 0:
            call.stated[rng.choice(TUNABLE)] = hostile.value(rng)
        case 1:
            call.parameters[rng.choice(TUNABLE)] = rng.choice((hostile.number, hostile.text))(rng)
        case _:
            name = rng.choice(TUNABLE)
            call.inputs[name] = _hostile_elements(rng, name)


def _hostile_elements(rng: Random, name: str) -> Any:
    if SPECS[name].datatype == "TYPE_STRING":
        one: Draw = rng.choice((hostile.blob, hostile.text))
    else:
        one = hostile.number
    return rng.choice((lambda: one(rng), list, lambda: [one(rng) for _ in range(rng.choice((2, 300)))]))()


def _two_prompts(rng: Random, call: Call) -> None:
    name = rng.choice(PROMPTS)
    call.inputs[name] = VALID[name](rng)


def _no_prompt(rng: Random, call: Call) -> None:
    for name in PROMPTS:
        call.inputs.pop(name, None)


def _hostile_prompt(rng: Random, call: Call) -> None:
    name = rng.choice([name for name in PROMPTS if name in call.inputs] or PROMPTS)
    if name == "input_ids":
        draws = [lambda: hostile.number(rng), list, lambda: [5] * 3_000, lambda: [5, hostile.number(rng)]]
        call.inputs[name] = rng.choice(draws)()
    elif name == "text_input":
        call.inputs[name] = rng.choice((hostile.blob, hostile.text, hostile.long_text))(rng)
    else:
        call.inputs[name] = _hostile_messages(rng)


def _hostile_messages(rng: Random) -> Any:
    turns: Any = messages(rng)
    turn = turns[0]
    match rng.randrange(7):
        case 0:
            turn[rng.choice(("role", "content", "name", "tool_calls", "tool_call_id"))] = hostile.value(rng)
        case 1:
            part = {
                "type": rng.choice(("text", "image", "image_url", "video", "input_audio", hostile.text(rng)))
            }
            part[rng.choice(("text", "image", "image_url", "url"))] = hostile.value(rng)
            turn["content"] = [part] * rng.choice((1, 3, 50))
        case 2:
            turns = {"messages": turns, rng.choice(("tools", "x", "chat_template")): hostile.value(rng)}
        case 3:
            turns = turns * 300
        case 4:
            url = "data:image/png;base64," + base64.b64encode(hostile.blob(rng)).decode()
            turn["content"] = [{"type": "image_url", "image_url": {"url": url}}]
        case 5:
            return hostile.json_text(rng, {"messages": turns})
        case _:
            return hostile.to_json(hostile.value(rng)).encode("utf-8", "surrogatepass")
    return hostile.to_json(turns).encode("utf-8", "surrogatepass")


def _unknown_name(rng: Random, call: Call) -> None:
    name = hostile.text(rng)[:2_000]
    rng.choice((call.parameters, call.stated, call.inputs))[name] = hostile.number(rng)


def _swapped(rng: Random, call: Call) -> None:
    if len(call.inputs) > 1:
        one, other = rng.sample(list(call.inputs), 2)
        call.inputs[one], call.inputs[other] = call.inputs[other], call.inputs[one]


def _hostile_id(rng: Random, call: Call) -> None:
    call.request_id = rng.choice((hostile.text(rng), "warm-up", "0", rng.choice(IDS)))


def _cancel(rng: Random, call: Call) -> None:
    call.inputs["cancel"] = rng.random() < 0.9
    call.request_id = rng.choice((*IDS, "", "warm-up", hostile.text(rng)))


def _cache_control(rng: Random, call: Call) -> None:
    fields: dict[str, Any] = {"command": rng.choice(("inspect", "reset", "unpin", "x")), "session": "s"}
    hostile_ones = (
        lambda: hostile.json_text(rng, fields),
        lambda: hostile.blob(rng),
        lambda: _cache_command(rng),
    )
    call.inputs["cache_control"] = rng.choice(hostile_ones)()


def _hostile_json(rng: Random, call: Call) -> None:
    name = rng.choice(("sampling_parameters", "sampling_parameters", "logit_bias"))
    call.inputs[name] = hostile.json_text(rng, {"max_tokens": 4, "stop": ["x"], "5": 1})


def _many(rng: Random, call: Call) -> None:
    rng.choice((call.inputs, call.stated))[rng.choice(_LISTS)] = hostile.many(rng)


def _choices(rng: Random, call: Call) -> None:
    call.inputs[rng.choice(("n", "best_of", "beam_width"))] = rng.choice((8, 16, 32, 64, 65))


def _headers(rng: Random, call: Call) -> None:
    value = "".join(char for char in hostile.text(rng)[:4_000] if " " <= char <= "~").strip()
    call.headers[rng.choice([*HEADERS, "x-other", "triton-request-id"])] = value


def _triton_parameter(rng: Random, call: Call) -> None:
    name = rng.choice((*_TRITON_PARAMETERS, *_RESERVED))
    call.parameters[name] = rng.choice((hostile.number, hostile.text, _flag))(rng)


def _outputs(rng: Random, call: Call) -> None:
    call.outputs = [rng.choice((hostile.text(rng)[:300], rng.choice(OUTPUTS).name)) for _ in range(3)]


def _image(rng: Random, call: Call) -> None:
    draws = (picture, hostile.blob, lambda rng: base64.b64encode(picture(rng)), lambda rng: picture(rng)[:40])
    if not call.model.startswith("vision"):
        return
    call.inputs["image"] = [rng.choice(draws)(rng) for _ in range(rng.choice((0, 1, 3, 20)))]


def _embeds(rng: Random, call: Call) -> None:
    for spec in IMAGE_INPUTS:
        if rng.random() < 0.7:
            call.inputs[spec.name] = VALID[spec.name](rng)
    if rng.random() < 0.5:
        call.inputs["image_spans"] = [[hostile.number(rng), hostile.number(rng)] for _ in range(3)]


MUTATIONS: dict[Callable[[Random, Call], None], int] = {
    _hostile_tunable: 8,
    _two_prompts: 1,
    _no_prompt: 1,
    _hostile_prompt: 5,
    _unknown_name: 2,
    _swapped: 1,
    _hostile_id: 2,
    _cancel: 2,
    _cache_control: 3,
    _hostile_json: 4,
    _many: 1,
    _choices: 1,
    _headers: 1,
    _triton_parameter: 2,
    _outputs: 1,
    _image: 1,
    _embeds: 1,
}


_OF_GENERATORS = (_cancel, _cache_control, _embeds)
"""To other models the same as unknown names, which are plenty."""


def fuzzed_call(rng: Random, model: str, prompts: tuple[str, ...] = PROMPTS) -> Call:
    """A valid call with up to three things done to it."""
    call = valid_call(rng, model, prompts)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        mutate = hostile.weighted(rng, MUTATIONS)
        if call.model.startswith("generator") or mutate not in _OF_GENERATORS or rng.random() < 0.1:
            mutate(rng, call)
    return call
