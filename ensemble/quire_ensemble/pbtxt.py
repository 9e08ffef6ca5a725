"""Text of the `config.pbtxt` files that the builder writes, from the tensor table of the generator."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from quire_ensemble.generator_schema import INPUTS, OUTPUTS, PROMPT_INPUTS, TensorSpec

TOKEN_IDS_TENSOR = "prompt_token_ids"
"""Name inside an ensemble of what the tokenizer gives to the generator."""

TOKENIZER_INPUTS: tuple[TensorSpec, ...] = tuple(s for s in PROMPT_INPUTS if s.datatype == "TYPE_STRING")
TOKENIZER_OUTPUTS: tuple[TensorSpec, ...] = tuple(
    TensorSpec(s.name, s.datatype, s.dims, doc="Token ids of the prompt.")
    for s in PROMPT_INPUTS
    if s.name == "input_ids"
)

_NOT_ON_ENSEMBLES = {
    "input_ids",  # a client that has token ids needs no ensemble
    "cancel",  # goes to the generator itself: a cancelling request has no prompt to tokenize
}
ENSEMBLE_INPUTS: tuple[TensorSpec, ...] = tuple(s for s in INPUTS if s.name not in _NOT_ON_ENSEMBLES)
ENSEMBLE_OUTPUTS: tuple[TensorSpec, ...] = OUTPUTS


def quote(text: str) -> str:
    """A string literal of protobuf's text format."""
    return json.dumps(text, ensure_ascii=False)


def generator_config(name: str, *, decoupled: bool, instance_count: int) -> str:
    """config.pbtxt of a generator; `decoupled` false gives the one-response variant."""
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
    """config.pbtxt of the tokenizer; `checkpoint` is absolute or relative to the model's directory."""
    return _join(
        _comment("Turns a text, or chat messages by the checkpoint's chat template, into token ids."),
        f"name: {quote(name)}",
        'backend: "python"',
        "max_batch_size: 0",
        "instance_group [ { count: 1, kind: KIND_CPU } ]",
        "",
        _comment("Checkpoint directory; a relative path starts at the directory of this file."),
        f'parameters {{ key: "checkpoint", value {{ string_value: {quote(checkpoint)} }} }}',
        "",
        _comment("Exactly one of " + ", ".join(s.name for s in TOKENIZER_INPUTS) + "."),
        _tensors("input", TOKENIZER_INPUTS),
        "",
        _tensors("output", TOKENIZER_OUTPUTS),
    )


def ensemble_config(name: str, *, tokenizer: str, generator: str, decoupled: bool) -> str:
    """config.pbtxt of an ensemble tokenizer -> generator."""
    about = [f"{tokenizer} -> {generator}. The generator is the last step: it turns tokens into text itself."]
    if decoupled:
        about += [
            "Triton does not tell an ensemble's step that its client has gone: cancel by a request of the",
            f'same id with input "cancel" to {quote(generator)}; quire_client does so by itself.',
        ]
    about += [
        f'Here the input "{s.name}" is called "{s.ensemble_name}": an output has its name already.'
        for s in ENSEMBLE_INPUTS
        if s.ensemble_name
    ]
    passed = [s for s in ENSEMBLE_INPUTS if s not in TOKENIZER_INPUTS]
    return _join(
        _comment(*about),
        f"name: {quote(name)}",
        'platform: "ensemble"',
        "max_batch_size: 0",
        "",
        _comment("Exactly one of " + ", ".join(s.name for s in TOKENIZER_INPUTS) + "."),
        _tensors("input", ENSEMBLE_INPUTS, ensemble=True),
        "",
        _tensors("output", ENSEMBLE_OUTPUTS, ensemble=True),
        "",
        "ensemble_scheduling {",
        _step(
            tokenizer,
            [(s.name, s.on_ensemble) for s in TOKENIZER_INPUTS],
            [(s.name, TOKEN_IDS_TENSOR) for s in TOKENIZER_OUTPUTS],
        ),
        _step(
            generator,
            [("input_ids", TOKEN_IDS_TENSOR), *((s.name, s.on_ensemble) for s in passed)],
            [(s.name, s.on_ensemble) for s in ENSEMBLE_OUTPUTS],
        ),
        "}",
    )


def _step(model: str, inputs: Iterable[tuple[str, str]], outputs: Iterable[tuple[str, str]]) -> str:
    lines = ["  step {", f"    model_name: {quote(model)}", "    model_version: -1"]
    for kind, pairs in (("input_map", inputs), ("output_map", outputs)):
        lines += [f"    {kind} {{ key: {quote(member)}, value: {quote(own)} }}" for member, own in pairs]
    return "\n".join([*lines, "  }"])


def _tensors(kind: str, specs: Sequence[TensorSpec], *, ensemble: bool = False) -> str:
    lines = [f"{kind} ["]
    for number, spec in enumerate(specs):
        dims = ", ".join(str(dim) for dim in spec.dims)
        fields = [f"name: {quote(spec.on_ensemble if ensemble else spec.name)}"]
        fields += [f"data_type: {spec.datatype}", f"dims: [ {dims} ]"]
        if kind == "input" and spec.optional:
            fields.append("optional: true")
        if spec.doc:
            lines.append(f"  # {spec.doc}")
        lines.append(f"  {{ {', '.join(fields)} }}{',' if number + 1 < len(specs) else ''}")
    return "\n".join([*lines, "]"])


def _comment(*lines: str) -> str:
    return "\n".join(f"# {line}" for line in lines)


def _join(*parts: str) -> str:
    return "\n".join(parts) + "\n"
