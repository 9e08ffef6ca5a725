# ruff: noqa: E501 (rows of tables)
"""docs/parameters.md: every parameter of a request, and other backends' names of them, from the code.

python -m tests.parameters_page > docs/parameters.md
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from quire import config
from quire.request import sampling_params as sampling
from quire.triton import dialects
from quire_ensemble import generator_schema as schema
from quire_ensemble.generator_schema import TensorSpec

RANGES = {
    "top_k": f"an integer in [-1, {sampling.INT32_MAX}]",
    "top_p": "a number in [0, 1]",
    "seed": "an integer of 64 bits, signed or not",
    "stop": f"up to {sampling.MAX_STOP_STRINGS} texts of {sampling.MAX_STOP_LENGTH} characters, {sampling.MAX_STRINGS_LENGTH} together",
    "stop_token_ids": f"up to {sampling.MAX_STOP_TOKEN_IDS} token ids",
    "bad_words": f"up to {sampling.MAX_BAD_WORDS} texts, as `stop`",
    "logit_bias": f"an object of up to {sampling.MAX_LOGIT_BIAS} token ids, each with a number in [-{sampling.MAX_BIAS}, {sampling.MAX_BIAS}]",
    "early_stopping": 'true, false or "never"',
    "structured_output": "an object, or its JSON",
    "logits_processors": "a list, or its JSON",
}
"""Values of sampling parameters that their types alone do not say."""
DEFAULTS = {
    "max_tokens": "what `max_model_len` leaves",
    "seed": "a random one",
    "skip_special_tokens": "`true`",
}
TENSORRT_LLM_TENSORS = {
    "end_id": "the one token that ends the answer; -1: none does",
    "pad_id": "accepted, without effect",
    "input_lengths": "tokens of `input_ids` that count",
    "stop_words_list": "in the form of `bad_words_list`; as `stop_token_ids`, and as `stop` for words of several tokens",
    "bad_words_list": "[2, n]: the ids of all banned words one behind the other, then the place where each word ends, filled up with -1; as `bad_words`",
    "embedding_bias": "`logit_bias`, a number for each token id; at most {MAX_LOGIT_BIAS} of them not 0".format_map(
        vars(sampling)
    ),
    "embedding_bias_words": "`logit_bias` of the words' tokens",
    "embedding_bias_weights": "the numbers for `embedding_bias_words`",
    "guided_decoding_guide_type": "`structured_output`: "
    + ", ".join(f"`{theirs}` is `{ours}`" for theirs, ours in dialects._GUIDES.items()),
    "guided_decoding_guide": "the value of `structured_output`",
}
"""Meaning of TensorRT-LLM's inputs that have no one name here."""

SHAPES = {
    "output_ids": "[1, 1, n]",
    "output_log_probs": "[1, 1, n]",
    "text_output": "[1]",
    "finish_reason": "[1]",
}

HEAD = """\
# Parameters of a request

Made from the code by `make status`. A parameter has four forms, of which the first that is given counts: a typed tensor, a
key of the JSON tensor `sampling_parameters`, a request parameter (of gRPC, of HTTP `generate` a key of the body), and for some a header
([headers, commands, outputs](../model_repository/README.md#what-a-request-may-say-beside-its-prompt)). A value of another type or
outside its range is refused as INVALID_ARG (HTTP 400) by its name, and so is a name that is not here.

## Sampling

The default is what the checkpoint's generation_config.json states, else the one in the table. `"dialect": "vllm"` has other ones:
temperature 1 and 16 tokens. Who states `top_k`, `top_p`, `min_p` or `typical_p` and no temperature means 1."""

REPOSITORY = """\
## A TensorRT-LLM repository, before and after

| before | after |
| --- | --- |
| `preprocessing/` (texts to ids) | goes: a generator takes `text_input`, `messages` or `input_ids`. Ids alone: the model `tokenizer` of `quire repository build`, or `/tokenize` of [the gateway](../client/README.md) |
| `tensorrt_llm/` with an engine | a generator of this name, as below: clients that send `input_ids` and `request_output_len` go on as they are |
| `postprocessing/` (ids to texts) | goes: every answer has `text_output` and `output_ids`. Texts of ids: `/detokenize` of the gateway |
| `tensorrt_llm_bls/`, `ensemble/` | a generator of this name, as below: clients that send `text_input` and `max_tokens` go on as they are |
| `1/model.py`, engine files, `max_queue_delay_microseconds`, `dynamic_batching`, declarations of inputs and outputs | go: every step batches what is ready, and the backend declares its tensors |
| `parameters { ... }` | go: one that stays is refused by name ([what to write in its place](keys.md#tensorrt-llms-parameters-of-configpbtxt)) |
| `name`, `max_batch_size`, `version_policy`, `instance_group` | stay: each instance is a frontend of the one engine |
| `model_transaction_policy` | stays and has its effect. Without it a model is decoupled, and Triton's HTTP refuses `/infer`: write `model_transaction_policy { decoupled: false }` for clients that send it |

Each folder holds two files, and all folders of the same `quire.json` share one engine, its weights and its cache:

```
ensemble/config.pbtxt     backend: "quire"
                          max_batch_size: 64
ensemble/1/quire.json     {"model": "/path/to/checkpoint", "dialect": "tensorrt_llm"}
```

The dialect is the default of `exclude_input_in_output`: with it the text of an answer that is not streamed begins with the prompt,
as TensorRT-LLM's does; a request that states `true` gets the answer alone."""


def _range(name: str, hint: Any) -> str:
    if name in RANGES:
        return RANGES[name]
    kind = config.unless_none(hint)
    words = config._described(kind)
    base = get_args(kind)[0] if get_origin(kind) is not None else kind
    return words if base in (int, float, str, bool) else f"{words}, or its JSON"


def _default(name: str, value: Any) -> str:
    if name in DEFAULTS:
        return DEFAULTS[name]
    if value is None or value in ("", (), {}):
        return "unset"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _named(specs: Sequence[TensorSpec]) -> Iterator[str]:
    yield from ("| name | tensor | meaning |", "| --- | --- | --- |")
    for spec in specs:
        yield f"| {_name(spec)} | {spec.datatype.removeprefix('TYPE_')} | {_shown(spec.doc)} |"


def _name(spec: TensorSpec) -> str:
    return f"`{spec.name}`" + (f" (`{spec.ensemble_name}` on ensembles)" if spec.ensemble_name else "")


def _shown(text: str) -> str:
    return text.replace("|", "\\|")


def lines() -> Iterator[str]:
    yield HEAD
    yield from ("", "| name | tensor | may be | default | meaning |", "| --- | --- | --- | --- | --- |")
    hints, defaults = (
        get_type_hints(sampling.SamplingParams, include_extras=True),
        msgspec.structs.asdict(sampling.SamplingParams()),
    )
    for spec in schema.SAMPLING_INPUTS:
        may_be, default = _range(spec.name, hints[spec.name]), _default(spec.name, defaults[spec.name])
        yield f"| {_name(spec)} | {spec.datatype.removeprefix('TYPE_')} | {may_be} | {default} | {_shown(spec.doc)} |"
    others = [
        f"`{theirs}` is `{ours}`"
        for theirs, ours in sorted(sampling.ALIASES.items())
        if ours != "structured_output"
    ]
    guided = [
        f"`{name}`" for name, ours in sorted(sampling.ALIASES.items()) if ours == "structured_output" != name
    ]
    yield from (
        "",
        f"Other names: {', '.join(others)}; a grammar also by {', '.join(guided)} ([structured output](../model_repository/README.md#structured-output)).",
    )
    yield from ("", "## How a request runs", "", *_named(schema.SCHEDULING_INPUTS))
    yield from ("", "## How it is answered", "", *_named(schema.CONTROL_INPUTS))
    yield from (
        "", "## TensorRT-LLM's names", "",
        "vllm_backend's names are ours. TensorRT-LLM's are understood by every generator: those of `tensorrt_llm`, of `tensorrt_llm_bls` and its ensemble, and of `llmapi`. A model declares them as tensors if its config.pbtxt has a `max_batch_size` above 0; there `stop: true`, a BOOL, ends the request of that id.",
        "", "| name | here |", "| --- | --- |",
    )  # fmt: skip
    for theirs, ours in dialects.RENAMED.items():
        yield f"| `{theirs}` | `{ours}` |"
    for theirs in dialects._TENSORS:
        yield f"| `{theirs}` | {TENSORRT_LLM_TENSORS[theirs]} |"
    yield "| `bad_words`, `beam_width`, `early_stopping`, `temperature`, `repetition_penalty`, ... | the same names, above |"
    yield "| `lora_weights`, `lora_config`, `draft_input_ids` and all others | refused by name; [adapters](adapters.md) are loaded by the server |"
    yield from (
        "", "## Other backends' names of what is missing here", "",
        "Each is refused, unless its value asks for nothing.",
        "", "| name | accepted |", "| --- | --- |",
    )  # fmt: skip
    for theirs, neutral in dialects.NEUTRAL.items():
        yield f"| `{theirs}` | {', '.join(f'`{str(one).lower()}`' for one in ('null', *neutral))} |"
    yield from (
        "",
        "## What TensorRT-LLM's clients read",
        "",
        "From a model with a `max_batch_size` above 0; the first dimension is the batch.",
        "",
    )
    yield from ("| output | shape | meaning |", "| --- | --- | --- |")
    ours = ("text_output", "output_ids", "batch_index", "finish_reason")
    for spec in (
        *(spec for spec in schema.outputs_of(batched=True) if spec.name in ours),
        *schema.TENSORRT_LLM_OUTPUTS,
    ):
        yield f"| `{spec.name}` | {SHAPES.get(spec.name, '[1, 1]')} | {_shown(spec.doc.split(', [')[0].removesuffix('.'))} |"
    yield from (
        "",
        "`logprobs`, if asked for, is JSON. Context and generation logits are not returned.",
        "",
        REPOSITORY,
    )


def page() -> str:
    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    print(page(), end="")
