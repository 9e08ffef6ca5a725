"""LLM: runs the engine in the caller's own process, for offline use and tests."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quire.config import EngineConfig
from quire.engine.cache_commands import MAX_PROFILE_S, MAX_PROFILE_STEPS, Profile
from quire.engine.core import EngineCore
from quire.errors import EngineError, InvalidArgumentError
from quire.frontend.bad_words import with_bad_words_ids
from quire.frontend.chat.formats import ChatParsing, prepare_answer
from quire.frontend.output_processor import RequestProcessor, split_ranking
from quire.grammar import Vocabulary
from quire.outputs import RequestOutput
from quire.request.multimodal import PromptEmbeds
from quire.request.sampling_params import (
    PoolingParams,
    SamplingParams,
    check_limits,
    defaults_from_generation_config,
    parse_sampling_params,
)
from quire.request.scheduling_params import SchedulingParams
from quire.request.structured_output import StructuredOutput
from quire_ensemble.chat_format import ChatFormat


class LLM:
    """Generates with the same engine that Triton serves.

    Args:
        model: checkpoint directory, .gguf file, or a hub's OWNER/NAME[/FILE.gguf|:TYPE][@REVISION].
        options: keys of `EngineConfig` (max_num_seqs, dtype, ...), flat.

    Raises:
        QuireError, HubError, TokenizerError: the engine cannot start. It is usually a CheckpointError or a
            ConfigError, whose message names the file or the keys.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        from quire.loader.info import read_configs
        from quire_common.hub import find_checkpoint
        from quire_ensemble.tokenizer import Tokenizer

        model = find_checkpoint(model)
        self.config = EngineConfig.from_mapping({"model": str(model), **options})
        _, generation = read_configs(model)
        self.core = EngineCore(self.config)
        self.default_params = defaults_from_generation_config(generation)
        self.tokenizer = Tokenizer.find(self.config.model.tokenizer, model)
        self._chat_parsing = ChatParsing.from_config(self.tokenizer, self.config.frontend)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        embeds: Sequence[PromptEmbeds | None] | None = None,
        scheduling: SchedulingParams | Sequence[SchedulingParams] | None = None,
        *,
        chats: Sequence[ChatFormat | None] | None = None,
        adapters: str | Sequence[str | None] | None = None,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Runs all prompts together, continuously batched, and returns whole outputs in their order.

        Args:
            prompts: a text, texts, or lists of token ids.
            params: one for all or one per prompt; None: the checkpoint's defaults, changed by `sampling`.
            embeds: for each prompt, embeddings of images or None; their spans count the prompt's tokens.
            scheduling: priority, tenant, session ...; one for all or one per prompt.
            chats: for each prompt, the format of the answer if the prompt is made of chat messages, or None.
            adapters: names of LoRA adapters (`lora_modules`); one for all or one per prompt.
            sampling: parameters by their names in SAMPLING_FIELDS; used only if `params` is None.

        Returns:
            One output per prompt. With n > 1 it is choice 0, and its `others` are choices 1 to n - 1. In beam
            search, or with best_of above n, choice 0 is the best.

        Raises:
            InvalidArgumentError: a prompt or parameter is wrong, so that none of the prompts was run.
            UnavailableError: the engine refuses a prompt for now, for example because its queue is full, so
                that none of the prompts was run.
            InputError: a text cannot be tokenized, so that none of the prompts was run.
            EngineError: the engine failed, an adapter could not be read again, or a prompt is text and the
                checkpoint has no tokenizer.
        """
        batch: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        if params is None:
            params = parse_sampling_params(sampling, defaults=self.default_params)
        stated = [params] if isinstance(params, SamplingParams) else list(params)
        for one in stated:
            check_limits(one)
        each = stated * len(batch) if isinstance(params, SamplingParams) else stated
        images = [None] * len(batch) if embeds is None else list(embeds)
        scheduling = scheduling or SchedulingParams()
        plans = [scheduling] * len(batch) if isinstance(scheduling, SchedulingParams) else list(scheduling)
        names = [adapters] * len(batch) if adapters is None or isinstance(adapters, str) else list(adapters)
        assert len(each) == len(images) == len(plans) == len(names) == len(batch), "one of each per prompt"
        processors: dict[str, RequestProcessor] = {}
        request_ids: list[str] = []
        unasked: set[str] = set()

        @functools.cache
        def check(grammar: StructuredOutput) -> None:
            self._vocabulary.compile(grammar)

        try:
            for prompt, one, image, plan, name in zip(batch, each, images, plans, names, strict=True):
                token_ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
                if image is not None and self.core.info.has_joint_images:
                    image = dataclasses.replace(image, is_joint=True)
                request_id = f"llm-{next(self._ids)}"
                chat = None if chats is None else chats[len(processors)]
                one, new_answer = prepare_answer(self._chat_parsing, one, chat, check)
                if one.bad_words:
                    if self.tokenizer is None:
                        raise InvalidArgumentError(
                            "bad_words", "needs a tokenizer, and this checkpoint has none"
                        )
                    one = with_bad_words_ids(one, self.tokenizer)
                asked, (one, num_best) = one, split_ranking(one)
                request_ids.append(request_id)
                self.core.add_request(
                    request_id, token_ids, one, scheduling=plan, embeds=image, adapter=name or ""
                )
                processors[request_id] = RequestProcessor(
                    request_id,
                    len(token_ids),
                    one,
                    None if self.tokenizer is None else self.tokenizer.hf,
                    new_answer=new_answer,
                    num_best=num_best,
                )
                if asked.logprobs is None:
                    unasked.add(request_id)
            while self.core.has_work:
                for output in self.core.step():
                    processor = processors.get(output.request_id)
                    stopped = None if processor is None else processor.process(output)
                    if stopped is not None:
                        self.core.abort([stopped])
        except BaseException:
            self.core.abort(request_ids)
            raise
        results = []
        for processor in processors.values():
            first, *others = (choice.pop_output() for choice in processor.results)
            for choice in (first, *others):
                if choice.error is not None:
                    raise EngineError(choice.error)
                if choice.request_id in unasked:
                    choice.logprobs = None  # their ranking needed them
            first.others = others
            results.append(first)
        return results

    def classify(
        self,
        prompts: str | Sequence[str] | Sequence[list[int]],
        seconds: Sequence[str] | None = None,
        *,
        use_activation: bool = True,
    ) -> npt.NDArray[np.float32]:
        """Returns the scores of all prompts, computed together: float32 [prompts, labels].

        Args:
            prompts: texts or lists of token ids; texts if there are `seconds`.
            seconds: second text of each pair, for rerankers; None: the prompts are no pairs.
            use_activation: whether the classifier's activation is applied; False: the scores are the logits,
                as for rewards.

        Raises:
            InvalidArgumentError, UnavailableError, InputError, EngineError: as `generate`.
        """
        batch: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        starts, size = [0] * len(batch), max(1, self.core.info.pooling.num_scores)
        if seconds is not None:
            if self.tokenizer is None:
                raise EngineError(f"{self.config.model.model}: no tokenizer, so prompts must be token ids")
            fields = "prompts", "seconds"
            pairs = zip(batch, seconds, strict=True)
            found = [self.tokenizer.encode_pair(*pair, fields=fields) for pair in pairs]
            batch, starts = [ids for ids, _ in found], [at for _, at in found]
        params = [
            SamplingParams(
                dimensions=size,
                pooling=PoolingParams(task="classify", use_activation=use_activation, second_text=start),
            )
            for start in starts
        ]
        outputs = self.generate(batch, params)
        return np.stack([np.frombuffer(output.embedding, np.float32) for output in outputs])

    def embed(
        self, prompts: str | Sequence[str] | Sequence[list[int]], dimensions: int = 0
    ) -> npt.NDArray[np.float32]:
        """Returns float32 [prompts, dimensions]: an embedding of each prompt, pooled as the checkpoint says.

        Args:
            prompts: texts or lists of token ids.
            dimensions: how many of an embedding's leading numbers are kept, before it is normalised (if it
                is); 0: all.

        Raises:
            InvalidArgumentError, UnavailableError, InputError, EngineError: as `generate`.
        """
        params = SamplingParams(dimensions=dimensions or self.core.info.hidden_size)
        outputs = self.generate(prompts, params)
        return np.stack([np.frombuffer(output.embedding, np.float32) for output in outputs])

    def chat(self, messages: list[dict[str, Any]] | dict[str, Any], **sampling: Any) -> RequestOutput:
        """Returns the answer to a conversation, through the checkpoint's chat template. Reasoning and tool
        calls are separated from the answer's text, as `reasoning_parser` and `tool_parser` say.

        Args:
            messages: a list, or an object with `tools` and more, as in `quire_ensemble.messages`.
            sampling: as in `generate`.

        Raises:
            EngineError: the checkpoint has no tokenizer, or the engine failed.
            InputError: the messages are wrong, or the checkpoint has no chat template for them.
            InvalidArgumentError, UnavailableError: as `generate`.
        """
        if self.tokenizer is None:
            raise EngineError(f"{self.config.model.model}: no tokenizer, so no chat template")
        token_ids, chat = self.tokenizer.encode_chat(json.dumps(messages))
        return self.generate([token_ids], chats=[chat], **sampling)[0]

    @contextlib.contextmanager
    def profile(self, path: str | Path) -> Iterator[None]:
        """Returns a context manager that writes a Chrome trace of the steps in it to `path`.

        The file is written when the context ends. The trace has at most MAX_PROFILE_STEPS steps, none of
        which begins later than MAX_PROFILE_S seconds after the context began. Its `otherData` has a
        `roofline`.

        Raises:
            UnavailableError: another profile is being recorded.
        """
        recorded = self.core.observer.begin_profile(Profile(MAX_PROFILE_STEPS, MAX_PROFILE_S))
        try:
            yield
        finally:
            self.core.observer.profile = None
            Path(path).write_bytes(msgspec.json.encode(recorded.answer()))

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        directory = self.config.model.tokenizer or self.config.model.model
        return Vocabulary(directory, self.core.info.vocab_size, self.core.info.eos_token_ids)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, with the special tokens that the tokenizer's configuration adds.

        Raises:
            EngineError: the checkpoint has no tokenizer.
            InputError: the tokenizer cannot encode the text, for example because of an unpaired surrogate.
        """
        if self.tokenizer is None:
            raise EngineError(f"{self.config.model.model}: no tokenizer, so prompts must be token ids")
        return list(self.tokenizer.encode(text))
