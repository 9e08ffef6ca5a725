"""ModelRunner: loads the model, owns the KV cache, and turns a SchedulerOutput into sampled tokens."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

import torch

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kv_groups import blocks_per_sequence, layers_per_group
from quire.loader import load_model
from quire.outputs import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from quire.worker.input_batch import InputBatch, StepInputs
from quire.worker.kv_cache import KVCache, block_bytes, num_blocks_for
from quire.worker.sampler import Sampler, SamplerOutput
from quire_kernels.cpu.native import set_num_threads

if TYPE_CHECKING:
    from quire.kv_tiers import KVTiers

logger = logging.getLogger("quire")


def resolve_device(name: str) -> torch.device:
    """`auto` is cuda where a device is visible, else cpu.

    Raises:
        ConfigError: cuda was asked for and there is none.
    """
    if name == "cpu":
        return torch.device("cpu")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("device=cuda, but torch sees no CUDA device")
    return torch.device("cuda", torch.cuda.current_device()) if available else torch.device("cpu")


class ModelRunner:
    """One worker: the same code on cpu and cuda.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        ConfigError: the device or the memory does not allow the configuration.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.device = resolve_device(config.model.device)
        if self.device.type == "cpu":
            set_num_threads(config.model.num_threads or _default_threads())
        start = time.monotonic()
        loaded = load_model(config.model, self.device)
        self.model = loaded.model
        self.model_config = loaded.config
        self.eos_token_ids: frozenset[int] = loaded.eos_token_ids
        self.dtype: torch.dtype = loaded.config.dtype
        self.hidden_size = loaded.config.hidden_size
        self.takes_position_ids = loaded.config.rope.mrope_section is not None
        self.max_model_len = self._max_model_len()
        logger.info(
            "loaded %s: %.1f MiB of %s weights in %.2f s",
            config.model.model,
            loaded.weight_bytes / 2**20,
            self.dtype,
            time.monotonic() - start,
        )
        shape = loaded.config
        cache = config.cache
        self.kv_groups = self.model.kv_groups
        block_layers = layers_per_group(self.kv_groups)
        self.block_bytes = block_bytes(
            block_layers,
            shape.num_kv_heads,
            shape.head_dim,
            cache.block_size,
            self.dtype,
            cache.kv_cache_dtype,
        )
        self.num_blocks = num_blocks_for(
            cache,
            config.scheduler,
            bytes_per_block=self.block_bytes,
            blocks_per_sequence=blocks_per_sequence(
                self.kv_groups,
                self.max_model_len,
                cache.block_size,
                config.scheduler.max_num_batched_tokens,
            ),
            max_model_len=self.max_model_len,
            device=self.device,
        )
        self.kv_cache = KVCache(
            self.num_blocks,
            block_layers,
            shape.num_kv_heads,
            shape.head_dim,
            cache.block_size,
            self.dtype,
            cache.kv_cache_dtype,
            self.device,
        )
        self.tiers: KVTiers | None = None
        """Where blocks go beside the pool; set by the engine if there is any such place."""
        self.batch = InputBatch(
            config.scheduler.max_num_seqs,
            self.max_model_len,
            cache.block_size,
            self.device,
            len(self.kv_groups),
        )
        self.sampler = Sampler(shape.vocab_size)
        self.num_computed_tokens = 0
        """Token rows the model computed since start; equal to those scheduled, as nothing is padded."""

    @property
    def kv_cache_bytes(self) -> int:
        return self.kv_cache.nbytes

    def _max_model_len(self) -> int:
        limit = self.model_config.longest_model_len
        asked = self.config.model.max_model_len
        if asked is not None and asked > limit:
            raise ConfigError(f"max_model_len={asked} exceeds the checkpoint's limit of {limit} tokens")
        return asked or self.model_config.max_position_embeddings

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Does one step: moves blocks, computes the scheduled tokens, samples where a row is complete."""
        self.batch.update(output)
        self._move_blocks(output)
        result = ModelRunnerOutput({}) if output.is_empty else self._compute(output.scheduled)
        if self.tiers is not None:
            result.loads_done = self.tiers.poll()
        return result

    def _move_blocks(self, output: SchedulerOutput) -> None:
        if self.tiers is None:
            assert not output.kv_saves and not output.kv_loads, "there is no KV tier to save to or load from"
        elif output.kv_saves:
            self.tiers.save(output.kv_saves)
        if output.block_copies:
            self.kv_cache.copy_blocks(output.block_copies)
        if self.tiers is not None:
            for load in output.kv_loads:
                self.tiers.start_load(load)

    def _compute(self, scheduled: list[ScheduledRequest]) -> ModelRunnerOutput:
        """Writes KV of the scheduled tokens and samples."""
        inputs = self.batch.prepare(scheduled)
        result = ModelRunnerOutput({})
        with torch.inference_mode():
            embeds = inputs.embeds
            if embeds is not None:
                embeds = (embeds[0], embeds[1].to(self.dtype))
            hidden = self.model(
                inputs.input_ids,
                inputs.positions,
                self.kv_cache,
                inputs.metas,
                embeds,
                inputs.sample_indices,
            )
            self.num_computed_tokens += inputs.input_ids.shape[0]
            if not inputs.sample_request_ids:
                return result
            sampled = self._sample(hidden, inputs)
        for index, request_id in enumerate(inputs.sample_request_ids):
            token_id, logprobs = sampled.token_ids[index], sampled.logprobs[index]
            if token_id < 0:
                result.errors[request_id] = "the model's logits for this request hold no finite number"
            elif request_id not in result.sampled_token_ids:
                self.batch.accept(request_id, token_id)
                result.sampled_token_ids[request_id] = token_id
                if logprobs is not None:
                    result.logprobs[request_id] = logprobs
            else:
                result.choice_token_ids.setdefault(request_id, []).append(token_id)
                if logprobs is not None:
                    result.choice_logprobs.setdefault(request_id, []).append(logprobs)
        return result

    def _sample(self, hidden: torch.Tensor, inputs: StepInputs) -> SamplerOutput:
        """One token per sampling row, of hidden states [num_logits, hidden_size]."""
        rows, choices = inputs.sampling_rows, inputs.choice_indices
        if all(row.wants_best_only for row in rows):
            best = self.model.best_tokens(hidden)
            return SamplerOutput.of_best(best if choices is None else best[choices])
        logits = self.model.compute_logits(hidden)
        return self.sampler(logits if choices is None else logits[choices], rows)


def _default_threads() -> int:
    """OMP_NUM_THREADS where it is set, as every other user of OpenMP; else the cores this process may use."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdigit() and int(named) > 0:
        return int(named)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
