"""ModelRunner: loads the model, owns the KV cache, and turns a SchedulerOutput into sampled tokens."""

from __future__ import annotations

import logging
import os
import time

import torch

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.loader import load_model
from quire.outputs import ModelRunnerOutput, SchedulerOutput
from quire.worker.input_batch import InputBatch
from quire.worker.kv_cache import allocate_kv_cache, block_bytes, num_blocks_for
from quire.worker.sampler import Sampler

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
            torch.set_num_threads(config.model.num_threads or _default_threads())
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
        self.block_bytes = block_bytes(
            shape.num_layers, shape.num_kv_heads, shape.head_dim, cache.block_size, self.dtype
        )
        self.num_blocks = num_blocks_for(
            cache,
            config.scheduler,
            bytes_per_block=self.block_bytes,
            max_model_len=self.max_model_len,
            device=self.device,
        )
        self.kv_cache = allocate_kv_cache(
            self.num_blocks,
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_dim,
            cache.block_size,
            self.dtype,
            self.device,
        )
        self.batch = InputBatch(
            config.scheduler.max_num_seqs, self.max_model_len, cache.block_size, self.device
        )
        self.sampler = Sampler(shape.vocab_size)
        self.num_computed_tokens = 0
        """Token rows the model computed since start; equal to those scheduled, as nothing is padded."""

    @property
    def kv_cache_bytes(self) -> int:
        return self.kv_cache.numel() * self.kv_cache.element_size()

    def _max_model_len(self) -> int:
        limit = self.model_config.longest_model_len
        asked = self.config.model.max_model_len
        if asked is not None and asked > limit:
            raise ConfigError(f"max_model_len={asked} exceeds the checkpoint's limit of {limit} tokens")
        return asked or self.model_config.max_position_embeddings

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Computes one step: writes KV of the scheduled tokens, samples where a row's tokens are complete."""
        self.batch.update(output)
        if output.is_empty:
            return ModelRunnerOutput({})
        inputs = self.batch.prepare(output.scheduled)
        with torch.inference_mode():
            embeds = inputs.embeds
            if embeds is not None:
                embeds = (embeds[0], embeds[1].to(self.dtype))
            hidden = self.model(inputs.input_ids, inputs.positions, self.kv_cache, inputs.meta, embeds)
            self.num_computed_tokens += hidden.shape[0]
            if not inputs.sample_request_ids:
                return ModelRunnerOutput({})
            logits = self.model.compute_logits(hidden[inputs.sample_indices])
            sampled = self.sampler(logits, inputs.sampling_rows)
        result = ModelRunnerOutput({})
        for index, request_id in enumerate(inputs.sample_request_ids):
            token_id = sampled.token_ids[index]
            if token_id < 0:
                result.errors[request_id] = "the model's logits for this request hold no finite number"
                continue
            self.batch.requests[request_id].token_ids.append(token_id)
            result.sampled_token_ids[request_id] = token_id
            logprobs = sampled.logprobs[index]
            if logprobs is not None:
                result.logprobs[request_id] = logprobs
        return result


def _default_threads() -> int:
    """OMP_NUM_THREADS where it is set, as every other user of OpenMP; else the cores this process may use."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdigit() and int(named) > 0:
        return int(named)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
