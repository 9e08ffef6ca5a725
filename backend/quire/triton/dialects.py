"""Translation of other backends' names of request fields into ours.

vllm_backend's tensor names are ours; its JSON has some keys more. TensorRT-LLM has three sets of names: those
of the model `tensorrt_llm` behind its ensemble, those of its text models (`tensorrt_llm_bls`, the ensemble),
and those of `llmapi`. A name means the same as a tensor (on models with a batch dimension, which declare
them), as a key of `sampling_parameters` and as a request parameter. But only as a tensor does `beam_width`
also set `n`, the flag `stop` is no key of `sampling_parameters`, and some must be tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quire.converters import integer
from quire.errors import InvalidArgumentError
from quire.request.sampling_params import MAX_BIAS, MAX_LOGIT_BIAS
from quire.request.structured_output import FIELDS as STRUCTURED_FIELDS
from quire_common.errors import shown

if TYPE_CHECKING:
    from quire.triton.raw_request import RawRequest

RENAMED: dict[str, str] = {
    "request_output_len": "max_tokens",
    "runtime_top_k": "top_k",
    "runtime_top_p": "top_p",
    "len_penalty": "length_penalty",
    "min_length": "min_tokens",
    "random_seed": "seed",
    "num_return_sequences": "n",
    "stop_words": "stop",
    "streaming": "stream",
    "exclude_input_from_output": "exclude_input_in_output",
    "return_log_probs": "return_logprobs",
    **{
        f"sampling_param_{name}": name
        for name in (
            "best_of",
            "temperature",
            "top_k",
            "top_p",
            "frequency_penalty",
            "presence_penalty",
            "max_tokens",
            "stop",
            "seed",
        )
    },
    "sampling_param_exclude_input_from_output": "exclude_input_in_output",
}
"""Our name of a field, by another backend's name of the same field."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_perf_metrics": (False,),
    "sampling_param_return_perf_metrics": (False,),
    "use_draft_logits": (False,),
    "num_draft_tokens": (0,),
    "beam_search_diversity_rate": (0,),
    "runtime_top_p_decay": (1,),
    "runtime_top_p_min": (),
    "runtime_top_p_reset_ids": (),
    "prompt_vocab_size": (0,),
    "prompt_embedding_table": (),
    "lora_task_id": (0,),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (-1,),
    "allowed_token_ids": (),
    "output_kind": (),
}
"""Parameters of other backends for features that are missing here, with the values that do without the
feature. Null and empty tensors are accepted as well; other values are refused. In a tensor, the first value
counts."""

_GUIDES = {
    "json": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Key of `structured_output` by TensorRT-LLM's `guided_decoding_guide_type`."""
_TENSORS = (
    "end_id",
    "pad_id",
    "input_lengths",
    "stop_words_list",
    "bad_words_list",
    "embedding_bias",
    "embedding_bias_words",
    "embedding_bias_weights",
    "guided_decoding_guide_type",
    "guided_decoding_guide",
)
"""TensorRT-LLM's tensors that no single field of ours matches; `translate` says what becomes of each."""

_WORDS = frozenset({"stop_words", "bad_words", "sampling_param_stop"})
"""Names of tensors with lists of words. TensorRT-LLM ignores empty words, and its examples send them, so
`rows` drops them."""

_FOREIGN = frozenset((*RENAMED, *NEUTRAL, *_TENSORS))


@dataclass(slots=True)
class Translation:
    """A request in our names."""

    raw: RawRequest
    cancel: bool = False
    """Whether the tensor `stop` is a flag and set: TensorRT-LLM's way to end the request of this id."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters made from fields without a counterpart here, for `parse_sampling_params`."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    """Name that the client used, by our name of the field; errors name the client's."""

    def values(self, stated: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of JSON or request parameters by our names; `names` gets the client's.

        `end_id` is added to `sampling` instead. `pad_id` and fields with a neutral value are left out.

        Raises:
            InvalidArgumentError: a field asks for a missing feature, is given twice under different names, or
                must be a tensor; or `end_id` is out of range.
        """
        for name in STRUCTURED_FIELDS:
            if stated.get(name) is not None and "structured_output" not in self.raw.tensors:
                self.names.setdefault("structured_output", name)  # what a grammar lacks is told of it
        if _FOREIGN.isdisjoint(stated):
            return dict(stated)
        renamed = {name: value for name, value in stated.items() if name not in _FOREIGN}
        for name, value in stated.items():
            if name in NEUTRAL:
                _check_neutral(name, value)
            elif name in RENAMED:
                self._rename(name, value, renamed)
            elif name == "end_id" and value is not None:
                self._end_at(integer(-1, 2**31 - 1)(name, value))
            elif name != "pad_id" and name in _TENSORS and value is not None:
                raise InvalidArgumentError(name, "must be given as a tensor")
        return renamed

    def _rename(self, name: str, value: Any, values: dict[str, Any]) -> None:
        """Adds a value to `values` under our name of its field.

        Raises:
            InvalidArgumentError: `values` has the field already.
        """
        ours = RENAMED[name]
        if ours in values:
            other = self.names.get(ours, ours)
            raise InvalidArgumentError(name, f"is the same as {other}, which is given as well")
        self.names[ours] = name
        values[ours] = value

    def _end_at(self, token_id: int) -> None:
        """Replaces the model's end tokens by `token_id`; -1: by none."""
        self.sampling["ignore_eos"] = True
        if token_id >= 0:
            self.sampling.setdefault("stop_token_ids", []).append(token_id)


def translate(raw: RawRequest, tokenizer: Any | None, vocab_size: int) -> Translation:
    """Translates a request's tensors into our names.

    Tensors in RENAMED get our names. `input_lengths` cuts `input_ids`. `end_id`, `stop_words_list`, biases
    and grammars become sampling parameters, and `bad_words_list` becomes `bad_words_ids`. `pad_id` and
    tensors with a neutral value are left out. A request whose stop flag is set is only marked by `cancel`, as
    other backends' clients send nothing useful beside the flag.

    Raises:
        InvalidArgumentError: names the client's field.
    """
    found = Translation(raw)
    if raw.tensors.get("stop") and isinstance(raw.tensors["stop"][0], bool):
        tensors = dict(raw.tensors)
        found.cancel = any(tensors.pop("stop"))
        found.raw = raw = replace(raw, tensors=tensors)
    if found.cancel or _FOREIGN.isdisjoint(raw.tensors):
        return found  # beside a stop signal others send a request of nothing
    tensors = {name: values for name, values in raw.tensors.items() if name not in _FOREIGN}
    given = {name: values for name, values in raw.tensors.items() if name in _FOREIGN}
    found.raw = replace(raw, tensors=tensors)
    for name, values in given.items():
        if name in NEUTRAL:
            for value in values[:1]:
                _check_neutral(name, value)
        elif name in RENAMED:
            found._rename(name, values, tensors)
    if "end_id" in given:
        found.names["stop_token_ids"] = "end_id"
        found._end_at(integer(-1, 2**31 - 1)("end_id", given["end_id"][0]))
    if "input_lengths" in given and "input_ids" in tensors:
        tensors["input_ids"] = _cut(tensors["input_ids"], given["input_lengths"][0])
    for words in _sequences(given, "stop_words_list", vocab_size):
        ours, word = "stop_token_ids", words[0]
        if len(words) > 1:
            if tokenizer is None:
                raise InvalidArgumentError("stop_words_list", "needs a tokenizer for words of several tokens")
            ours, word = "stop", tokenizer.hf.decode(words)
        found.names.setdefault(ours, "stop_words_list")
        found.sampling.setdefault(ours, []).append(word)
    found.bad_words_ids = tuple(map(tuple, _sequences(given, "bad_words_list", vocab_size)))
    bias = _bias(given, tokenizer)
    if bias:
        found.names["logit_bias"] = "embedding_bias" if "embedding_bias" in given else "embedding_bias_words"
        found.sampling["logit_bias"] = bias
    if given.keys() & {"guided_decoding_guide_type", "guided_decoding_guide"}:
        found.names["structured_output"] = "guided_decoding_guide"
        found.sampling["structured_output"] = _guide(given)
    return found


def _check_neutral(name: str, value: Any) -> None:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    neutral = NEUTRAL[name]
    if value is None or value in neutral or str(value).lower() in [str(one).lower() for one in neutral]:
        return
    only = f" but for {neutral[0]!r}" if neutral else ""
    raise InvalidArgumentError(name, f"is not supported{only}, got {shown(str(value))}")


def _cut(token_ids: list[int], length: int) -> list[int]:
    if not 1 <= length <= len(token_ids):
        raise InvalidArgumentError("input_lengths", f"must be in [1, {len(token_ids)}], got {length}")
    return token_ids[:length]


def _sequences(given: Mapping[str, list[int]], name: str, vocab_size: int) -> list[list[int]]:
    """Token ids of each word, from a tensor [2, n], flattened.

    The first row has the token ids of all words, one after the other. The second row has the position at
    which each word ends, and -1 after the last of these if there is room.

    Raises:
        InvalidArgumentError: odd number of elements, ends that do not ascend, or ids outside the vocabulary.
    """
    values = given.get(name, [])
    if len(values) % 2:
        raise InvalidArgumentError(name, f"must have the shape [2, n], got {len(values)} elements")
    half = len(values) // 2
    words, start = [], 0
    for end in values[half:]:
        if end == -1:
            break
        if not start < end <= half:
            raise InvalidArgumentError(name, f"ends of words must ascend in [1, {half}], got {end}")
        words.append(values[start:end])
        start = end
    for token_id in values[:start]:
        if not 0 <= token_id < vocab_size:
            raise InvalidArgumentError(name, f"token id {token_id} is outside the vocabulary of {vocab_size}")
    return words


def _bias(given: Mapping[str, list[Any]], tokenizer: Any | None) -> dict[int, float]:
    """Biases by token id, from TensorRT-LLM's bias for every token and its biases for some words.

    A word's bias goes to each of the word's tokens, and replaces the bias that the token had.

    Raises:
        InvalidArgumentError: too many tokens have a bias of their own, a bias is too large, there are words
            but no tokenizer, or numbers of words and of their biases differ.
    """
    dense = given.get("embedding_bias", [])
    bias = {token_id: weight for token_id, weight in enumerate(dense) if weight}
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidArgumentError(
            "embedding_bias", f"at most {MAX_LOGIT_BIAS} tokens may have one, got {len(bias)}"
        )
    words, weights = given.get("embedding_bias_words", []), given.get("embedding_bias_weights", [])
    if len(words) != len(weights):
        raise InvalidArgumentError(
            "embedding_bias_weights", f"{len(weights)} for {len(words)} embedding_bias_words"
        )
    for word, weight in zip(words, weights, strict=True):
        if tokenizer is None:
            raise InvalidArgumentError("embedding_bias_words", "needs a tokenizer")
        text = word.decode("utf-8", "replace")
        bias |= dict.fromkeys(tokenizer.hf.encode(text, add_special_tokens=False), weight)
    for weight in bias.values():
        if not -MAX_BIAS <= weight <= MAX_BIAS:
            field_name = "embedding_bias" if dense else "embedding_bias_weights"
            raise InvalidArgumentError(field_name, f"must be in [-{MAX_BIAS}, {MAX_BIAS}], got {weight:g}")
    return bias


def _guide(given: Mapping[str, list[bytes]]) -> dict[str, Any]:
    if "guided_decoding_guide_type" not in given:
        raise InvalidArgumentError("guided_decoding_guide", "needs a guided_decoding_guide_type")
    type_name = given["guided_decoding_guide_type"][0].decode("utf-8", "replace")
    key = _GUIDES.get(type_name)
    if key is None:
        raise InvalidArgumentError(
            "guided_decoding_guide_type", f"must be one of {', '.join(_GUIDES)}, got {shown(type_name)}"
        )
    if key == "json_object":
        return {key: True}
    if "guided_decoding_guide" not in given:
        raise InvalidArgumentError("guided_decoding_guide", f"must be given for {type_name}")
    try:
        return {key: given["guided_decoding_guide"][0].decode("utf-8")}
    except UnicodeDecodeError as error:
        raise InvalidArgumentError("guided_decoding_guide", f"invalid UTF-8 at byte {error.start}") from None


def rows(raw: RawRequest, most: int) -> list[RawRequest]:
    """Splits a batched request into one request per row; their tensors lack the batch dimension. A request
    without tensors is returned as it is.

    Args:
        most: largest number of rows.

    Raises:
        InvalidArgumentError: the tensors differ in their first dimension, or it is not in [1, most], or it is
            above 1 with embeddings.
    """
    counts = {shape[0] if shape else 1 for shape in raw.shapes.values()}
    if not counts:
        return [raw]
    if len(counts) > 1 or not 1 <= max(counts) <= most:
        raise InvalidArgumentError(
            "inputs", f"must share a batch of 1 to {most} in their first dimension, got {sorted(counts)}"
        )
    (count,) = counts
    if count > 1 and raw.embeds is not None:
        raise InvalidArgumentError("image_embeds", f"a batch of 1 is allowed, got {count}")
    parts = []
    for row in range(count):
        tensors, shapes = {}, {}
        for name, values in raw.tensors.items():
            size = len(values) // count
            part = values[row * size : (row + 1) * size]
            tensors[name] = [one for one in part if one] if name in _WORDS else part
            shapes[name] = raw.shapes[name][1:]
        parts.append(replace(raw, tensors=tensors, shapes=shapes))
    return parts
