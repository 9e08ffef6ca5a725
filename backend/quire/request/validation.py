"""Checks of a request against its model. Most are made in the frontend and again in the engine."""

from __future__ import annotations

import itertools
from collections.abc import Container

from quire.errors import InvalidArgumentError
from quire.layers.pooling import Pooling
from quire.request.sampling_params import MAX_PROMPT_LOGPROBS, SamplingParams


def check_prompt(
    prompt_token_ids: list[int], *, vocab_size: int, max_model_len: int, is_pooled: bool = False
) -> None:
    """Raises InvalidArgumentError for a prompt that is empty, too long, or has a token id outside the
    vocabulary. The prompt is too long if it is longer than `max_model_len`, or, unless it is pooled, as
    long."""
    if not prompt_token_ids:
        raise InvalidArgumentError("prompt", "must hold at least one token")
    check_prompt_length(len(prompt_token_ids), max_model_len, is_pooled=is_pooled)
    low, high = min(prompt_token_ids), max(prompt_token_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InvalidArgumentError("input_ids", f"token id {bad} is outside the vocabulary of {vocab_size}")


def check_prompt_length(num_tokens: int, max_model_len: int, *, is_pooled: bool = False) -> None:
    """Raises InvalidArgumentError for a prompt of more than `max_model_len` tokens, and for one of just as
    many that is not pooled, as it leaves no room for a generated token."""
    if is_pooled:
        if num_tokens > max_model_len:
            raise InvalidArgumentError(
                "prompt", f"{num_tokens} tokens, at most {max_model_len} (max_model_len) are allowed"
            )
    elif num_tokens >= max_model_len:
        raise InvalidArgumentError(
            "prompt", f"{num_tokens} tokens leave no room to generate: max_model_len is {max_model_len}"
        )


def check_token_parameters(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidArgumentError if a sampling parameter names a token id outside the vocabulary."""
    named = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": tuple(params.logit_bias),
        "thinking_budget": _thinking_ids(params),
        "bad_words": tuple(itertools.chain.from_iterable(params.bad_words_ids)),
    }
    for field, token_ids in named.items():
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidArgumentError(
                    field, f"token id {token_id} is outside the vocabulary of {vocab_size}"
                )


def check_prompt_logprobs(params: SamplingParams, num_prompt_tokens: int) -> None:
    """Raises InvalidArgumentError if the request asks for more than MAX_PROMPT_LOGPROBS log-probabilities of
    its prompt."""
    if params.prompt_logprobs is None:
        return
    count = (num_prompt_tokens - 1) * (params.prompt_logprobs + 1)
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidArgumentError(
            "prompt_logprobs",
            f"{params.prompt_logprobs} beside each token of a prompt of {num_prompt_tokens} make {count} "
            f"numbers, at most {MAX_PROMPT_LOGPROBS} are allowed",
        )


def as_pooling(params: SamplingParams, pooling: Pooling, hidden_size: int) -> SamplingParams:
    """Returns the engine's sampling parameters for a request for an embedding or scores. Only the client's
    `dimensions` and `pooling` count, because no token is sampled.

    Args:
        params: the client's parameters; without `dimensions`, an embedding has the size `hidden_size`.
        pooling: what the model can do.
        hidden_size: the model's hidden size, the largest size of an embedding.

    Raises:
        InvalidArgumentError: the model gives no such result; `dimensions` is above `hidden_size` or, for
            scores, not their number; or the client wants several choices, beams, log-probabilities or a
            structured output as well.
    """
    size = params.dimensions or hidden_size
    if params.pooling.task == "classify":
        if not pooling.num_scores:
            raise InvalidArgumentError(
                "scores", "are not supported: the checkpoint is no classifier, reranker or reward model"
            )
        size = pooling.num_scores
        if params.dimensions not in (0, size):
            raise InvalidArgumentError("dimensions", "is of an embedding, and scores are asked for")
    elif pooling.why_not:
        raise InvalidArgumentError("embedding", f"is not supported: {pooling.why_not}")
    if size > hidden_size and params.pooling.task == "embed":
        raise InvalidArgumentError(
            "dimensions", f"at most {hidden_size} (the model's hidden size), got {params.dimensions}"
        )
    of_tokens = {
        "best_of": (params.best_of or 1) > 1,  # also where the frontend has made it the `n` (`split_ranking`)
        "n": params.n > 1,
        "beam_width": params.beam_width > 1,
        "logprobs": params.logprobs is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "structured_output": params.structured_output is not None,
    }
    for field, is_stated in of_tokens.items():
        if is_stated:
            raise InvalidArgumentError(field, "must not be given where an embedding or scores are wanted")
    return SamplingParams(dimensions=size, pooling=params.pooling, max_tokens=1)


def check_generates(pooling: Pooling) -> None:
    """Raises InvalidArgumentError if the model generates no tokens."""
    if not pooling.generates:
        asked = "return_scores" if pooling.num_scores else "return_embedding"
        raise InvalidArgumentError(asked, "must be true: this checkpoint generates no tokens")


def check_logits_processors(params: SamplingParams, listed: Container[str]) -> None:
    """Raises InvalidArgumentError for a logits processor that the configuration does not list."""
    for one in params.logits_processors:
        if one.name not in listed:
            raise InvalidArgumentError(
                "logits_processors", f"{one.name!r:.80} is not listed in the engine's configuration"
            )


def check_choices(params: SamplingParams, max_num_seqs: int) -> None:
    """Raises InvalidArgumentError if the request has more choices, or more beams, than `max_num_seqs`."""
    if params.num_sequences > max_num_seqs:
        field = "beam_width" if params.beam_width > 1 else "best_of" if params.best_of else "n"
        raise InvalidArgumentError(
            field, f"at most {max_num_seqs} (max_num_seqs of the engine), got {params.num_sequences}"
        )


def _thinking_ids(params: SamplingParams) -> tuple[int, ...]:
    tags = params.thinking
    return () if tags is None else (*tags.open_ids, *tags.end_ids, *tags.forced_ids)
