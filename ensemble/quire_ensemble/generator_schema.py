"""Tensors of the generator, stated once.

The backend's `auto_complete_config` declares these tensors, its request parser reads them, and the repository
builder renders `config.pbtxt` files from them. This module imports nothing but the standard library, because
it is loaded in Triton's short-lived auto-complete stub.

Conventions: `dims` are the whole shape if `max_batch_size` is 0 (else see `inputs_of`); -1 is a free
dimension. Triton lets a request leave out any input. The request parser checks that there is exactly one
prompt source; a cancellation or a command (`cache_control`) needs none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model's configuration."""

    name: str
    datatype: str
    """Triton's name in a config.pbtxt: TYPE_STRING, TYPE_INT32, ..."""
    dims: tuple[int, ...] = (1,)
    optional: bool = True
    """Whether a request may leave this input out; without meaning for outputs."""
    doc: str = ""
    """One line that explains the tensor, such as a comment in config.pbtxt."""
    ensemble_name: str = ""
    """Name of this tensor as an input or output of an ensemble; empty: the same as `name`."""

    @property
    def on_ensemble(self) -> str:
        """The tensor's name as an input or output of an ensemble, where both share one namespace."""
        return self.ensemble_name or self.name

    def input_config(self) -> dict[str, Any]:
        """Returns the argument of `auto_complete_model_config.add_input`."""
        return {**self.output_config(), "optional": self.optional}

    def output_config(self) -> dict[str, Any]:
        """Returns the argument of `auto_complete_model_config.add_output`."""
        return {"name": self.name, "data_type": self.datatype, "dims": list(self.dims)}


MAX_PROMPTS = 256
"""Most prompts in one request."""

PROMPT_INPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("text_input", "TYPE_STRING", (-1,), doc="Prompts as UTF-8 text; special tokens are added."),
    TensorSpec(
        "messages",
        "TYPE_STRING",
        doc='Chat messages as JSON: a list, or an object {"messages": [...], "tools": [...]}.',
    ),
    TensorSpec("input_ids", "TYPE_INT32", (-1,), doc="Prompt as token ids, taken as they are."),
    TensorSpec("prompt_embeds", "TYPE_FP32", (-1, -1), doc="Prompt as embeddings, a row for each token."),
)
"""Prompt sources. A request has exactly one of them, unless it is a cancellation or a command
(`cache_control`)."""

ONE_TEXT_INPUTS: tuple[TensorSpec, ...] = tuple(
    replace(spec, dims=(1,), doc=spec.doc.replace("Prompts", "Prompt"))
    for spec in PROMPT_INPUTS
    if spec.datatype == "TYPE_STRING"
)
"""Prompt sources that are texts or JSON, each of one element: inputs of the model that an ensemble begins
with."""

IMAGE_INPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("image_embeds", "TYPE_FP32", (-1, -1), doc="Rows for the placeholder tokens of input_ids."),
    TensorSpec("image_spans", "TYPE_INT32", (-1, 2), doc="(first token, number of tokens) of each image."),
    TensorSpec("position_ids", "TYPE_INT32", (-1, -1), doc="[3, tokens] for models with M-RoPE, else empty."),
)
"""Inputs for the images of a prompt given as `input_ids`, as the vision models of an ensemble make them. If
all of them are empty, the prompt has no image. (`position_ids` are also for a prompt given as
`prompt_embeds`.)"""

TEXT_PAIR = TensorSpec(
    "text_pair", "TYPE_STRING", (-1,), doc="Second text of each pair to score; text_input: as many, or one."
)

CHAT_FORMAT = TensorSpec(
    "chat_format", "TYPE_STRING", doc="How to read an answer to messages: JSON of who tokenized them."
)

CONTROL_INPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("stream", "TYPE_BOOL", doc="True: text deltas as they come; false: one response."),
    TensorSpec(
        "output_mode",
        "TYPE_STRING",
        doc='What a response holds: "delta" (with stream), "cumulative" or, as one, "final".',
    ),
    TensorSpec("stream_interval", "TYPE_INT32", doc="Tokens per response; 0: as the load asks for."),
    TensorSpec("stream_interval_ms", "TYPE_INT32", doc="Shortest time between two responses."),
    TensorSpec("lora_name", "TYPE_STRING", doc="LoRA adapter to compute with; empty: none."),
    TensorSpec("cancel", "TYPE_BOOL", doc="True: end the running request that has this request's id."),
    TensorSpec("exclude_input_in_output", "TYPE_BOOL", doc="False: text_output begins with the prompt."),
    TensorSpec("return_num_input_tokens", "TYPE_BOOL", doc="Fill num_input_tokens."),
    TensorSpec("return_num_output_tokens", "TYPE_BOOL", doc="Fill num_output_tokens."),
    TensorSpec("return_num_cached_tokens", "TYPE_BOOL", doc="Fill num_cached_tokens."),
    TensorSpec("return_cumulative_logprob", "TYPE_BOOL", doc="Fill cumulative_logprob."),
    TensorSpec("return_num_reasoning_tokens", "TYPE_BOOL", doc="Fill num_reasoning_tokens at the end."),
    TensorSpec("return_finish_reason", "TYPE_BOOL", doc="Fill finish_reason."),
    TensorSpec("return_stop_reason", "TYPE_BOOL", doc="Fill stop_reason at the end."),
    TensorSpec("return_timing", "TYPE_BOOL", doc="Fill timing at the end."),
    TensorSpec("return_logprobs", "TYPE_BOOL", doc="Fill logprobs."),
    TensorSpec("return_embedding", "TYPE_BOOL", doc="Fill embedding, and generate nothing."),
    TensorSpec("return_scores", "TYPE_BOOL", doc="Fill scores and label, and generate nothing."),
    TensorSpec("use_activation", "TYPE_BOOL", doc="False: scores are logits, as for rewards."),
)
"""Inputs on how the request is answered, and the inputs `cancel` and `lora_name`."""

CACHE_CONTROL_INPUT = TensorSpec(
    "cache_control",
    "TYPE_STRING",
    doc='A command, as JSON: {"command": "reset"}, "inspect", "unpin", "requests", "adapters" ...',
)

JSON_SAMPLING_INPUT = TensorSpec(
    "sampling_parameters", "TYPE_STRING", doc="JSON object of sampling parameters; typed tensors override it."
)

SAMPLING_INPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("max_tokens", "TYPE_INT32", doc="Most tokens to generate."),
    TensorSpec("min_tokens", "TYPE_INT32", doc="No end of text before this many tokens."),
    TensorSpec("temperature", "TYPE_FP32", doc="0 is greedy."),
    TensorSpec("top_k", "TYPE_INT32", doc="Sample among the k most likely tokens; 0 or -1: all."),
    TensorSpec("top_p", "TYPE_FP32", doc="Nucleus sampling, in [0, 1]; 0: off."),
    TensorSpec("min_p", "TYPE_FP32", doc="Least probability relative to the most likely token."),
    TensorSpec("typical_p", "TYPE_FP32", doc="Locally typical sampling, in (0, 1]."),
    TensorSpec("repetition_penalty", "TYPE_FP32", doc="Over prompt and output; 1 is neutral."),
    TensorSpec("presence_penalty", "TYPE_FP32", doc="Once per generated token id; 0 is neutral."),
    TensorSpec("frequency_penalty", "TYPE_FP32", doc="Per occurrence in the output; 0 is neutral."),
    TensorSpec("no_repeat_ngram_size", "TYPE_INT32", doc="No n-gram of this size twice; 0: off."),
    TensorSpec("seed", "TYPE_UINT64", doc="Seed of this request's sampling."),
    TensorSpec("stop", "TYPE_STRING", (-1,), doc="Strings that end the output."),
    TensorSpec("stop_token_ids", "TYPE_INT32", (-1,), doc="Token ids that end the output."),
    TensorSpec("bad_words", "TYPE_STRING", (-1,), doc="Words that never appear."),
    TensorSpec("ignore_eos", "TYPE_BOOL", doc="Generate past the end-of-text token."),
    TensorSpec("include_stop_str_in_output", "TYPE_BOOL", doc="Keep the stop string in text_output."),
    TensorSpec("skip_special_tokens", "TYPE_BOOL", doc="Leave special tokens out of text_output."),
    TensorSpec(
        "logprobs",
        "TYPE_INT32",
        doc="Log-probabilities of the k most likely tokens.",
        ensemble_name="num_logprobs",
    ),
    TensorSpec(
        "prompt_logprobs",
        "TYPE_INT32",
        doc="As logprobs, for the prompt's tokens.",
        ensemble_name="num_prompt_logprobs",
    ),
    TensorSpec("logit_bias", "TYPE_STRING", doc="JSON object of token id to bias."),
    TensorSpec(
        "logits_processors", "TYPE_STRING", doc='JSON list of names, or of {"name": ..., "args": {...}}.'
    ),
    TensorSpec("n", "TYPE_INT32", doc="Choices to return, each response with its index."),
    TensorSpec("best_of", "TYPE_INT32", doc="Choices to generate; the n most likely are returned."),
    TensorSpec("beam_width", "TYPE_INT32", doc="Above 1: beam search; the n best beams are returned."),
    TensorSpec("length_penalty", "TYPE_FP32", doc="Beams are ranked by logprob / length ** this."),
    TensorSpec("early_stopping", "TYPE_BOOL", doc="Beam search ends with beam_width finished beams."),
    TensorSpec("thinking_budget", "TYPE_INT32", doc="Most tokens of reasoning in an answer to messages."),
    TensorSpec("dimensions", "TYPE_INT32", doc="First so many of the embedding alone; 0: all."),
    TensorSpec(
        "structured_output",
        "TYPE_STRING",
        doc="JSON object with one of json, json_object, regex, choice, grammar, structural_tag.",
    ),
)
"""Sampling parameters as tensors of their own; each name is a key of `sampling_parameters` too."""

SCHEDULING_INPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("request_priority", "TYPE_INT32", doc="A smaller number is more urgent; 0 is usual."),
    TensorSpec("tenant", "TYPE_STRING", doc="On whose account the request runs."),
    TensorSpec("ttft_deadline_ms", "TYPE_INT32", doc="No token by then: finish_reason timeout."),
    TensorSpec("deadline_ms", "TYPE_INT32", doc="Not finished by then: finish_reason timeout."),
    TensorSpec("cache_salt", "TYPE_STRING", doc="Share cached blocks only with requests of this salt."),
    TensorSpec("cache_retention", "TYPE_INT32", doc="0 to 100: cached blocks of more are evicted later."),
    TensorSpec("cache_ttl_ms", "TYPE_INT32", doc="Forget cached blocks that are unused for this long."),
    TensorSpec("cache_pin", "TYPE_BOOL", doc="Keep the blocks of the prompt from eviction."),
    TensorSpec("cache_result", "TYPE_BOOL", doc="False: never from the result cache, nor into it."),
    TensorSpec("session", "TYPE_STRING", doc="Conversation whose blocks stay from turn to turn."),
    TensorSpec("session_end", "TYPE_BOOL", doc="Last request of the session: its blocks are released."),
    TensorSpec("num_draft", "TYPE_INT32", doc="0 to 64: most tokens that a step tries beyond the next one."),
)
"""Inputs on how the request runs and what stays in the cache; all are keys of `sampling_parameters` too."""

INPUTS: tuple[TensorSpec, ...] = (
    *PROMPT_INPUTS,
    TEXT_PAIR,
    *IMAGE_INPUTS,
    CHAT_FORMAT,
    *CONTROL_INPUTS,
    CACHE_CONTROL_INPUT,
    JSON_SAMPLING_INPUT,
    *SAMPLING_INPUTS,
    *SCHEDULING_INPUTS,
)

OUTPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("text_output", "TYPE_STRING", doc="Text; the delta when streaming."),
    TensorSpec("reasoning_output", "TYPE_STRING", doc="Reasoning of an answer to messages, as text_output."),
    TensorSpec("tool_calls", "TYPE_STRING", doc="JSON list of its calls, in the form of OpenAI's deltas."),
    TensorSpec("output_ids", "TYPE_INT32", (-1,), doc="Token ids of this response."),
    TensorSpec("finish_reason", "TYPE_STRING", doc="stop, length, ...; empty while the request runs."),
    TensorSpec("stop_reason", "TYPE_STRING", doc="Stop string or token id that ended it, or empty."),
    TensorSpec("index", "TYPE_INT32", doc="Number of the choice this response belongs to."),
    TensorSpec("batch_index", "TYPE_INT32", doc="Number of the prompt this response belongs to."),
    TensorSpec("num_input_tokens", "TYPE_UINT32", doc="Tokens of the prompt."),
    TensorSpec("num_output_tokens", "TYPE_UINT32", doc="Tokens of this response."),
    TensorSpec("num_cached_tokens", "TYPE_UINT32", doc="Tokens of the prompt that the KV cache had."),
    TensorSpec("num_reasoning_tokens", "TYPE_UINT32", doc="Tokens of the choice so far that are reasoning."),
    TensorSpec("logprobs", "TYPE_STRING", doc="JSON, aligned with output_ids."),
    TensorSpec("prompt_logprobs", "TYPE_STRING", doc="JSON, once per prompt; null for its first token."),
    TensorSpec("cumulative_logprob", "TYPE_FP32", doc="Sum of the choice's log-probabilities so far."),
    TensorSpec("embedding", "TYPE_FP32", (-1,), doc="Of the prompt; who asks for it gets no tokens."),
    TensorSpec("scores", "TYPE_FP32", (-1,), doc="Of the prompt, one for each label; as embedding."),
    TensorSpec("label", "TYPE_STRING", doc="Label of the largest score."),
    TensorSpec("timing", "TYPE_STRING", doc="JSON: queue, prefill, decode, total, ... in milliseconds."),
)


_SCALARS = {
    "TYPE_INT32": (
        "request_output_len input_lengths end_id pad_id runtime_top_k min_length num_return_sequences "
        "num_draft_tokens runtime_top_p_reset_ids prompt_vocab_size "
        "sampling_param_best_of sampling_param_top_k sampling_param_max_tokens"
    ),
    "TYPE_UINT64": "random_seed sampling_param_seed",
    "TYPE_FP32": (
        "runtime_top_p runtime_top_p_min runtime_top_p_decay len_penalty beam_search_diversity_rate "
        "sampling_param_temperature sampling_param_top_p sampling_param_frequency_penalty "
        "sampling_param_presence_penalty"
    ),
    "TYPE_BOOL": (
        "streaming return_log_probs return_context_logits return_generation_logits return_perf_metrics "
        "use_draft_logits sampling_param_exclude_input_from_output sampling_param_return_perf_metrics"
    ),
    "TYPE_STRING": "guided_decoding_guide_type guided_decoding_guide",
}

TENSORRT_LLM_INPUTS: tuple[TensorSpec, ...] = (
    *(
        TensorSpec(name, datatype, doc="TensorRT-LLM's name.")
        for datatype, names in _SCALARS.items()
        for name in names.split()
    ),
    TensorSpec("stop_words", "TYPE_STRING", (-1,), doc="As stop."),
    TensorSpec("sampling_param_stop", "TYPE_STRING", (-1,), doc="As stop."),
    TensorSpec("stop_words_list", "TYPE_INT32", (2, -1), doc="Ids of all words; where each ends, then -1."),
    TensorSpec("bad_words_list", "TYPE_INT32", (2, -1), doc="Ids of all words; where each ends, then -1."),
    TensorSpec("embedding_bias", "TYPE_FP32", (-1,), doc="Bias of every token id."),
    TensorSpec("embedding_bias_words", "TYPE_STRING", (-1,), doc="Words whose tokens have a bias."),
    TensorSpec("embedding_bias_weights", "TYPE_FP32", (-1,), doc="Bias of each of the words."),
)
"""Inputs with names of TensorRT-LLM, for generators with a batch dimension. `quire.triton.dialects` gives
their meanings."""

TENSORRT_LLM_OUTPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("sequence_index", "TYPE_INT32", doc="As index."),
    TensorSpec("sequence_length", "TYPE_INT32", (-1,), doc="Tokens of this response, [1, 1]."),
    TensorSpec("cum_log_probs", "TYPE_FP32", (-1,), doc="As cumulative_logprob, [1, 1]."),
    TensorSpec("output_log_probs", "TYPE_FP32", (-1, -1), doc="Of each token of output_ids, [1, 1, n]."),
)


def inputs_of(*, batched: bool) -> tuple[TensorSpec, ...]:
    """Returns the inputs of a generator.

    Args:
        batched: whether the generator's max_batch_size is above 0. Then every input has one more dimension,
            the batch, before its dims. TensorRT-LLM's inputs are added, and `stop` is a flag as there.
    """
    if not batched:
        return INPUTS
    flag = TensorSpec("stop", "TYPE_BOOL", doc="True: end the running request that has this request's id.")
    return (*(spec for spec in INPUTS if spec.name != "stop"), flag, *TENSORRT_LLM_INPUTS)


def outputs_of(*, batched: bool) -> tuple[TensorSpec, ...]:
    """Returns the outputs of a generator. If it is `batched`, TensorRT-LLM's outputs are added, and
    `output_ids` is [1, 1, n] with the batch dimension, as there."""
    if not batched:
        return OUTPUTS
    ours = (replace(spec, dims=(-1, -1)) if spec.name == "output_ids" else spec for spec in OUTPUTS)
    return (*ours, *TENSORRT_LLM_OUTPUTS)
