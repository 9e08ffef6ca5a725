"""ResultCache: an engine's outputs for deterministic requests, to answer the same requests again.

It keeps what the engine sent (token ids, log-probabilities, embeddings), not what clients were sent, and how
each choice ended. A hit goes through the same processors as an engine's outputs, so texts, stop strings,
parsers, dialects and pacing are the request's own.

A request's key is a digest of the engine's fingerprint, files of the tokenizer and the messages to the
engine, one per prompt. A message counts with its adapter's digest and its embeddings' hashes, but without the
request's ids, its arrival time and the scheduling parameters other than tenant and cache salt. So a new field
of AddRequest or SamplingParams is part of the key by itself.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec

from quire.config import ResultCacheConfig
from quire.core.request import FinishReason
from quire.engine.messages import AddRequest, EngineInfo
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.result_store import MemoryStore, RedisStore
from quire.outputs import EngineCoreOutput
from quire.request.scheduling_params import SchedulingParams
from quire.triton.parsed_request import ParsedRequest
from quire.triton.results import LASTING, ChoiceResult, Recording, Results
from quire_ensemble.tokenizer import tokenizer_json

logger = logging.getLogger("quire")

VERSION = 2
"""Version of the entries' format; entries of another version are not found."""
MAX_ENTRY_BYTES = 16 * 2**20
"""Largest size of an entry, which holds the results of one request."""
MAX_SHARE = 8
"""An entry larger than 1/MAX_SHARE of the configured `result_cache.memory` is not kept in memory."""

_decoder = msgspec.msgpack.Decoder(Results)
_encoder = msgspec.msgpack.Encoder()


class ResultCache:
    """Result cache of one frontend. The intake's threads call `look_up`, the responder's thread calls `keep`.

    Args:
        config: the configuration key `result_cache`.
        tokenizer: the tokenizer's directory or file, as a grammar's meaning depends on it; None: there is no
            tokenizer.

    Raises:
        ConfigError: `url` is set, and redis-py is not installed or refuses it.
    """

    def __init__(self, config: ResultCacheConfig, tokenizer: Path | None = None) -> None:
        self._memory = MemoryStore(config.memory, config.ttl_s)
        self._redis: RedisStore | None = None
        if config.url:
            self._redis = RedisStore(config.url, config.ttl_s, MAX_ENTRY_BYTES)
        self._tokenizer = "" if tokenizer is None else _digest_of_files(tokenizer)

    @classmethod
    def from_config(cls, config: ResultCacheConfig, tokenizer: Path | None = None) -> ResultCache | None:
        """Makes the cache that a configuration asks for; None: it is off. Raises ConfigError."""
        return cls(config, tokenizer) if config.is_on else None

    def look_up(self, parsed: ParsedRequest, info: EngineInfo) -> None:
        """Sets `parsed.results` if the cache has them, else `parsed.recording`.

        Sets neither for a request that `_is_deterministic` excludes, or if the engine has no fingerprint.
        """
        if not info.fingerprint or not all(map(_is_deterministic, (parsed, *parsed.others))):
            return
        key = self._key(parsed, info.fingerprint)
        data = self._memory.get(key)
        found = None if data is None else _decoded(data, parsed, info)
        if found is None and self._redis is not None and (data := self._redis.get(key)) is not None:
            found = _decoded(data, parsed, info)
            if found is not None:
                self._remember(key, data)
        if found is None:
            adapters = {one.adapter: one.adapter_digest for one in (parsed, *parsed.others) if one.adapter}
            parsed.recording = Recording(key, info.fingerprint, adapters)
        else:
            parsed.results = found

    def keep(self, recording: Recording, finished: list[OutputProcessor], info: EngineInfo) -> None:
        """Stores a recording whose results would be the same again.

        It is dropped if a choice ended by anything but a stop or its length, if the engine's fingerprint or
        an adapter of the request has changed since the look-up, or if it is larger than MAX_ENTRY_BYTES.
        Above 1/MAX_SHARE of the configured `memory`, only Redis may get it.

        Args:
            finished: all choices of the request.
            info: the engine as it is now. Since the look-up another engine may have gone on with the request,
                or its adapter may have been replaced.
        """
        adapters = {one.name: one.digest for one in info.adapters}
        if recording.fingerprint != info.fingerprint or not recording.adapters.items() <= adapters.items():
            return
        for choice in finished:
            result = recording.choices.get((choice.item, choice.index))
            if result is None or choice.finish_reason not in LASTING:
                return
            result.finish_reason = choice.finish_reason or ""
        data = _encoder.encode(Results(VERSION, list(recording.choices.values())))
        if len(data) > MAX_ENTRY_BYTES:
            return
        self._remember(recording.key, data)
        if self._redis is not None:
            self._redis.put(recording.key, data)

    def _remember(self, key: bytes, data: bytes) -> None:
        if len(data) <= self._memory.max_bytes // MAX_SHARE:
            self._memory.put(key, data)

    def close(self) -> None:
        if self._redis is not None:
            self._redis.close()

    def _key(self, parsed: ParsedRequest, fingerprint: str) -> bytes:
        state = hashlib.blake2b(f"{VERSION} {fingerprint} {self._tokenizer}".encode(), digest_size=24)
        for prompt in (parsed, *parsed.others):
            message, embeds = add_request("", prompt, 0.0), prompt.embeds
            account = prompt.scheduling
            shared = SchedulingParams(tenant=account.tenant, cache_salt=account.cache_salt)
            message = msgspec.structs.replace(message, external_id="", scheduling=shared, embeds=None)
            content = None if embeds is None else (embeds.spans, embeds.hashes, embeds.position_ids)
            encoded = _encoder.encode((message, content))
            state.update(len(encoded).to_bytes(8, "little") + encoded)
        return state.digest()


def add_request(request_id: str, prompt: ParsedRequest, arrival_time: float) -> AddRequest:
    """Makes the engine's message for a prompt."""
    return AddRequest(
        request_id,
        prompt.prompt_token_ids,
        prompt.params,
        scheduling=prompt.scheduling,
        external_id=prompt.external_id,
        arrival_time=arrival_time,
        embeds=prompt.embeds,
        adapter=prompt.adapter,
        adapter_digest=prompt.adapter_digest,
    )


def nothing_said(num_choices: list[int]) -> Results:
    """Returns the results of prompts whose answers have no token.

    Args:
        num_choices: number of choices of each prompt.
    """
    places = [(item, index) for item, count in enumerate(num_choices) for index in range(count)]
    return Results(VERSION, [ChoiceResult(*place, [], FinishReason.LENGTH.value) for place in places])


def replayed(results: Results, request_ids: list[str], parsed: ParsedRequest) -> Iterator[EngineCoreOutput]:
    """Yields results as outputs of an engine.

    Without a stream each choice has one output. In a stream a choice's first output has at most one token.
    Each further one has the next `stream_interval` tokens, as far as there are so many, or all the rest if
    `stream_interval` is 0.

    Args:
        results: the request's results.
        request_ids: the id that each of the request's prompts would have in an engine.
        parsed: the request.
    """
    size = parsed.stream_interval or MAX_ENTRY_BYTES
    longest = max(len(one.token_ids) for one in results.choices)
    starts = [0, *range(1, longest, size)] if parsed.stream else [0]
    for start, end in zip(starts, [*starts[1:], max(1, longest)], strict=True):
        for one in results.choices:
            length = len(one.token_ids)
            if start and start >= length:
                continue
            is_last = end >= length
            yield EngineCoreOutput(
                request_ids[one.item],
                one.token_ids[start:end],
                one.finish_reason if is_last else None,
                one.stop_reason if is_last else None,
                logprobs=None if one.logprobs is None else one.logprobs[start:end],
                num_cached_tokens=one.num_cached_tokens,
                index=one.index,
                cumulative_logprob=one.cumulative_logprob if is_last else None,
                prompt_logprobs=None if start else one.prompt_logprobs,
                embedding=one.embedding,
            )


def _is_deterministic(prompt: ParsedRequest) -> bool:
    """Whether a prompt's results may come from the cache; False for commands.

    They must be the same each time: greedy or with a seed, and without logits processors, which may do
    anything. Pins and sessions keep blocks in the engine, so the engine must get those requests. The content
    of an adapter must be known, and the client must not have turned the cache off.
    """
    params, scheduling = prompt.params, prompt.scheduling
    return (
        not prompt.cancel
        and prompt.cache_control is None
        and (params.is_greedy or params.seed is not None)
        and not params.logits_processors
        and not (scheduling.pin or scheduling.session)
        and bool(prompt.adapter) == bool(prompt.adapter_digest)
        and scheduling.cache_result
    )


def _decoded(data: bytes, parsed: ParsedRequest, info: EngineInfo) -> Results | None:
    """Decodes an entry; None: it is invalid or does not fit the request."""
    try:
        results = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    prompts = (parsed, *parsed.others)
    places = {(item, index) for item, prompt in enumerate(prompts) for index in range(prompt.params.n)}
    is_right = (
        results.version == VERSION
        and len(results.choices) == len(places)
        and {(one.item, one.index) for one in results.choices} == places
        and all(one.is_sound(info.vocab_size) for one in results.choices)
        and all(len(one.token_ids) <= info.max_model_len for one in results.choices)
        and all(_fits_request(one, prompts[one.item]) for one in results.choices)
    )
    return results if is_right else None


def _fits_request(one: ChoiceResult, prompt: ParsedRequest) -> bool:
    """Whether a choice's result has what its prompt asks for.

    The embedding or scores must have exactly `dimensions` numbers (0: none). If there are tokens, there must
    be log-probabilities exactly if they are asked for. Prompt log-probabilities, if there, must be asked for
    and have the prompt's length. There must be no more tokens than `max_tokens`, and no more cached tokens
    than the prompt has tokens.
    """
    params, num_prompt_tokens = prompt.params, len(prompt.prompt_token_ids)
    if len(one.embedding) != 4 * params.dimensions:
        return False
    if params.max_tokens is not None and len(one.token_ids) > params.max_tokens:
        return False
    if one.num_cached_tokens > num_prompt_tokens:
        return False
    told = one.prompt_logprobs  # of the first choice alone
    if told is not None and (params.prompt_logprobs is None or len(told) != num_prompt_tokens):
        return False
    return not one.token_ids or (one.logprobs is None) == (prompt.params.logprobs is None)


def _digest_of_files(tokenizer: Path) -> str:
    state = hashlib.blake2b(digest_size=16)
    if tokenizer.is_file():
        state.update(tokenizer_json(tokenizer).encode())
        return state.hexdigest()
    for file in sorted(tokenizer.iterdir()):
        if file.is_file() and any(word in file.name for word in ("token", "vocab", "merges")):
            data = file.read_bytes()
            state.update(f"{file.name} {len(data)}\n".encode() + data)
    return state.hexdigest()
