"""Text of the `config.pbtxt` files that the builder writes, from the tables of tensors (`generator_schema`,
`vision_schema`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from quire_ensemble.generator_schema import (
    CHAT_FORMAT,
    IMAGE_INPUTS,
    INPUTS,
    ONE_TEXT_INPUTS,
    OUTPUTS,
    PROMPT_INPUTS,
    TEXT_PAIR,
    TensorSpec,
)
from quire_ensemble.vision_schema import (
    ENCODER_INPUTS,
    ENCODER_OUTPUTS,
    PREPROCESSOR_INPUTS,
    PREPROCESSOR_OUTPUTS,
)

_TOKENIZER_INPUTS = ONE_TEXT_INPUTS
_TOKEN_IDS = TensorSpec("input_ids", "TYPE_INT32", (-1,), doc="Token ids of the prompt.")
TENSORS: Mapping[str, tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]] = {
    "tokenizer": (_TOKENIZER_INPUTS, (_TOKEN_IDS, CHAT_FORMAT)),
    "vision_preprocessor": (PREPROCESSOR_INPUTS, PREPROCESSOR_OUTPUTS),
    "vision_encoder": (ENCODER_INPUTS, ENCODER_OUTPUTS),
}
"""Inputs and outputs of a model before the generator, by the model's role in an ensemble."""

_TAKEN_BEFORE = {
    TEXT_PAIR.name,  # models before the generator read one text
    *(spec.name for spec in PROMPT_INPUTS),  # a client that has token ids needs no ensemble
    *(spec.name for spec in IMAGE_INPUTS),  # likewise embeddings; the vision models make them
    CHAT_FORMAT.name,  # likewise
    "cancel",  # goes to the generator itself, as it has no prompt to tokenize
    "cache_control",  # likewise
}
_PASSED_INPUTS: tuple[TensorSpec, ...] = tuple(s for s in INPUTS if s.name not in _TAKEN_BEFORE)
"""Inputs of an ensemble that go straight to its generator, some under another name."""


def quote(text: str) -> str:
    """Returns a text as a string literal of protobuf's text format."""
    return json.dumps(text, ensure_ascii=False)


def generator_config(name: str, *, decoupled: bool, instance_count: int) -> str:
    """Returns the config.pbtxt of a generator; `decoupled` false gives the one-response variant."""
    if decoupled:
        about = (
            "Generates text for a prompt given as text, chat messages or token ids, and streams it:",
            "use ModelStreamInfer (gRPC) or generate_stream (HTTP). Cancelling the stream ends the request.",
        )
    else:
        about = (
            "Generates text and answers with one response: for plain ModelInfer (gRPC) and infer (HTTP).",
            "Its quire.json is that of the streaming generator, so both share one engine and KV cache.",
        )
    return _join(
        _comment(*about),
        f"name: {quote(name)}",
        'backend: "quire"',
        _comment("The engine batches by itself, token by token (continuous batching)."),
        "max_batch_size: 0",
        f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}",
        "",
        _comment(
            "Each instance is a frontend process; all of them serve one engine, which is configured in",
            "1/quire.json. The same keys may be set here instead, as parameters with a string_value.",
        ),
        f"instance_group [ {{ count: {instance_count}, kind: KIND_MODEL }} ]",
        "",
        _comment("Prompt sources: exactly one of " + ", ".join(s.name for s in PROMPT_INPUTS) + "."),
        _tensors("input", INPUTS),
        "",
        _tensors("output", OUTPUTS),
    )


def tokenizer_config(name: str, *, checkpoint: str) -> str:
    """Returns the config.pbtxt of the tokenizer; `checkpoint` is a path, absolute or relative to the model's
    directory."""
    about = (
        "Turns a text, or chat messages by the checkpoint's chat template, into token ids. Those that come",
        "while others are worked on go together; a long one is worked on beside the short ones.",
    )
    return _prompt_config("tokenizer", name, checkpoint, about)


def vision_preprocessor_config(name: str, *, checkpoint: str) -> str:
    """Returns the config.pbtxt of the vision preprocessor; `checkpoint` as for `tokenizer_config`."""
    about = (
        "Turns chat messages with images (or a text with placeholders) into token ids and pixels, by the",
        "checkpoint's chat template and image processor. Images come in `image` or `image_pixels`, or",
        "inside the messages as data URLs; nothing is ever fetched.",
    )
    return _prompt_config(
        "vision_preprocessor",
        name,
        checkpoint,
        about,
        _comment(
            "Limits of one request; pixels and bytes are those of one image, before anything is decoded."
        ),
        _parameter("max_images", "16"),
        _parameter("max_image_pixels", "33554432"),
        _parameter("max_image_bytes", "20971520"),
    )


def _prompt_config(role: str, name: str, checkpoint: str, about: Sequence[str], *parameters: str) -> str:
    """Returns the config.pbtxt of the model that an ensemble begins with."""
    inputs, outputs = TENSORS[role]
    return _join(
        _comment(*about),
        f"name: {quote(name)}",
        'backend: "python"',
        _comment(
            "Most requests in one batch; none waits for others. 32 (tokenizer) or 4 (images) halve the cost",
            "of a request under load; only where nobody sends damaged tensors, which fail a whole batch.",
        ),
        "max_batch_size: 1",
        "dynamic_batching { }",
        "instance_group [ { count: 1, kind: KIND_CPU } ]",
        "",
        _comment("Checkpoint directory; a relative path starts at the directory of this file."),
        _parameter("checkpoint", checkpoint),
        *parameters,
        "",
        _EXACTLY_ONE,
        _tensors("input", inputs),
        "",
        _tensors("output", outputs),
    )


def vision_encoder_config(name: str, *, checkpoint: str) -> str:
    """Returns the config.pbtxt of the vision encoder; `checkpoint` as for `tokenizer_config`."""
    return _join(
        _comment(
            "Turns pixels into embeddings: the checkpoint's vision tower and projector. Images of several",
            "requests are encoded together; embeddings are kept by content: the same image is encoded once.",
        ),
        f"name: {quote(name)}",
        'backend: "python"',
        _comment("Most requests in one batch; images of any sizes go together."),
        "max_batch_size: 32",
        "dynamic_batching { max_queue_delay_microseconds: 1000 }",
        "instance_group [ { count: 1, kind: KIND_MODEL } ]",
        "",
        _parameter("checkpoint", checkpoint),
        _comment("cpu, cuda, or auto: cuda where a CUDA device is visible."),
        _parameter("device", "auto"),
        _comment("Bytes of embeddings to keep; the least recently used go first."),
        _parameter("cache_bytes", "268435456"),
        _comment("Most patches in one forward pass: bounds memory, and how long text waits for a core."),
        _parameter("max_patches", "16384"),
        "",
        _tensors("input", ENCODER_INPUTS, ragged=True),
        "",
        _tensors("output", ENCODER_OUTPUTS),
    )


def ensemble_config(name: str, *, before: Mapping[str, str], generator: str, decoupled: bool) -> str:
    """Returns the config.pbtxt of an ensemble.

    Args:
        name: name of the ensemble.
        before: names of the models before the generator, in their order, by role (see `TENSORS`).
        generator: name of the generator, the last step.
        decoupled: whether the generator streams.
    """
    cancel = (
        "Triton does not tell an ensemble's step that its client has gone: cancel by a request of the",
        f'same id with input "cancel" to {quote(generator)}; quire_client does so by itself.',
    )
    renamed = (
        f'Here the input "{s.name}" is called "{s.ensemble_name}": an output has its name already.'
        for s in _PASSED_INPUTS
        if s.ensemble_name
    )
    steps = [
        _step(
            model,
            [(s.name, s.on_ensemble) for s in TENSORS[role][0]],
            [(s.name, _inside(s.name)) for s in TENSORS[role][1]],
        )
        for role, model in before.items()
    ]
    made = {s.name for role in before for s in TENSORS[role][1]}
    taken = [s.name for s in (*PROMPT_INPUTS, *IMAGE_INPUTS, CHAT_FORMAT) if s.name in made]
    return _join(
        _comment(
            f"{' -> '.join([*before.values(), generator])}.",
            "The generator is the last step: it turns tokens into text itself.",
            *(cancel if decoupled else ()),
            *renamed,
        ),
        f"name: {quote(name)}",
        'platform: "ensemble"',
        "max_batch_size: 0",
        "",
        _EXACTLY_ONE,
        _tensors("input", (*TENSORS[next(iter(before))][0], *_PASSED_INPUTS), ensemble=True),
        "",
        _tensors("output", OUTPUTS, ensemble=True),
        "",
        "ensemble_scheduling {",
        *steps,
        _step(
            generator,
            [*((n, _inside(n)) for n in taken), *((s.name, s.on_ensemble) for s in _PASSED_INPUTS)],
            [(s.name, s.on_ensemble) for s in OUTPUTS],
        ),
        "}",
    )


def _inside(name: str) -> str:
    """Returns the name, within an ensemble, of a tensor that goes from one of its models to the next."""
    return "prompt_token_ids" if name == "input_ids" else name


def _parameter(key: str, value: str) -> str:
    return f"parameters {{ key: {quote(key)}, value {{ string_value: {quote(value)} }} }}"


def _step(model: str, inputs: Iterable[tuple[str, str]], outputs: Iterable[tuple[str, str]]) -> str:
    lines = ["  step {", f"    model_name: {quote(model)}", "    model_version: -1"]
    for kind, pairs in (("input_map", inputs), ("output_map", outputs)):
        lines += [f"    {kind} {{ key: {quote(member)}, value: {quote(own)} }}" for member, own in pairs]
    return "\n".join([*lines, "  }"])


def _tensors(kind: str, specs: Sequence[TensorSpec], *, ensemble: bool = False, ragged: bool = False) -> str:
    lines = [f"{kind} ["]
    for number, spec in enumerate(specs):
        dims = ", ".join(str(dim) for dim in spec.dims)
        fields = [f"name: {quote(spec.on_ensemble if ensemble else spec.name)}"]
        fields += [f"data_type: {spec.datatype}", f"dims: [ {dims} ]"]
        if kind == "input" and spec.optional:
            fields.append("optional: true")
        if ragged:
            fields.append("allow_ragged_batch: true")
        if spec.doc:
            lines.append(f"  # {spec.doc}")
        lines.append(f"  {{ {', '.join(fields)} }}{',' if number + 1 < len(specs) else ''}")
    return "\n".join([*lines, "]"])


def _comment(*lines: str) -> str:
    return "\n".join(f"# {line}" for line in lines)


def _join(*parts: str) -> str:
    return "\n".join(parts) + "\n"


_EXACTLY_ONE = _comment("Exactly one of " + ", ".join(s.name for s in _TOKENIZER_INPUTS) + ".")
