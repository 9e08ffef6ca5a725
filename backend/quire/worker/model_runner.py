"""ModelRunner: loads the model, owns the KV cache, and computes the steps that the scheduler plans."""

from __future__ import annotations

import gc
import logging
import os
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from quire.config import MTP, EngineConfig
from quire.errors import CheckpointError, ConfigError
from quire.grammar import Vocabulary
from quire.kv_tiers import needs_fingerprint
from quire.kv_tiers.moves import move_blocks
from quire.layers.config import DecoderConfig
from quire.layers.pooling import Classifier, Pooling, read_pooling, with_classifier
from quire.loader.info import checkpoint_state, named_tokens
from quire.loader.load import load_model
from quire.models.interface import HeadModel, Model
from quire.models.kv_groups import layers_per_group
from quire.models.kv_spec import QUANTIZED_DTYPES
from quire.outputs import (
    NOTHING,
    ExpertCounts,
    ModelRunnerOutput,
    RowOutput,
    RunnerInfo,
    ScheduledRequest,
    SchedulerOutput,
)
from quire.request.logits_processors import load_logits_processors
from quire.roofline import DeviceLimits
from quire.startup import StartTimeline
from quire.worker.adapter_memory import AdapterMemory
from quire.worker.device import HostCopy, to_device
from quire.worker.device_limits import measure_limits
from quire.worker.draft_head import DraftHead
from quire.worker.draft_model import DraftModel, check_draft, draft_config
from quire.worker.grammar import DraftGrammar, Grammars, RowGrammar
from quire.worker.graph_runner import (
    CudaGraphs,
    DecodeGraphs,
    GraphBackend,
    PromptGraphs,
    graph_sizes,
    token_sizes,
)
from quire.worker.input_batch import CachedRequest, InputBatch, StepInputs
from quire.worker.kv_cache import DeviceMemory, KVCache, KVLayout
from quire.worker.kv_identity import kv_identity
from quire.worker.pooler import Pooler, embedding_output
from quire.worker.sampler import Draw, draw, join_drafts
from quire.worker.sampling_batch import SamplingRow
from quire.worker.timeline import StepTimer, Timeline
from quire.worker.top_logprobs import PromptLogprobs
from quire_common.host_memory import trim_heap
from quire_common.machine import num_cpus
from quire_kernels import registry
from quire_kernels.cpu.native import load_seconds, set_num_threads
from quire_kernels.metadata import attention_facts
from quire_kernels.ranks import ALONE, Ranks
from quire_kernels.triton_lang import tuning

if TYPE_CHECKING:
    from quire.kv_tiers import KVTiers

logger = logging.getLogger("quire")

MAX_GRAPH_TOKENS = 512
"""Most tokens of a step that PromptGraphs replays."""


def resolve_device(name: str, ranks: Ranks = ALONE) -> torch.device:
    """Returns the device for a configuration. `auto` is cuda if a device is visible, else cpu. Of several
    ranks on cuda, each uses its own GPU, which becomes the current device.

    Raises:
        ConfigError: cuda was configured and there is no device, or there are CUDA devices but not one for
            each rank.
    """
    if name == "cpu":
        return torch.device("cpu")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("device=cuda, but torch sees no CUDA device")
    if not available:
        return torch.device("cpu")
    if ranks.size > 1:
        count = torch.cuda.device_count()
        if count < ranks.size:
            raise ConfigError(
                f"tensor_parallel_size={ranks.size}, but {count} CUDA devices are visible: an instance of "
                "KIND_GPU sees one, of KIND_MODEL all"
            )
        torch.cuda.set_device(ranks.rank)
    return torch.device("cuda", torch.cuda.current_device())


class ModelRunner:
    """Computes steps in its own process, on cpu or cuda.

    Args:
        ranks: this process's rank in the tensor-parallel group. With several ranks on the CPU, the engine
            maps their blocks.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        ConfigError: the configuration is wrong, or the checkpoint, the device or the memory does not allow
            it.
    """

    def __init__(self, config: EngineConfig, *, ranks: Ranks = ALONE) -> None:
        self.device = resolve_device(config.model.device, ranks)
        num_threads = 0
        if self.device.type == "cpu":
            num_threads = config.model.num_threads or max(1, _default_threads() // ranks.size)
            set_num_threads(num_threads)
        self._config, self._num_threads, self._ranks = config, num_threads, ranks
        self._processors = load_logits_processors(config.model.logits_processors)
        self._is_ahead = config.scheduler.launches_ahead(str(self.device))
        """Whether a step may need tokens that the host does not know yet."""
        self._checkpoint = self._checkpoint_state()
        self.timeline = Timeline(self.device, enabled=bool(os.environ.get("QUIRE_TIMELINE")))
        self._limits: DeviceLimits | None = None
        self.num_computed_tokens = 0
        """Number of tokens in the steps since start, without padding: the scheduled ones, less drafts that
        the draft model did not make."""
        self._experts = ExpertCounts()
        self._load()

    def _checkpoint_state(self) -> list[tuple[str, int, int]]:
        model = self._config.model
        return checkpoint_state(model.model, model.tokenizer, model.draft_checkpoint)

    def _load(self, num_blocks: int | None = None) -> None:
        """Loads the model, and creates everything else that `sleep` frees, except the KV tiers.

        Args:
            num_blocks: blocks of the KV cache; None: as the configuration and the memory determine.
        """
        config = self._config
        timeline, kernels_before = StartTimeline(), load_seconds()
        is_shared = needs_fingerprint(config.cache)
        loaded = load_model(
            config.model,
            self.device,
            check=lambda shape: check_attention_backend(config, shape, self.device),
            with_digest=is_shared,
            ranks=self._ranks,
        )
        self.model, shape, self._cache_writers = loaded.model, loaded.config, [loaded.cache_writer]
        # Which experts a step computes is known on the host only. Collectives were never recorded.
        is_eager = config.model.enforce_eager or shape.experts is not None or self._ranks.size > 1
        # Padded rows of a recorded step would write states.
        is_eager |= any(group.is_state for group in self.model.kv_groups) or not self.model.is_recordable
        self._offloads = self.model.count_experts(self._experts)
        has_slots = config.adapters.enable_lora
        self.slots = AdapterMemory(self.model, config.adapters, self.device) if has_slots else None
        self._pooler = Pooler(self._read_pooling(), self.model)
        timeline.end("weights")
        logger.info(
            "loaded %s: %.1f MiB of %s weights in %.2f s",
            config.model.model,
            loaded.weight_bytes / 2**20,
            shape.dtype,
            timeline.total_s,
        )
        draft = None
        if config.model.draft_model:
            draft = self._load_draft(shape)
            timeline.end("draft model")
            is_eager |= draft.fed_size > 0  # recorded steps keep no hidden states
        graph_backend = make_graph_backend(self.device, is_eager)
        # Nothing has a gradient. inference_mode only saves time of torch's operators, and one call has none.
        is_fused = self.model.is_fused and (draft is None or draft.is_fused)
        self._no_autograd = nullcontext if is_fused else torch.inference_mode
        layout = KVLayout.from_config(config, self.model, draft)
        max_model_len = layout.max_model_len
        timeline.split("weights", {"kernels": load_seconds() - kernels_before})
        cache, limits, groups = config.cache, config.scheduler, self.model.kv_groups
        if num_blocks is None:
            self._ranks.least(0, self.device)  # when all have loaded, they see the same memory
            memory = DeviceMemory.measure(self.device, self._ranks.size)
            num_blocks = self._ranks.least(layout.num_blocks(config, memory), self.device)
        self.kv_cache = KVCache(
            num_blocks,
            layout.spec,
            layout.layers_per_block,
            layout.block_size,
            self.device,
            layout.layer_bytes,
            has_scratch=graph_backend is not None,
            is_shared=self._ranks.size > 1 and self.device.type == "cpu",
        )
        self.draft: DraftModel | None = None
        if draft is not None:
            spec = draft.kv_spec(cache.kv_cache_dtype)
            num_layers = layers_per_group(draft.kv_groups)
            pool = KVCache(num_blocks, spec, num_layers, layout.block_size, self.device)
            if draft.fed_size:
                self.draft = DraftHead(cast(HeadModel, draft), pool, limits.max_num_batched_tokens)
            else:
                self.draft = DraftModel(draft, pool, limits.max_num_batched_tokens)
        timeline.end("KV cache")
        self.info = RunnerInfo(
            num_blocks=num_blocks,
            block_size=layout.block_size,
            max_model_len=max_model_len,
            vocab_size=shape.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            kv_groups=groups,
            kv_cache_bytes=self.kv_cache.nbytes + num_blocks * layout.draft_bytes,
            kv_identity=kv_identity(loaded, self.device) if is_shared else {},
            hidden_size=shape.hidden_size,
            deepstack_levels=shape.deepstack_levels,
            pooling=self._pooler.pooling,
            takes_position_ids=shape.rope.mrope_section is not None,
            accepts_image_embeds=self.model.accepts_image_embeds,
            has_joint_images=self.model.has_joint_images,
            dtype=str(shape.dtype).removeprefix("torch."),
            device=str(self.device),
            num_threads=self._num_threads,
            start_s=timeline.phases,
            adapter_targets=() if self.slots is None else self.slots.targets,
            work=self.model.work(layout.spec.layer_bytes(layout.block_size) // layout.block_size),
        )
        self.tiers: KVTiers | None = None
        directory, end = config.model.tokenizer or config.model.model, loaded.eos_token_ids
        self._grammars = Grammars(lambda: Vocabulary(directory, shape.vocab_size, end))
        self.batch = InputBatch(
            limits.max_num_seqs,
            max_model_len,
            self.kv_cache,
            layout.block_size,
            self.device,
            len(groups),
            self._grammars,
            self._processors,
        )
        self.graphs: DecodeGraphs | None = None
        whole = graph_backend is not None and attention_is_recordable(config, shape, self.device)
        if graph_backend is not None and whole:
            self.batch.block_table.record_changes()
            self.graphs = DecodeGraphs(
                self.model,
                self.kv_cache,
                self.batch,
                max_model_len,
                graph_sizes(limits.max_num_seqs),
                graph_backend,
                has_slots=has_slots,
            )
        self.prompt_graphs: PromptGraphs | None = None
        most_tokens = min(MAX_GRAPH_TOKENS, limits.max_num_batched_tokens)
        # Layers that are one call have nothing between one attention and the next.
        if graph_backend is not None and not self.model.is_fused:
            self.prompt_graphs = PromptGraphs(
                self.model,
                self.kv_cache,
                3 if self.info.takes_position_ids else 1,
                token_sizes(most_tokens, few=not whole),
                graph_backend,
                has_slots=has_slots,
            )
        self._launched: deque[LaunchedStep] = deque()
        """Launched steps that were not collected yet, the oldest first."""

    def _load_draft(self, target: DecoderConfig) -> Model:
        """Loads the draft model or head, and returns it. Before its weights are read, checks its shape:
        whether it can guess for the target, and whether the attention backend supports it."""

        def check(shape: DecoderConfig) -> None:
            check_draft(shape, target)
            check_attention_backend(self._config, shape, self.device)

        config = draft_config(self._config.model, target)
        loaded = load_model(config, self.device, check=check, is_head=config.draft_model == MTP)
        if loaded.model.fed_size:
            cast(HeadModel, loaded.model).share(self.model)
        self._cache_writers.append(loaded.cache_writer)
        logger.info(
            "loaded %s, the draft %s: %.1f MiB of %s weights",
            config.model,
            "head" if loaded.model.fed_size else "model",
            loaded.weight_bytes / 2**20,
            loaded.config.dtype,
        )
        return loaded.model

    def _read_pooling(self) -> Pooling:
        """Reads how prompts are pooled, from the checkpoint and the configuration.

        Raises:
            ConfigError: `classifier_from_token` does not name two tokens, or it is given for a model without
                logits of tokens, or for one that does not pool the last token.
            CheckpointError: a file is missing or broken, or the model has neither tokens, scores nor
                embeddings to give: an encoder whose pooling is not supported.
        """
        config, model = self._config.model, self.model
        pooling = read_pooling(Path(config.model), model.pooling_mode)
        if model.config.classifier is not None:
            pooling = with_classifier(pooling, model.config.classifier, model.pooling_mode)
        if model.is_encoder:
            pooling = replace(pooling, is_encoder=True, generates=False)
        if config.classifier_from_token:
            if not pooling.generates:
                raise ConfigError("classifier_from_token: this checkpoint computes no logits of tokens")
            if pooling.mode != "last":
                raise ConfigError(
                    f"classifier_from_token: needs pooling of the last token, not {pooling.mode}"
                )
            tokens = named_tokens(config.tokenizer or config.model, config.classifier_from_token)
            (_, no), (yes_name, yes) = tokens
            pooling = replace(pooling, classifier=Classifier((yes_name,), "sigmoid"), token_ids=(no, yes))
        if pooling.why_not and not (pooling.generates or pooling.num_scores):
            raise CheckpointError(f"{config.model}: embeddings are not supported: {pooling.why_not}")
        return pooling

    def sleep(self) -> None:
        """See `Runner`. Frees the weights, the KV cache and all else of size that `_load` created. `info`,
        the device's context, kernels and threads stay."""
        for writer in filter(None, self._cache_writers):
            writer.stop()  # it holds the weights
        if "kv_cache" in vars(self) and self.kv_cache.fd is not None:
            os.close(self.kv_cache.fd)
        self.tiers = None
        made = ("model", "slots", "draft", "kv_cache", "batch", "graphs", "prompt_graphs")
        for name in (*made, "_grammars", "_launched", "_pooler"):
            vars(self).pop(name, None)
        gc.unfreeze()  # what is garbage may have been made before the engine was ready
        gc.collect()
        gc.freeze()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        trim_heap()

    def wake(self) -> None:
        """See `Runner`. The KV cache has as many blocks as before. Graphs are recorded again, because memory
        addresses have changed. Raises CheckpointError if files of the checkpoint, the tokenizer or the draft
        model have changed since the start."""
        if self._checkpoint_state() != self._checkpoint:
            model = self._config.model.model
            raise CheckpointError(f"{model}: has changed since it was loaded: load the model again")
        self._load(self.info.num_blocks)
        self.warm_up()
        gc.collect()
        gc.freeze()
        trim_heap()

    def attach(self, tiers: KVTiers | None) -> None:
        """Sets the KV tiers that blocks move to and from; None: there are none. See `Runner`."""
        self.tiers = tiers

    def launch(self, output: SchedulerOutput) -> None:
        """Begins a step: moves blocks, loads adapters, computes the scheduled tokens, and samples after rows
        that are complete.

        On cuda most of the work is only queued, and the next step finds sampled tokens on the device.

        A step that must know earlier tokens on the host (for n-grams, say) first waits for steps in flight.
        """
        timer = None
        if output.is_timed:
            self._measure_limits()
            timer = StepTimer(self.device)
            timer.phase("prepare")
        for earlier in self._launched:
            if not any(self._lacks_tokens(item) for item in output.scheduled):
                break
            self._settle(earlier)
        self.batch.update(output)
        move_blocks(output, self.kv_cache, self.tiers)
        if self.draft is not None and output.block_copies:
            self.draft.copy_blocks(output.block_copies)
        for load in output.adapter_loads:
            assert self.slots is not None, "this runner has no slots"
            self.slots.load(load)
        step = LaunchedStep(len(output.scheduled), timer)
        if not output.is_empty:
            no_autograd = torch.inference_mode if self.batch.adapted else self._no_autograd
            with no_autograd(), self.timeline.step(len(output.scheduled)):
                self._compute(output.scheduled, step)
        if timer is not None:
            timer.launched()
        self._launched.append(step)

    def collect(self) -> ModelRunnerOutput:
        """Waits for the oldest step that was not collected yet, and returns its results."""
        step = self._launched.popleft()  # first, so that it is not collected again if that fails
        step.phase("collect")
        self._settle(step)
        if self._offloads:
            step.output.experts = copy(self._experts)
        if self.tiers is not None:
            step.output.loads_done = self.tiers.poll()
        if step.timer is not None:
            step.output.timing = step.timer.timing()
            step.output.timing.limits = self._limits
        return step.output

    def reset(self) -> None:
        """Drops the steps in flight, whose requests end: a step has failed or was interrupted."""
        self._launched.clear()

    def warm_up(self) -> None:
        """Reads the vocabulary for grammars, and records steps if graphs are used. Either would delay a later
        step."""
        self._grammars.warm_up()
        with tuning.warm_up():
            if self.prompt_graphs is not None:
                self.prompt_graphs.capture_all()
            if self.graphs is not None:
                self.graphs.capture_all()

    def _measure_limits(self) -> None:
        """Measures the device's limits for a timed step, unless they are known: this takes about half a
        second. A failure is logged."""
        try:
            self._limits = measure_limits(self.device, self.model.config.dtype, self.info.num_threads)
        except RuntimeError as error:
            logger.warning("profile: the device's limits could not be measured: %s", error)

    def check(self) -> None:
        """Does nothing: the runner cannot be lost while its process lives."""

    def close(self) -> None:
        """Does nothing: there is no other process to end."""

    def _lacks_tokens(self, item: ScheduledRequest) -> bool:
        state = self.batch.requests.get(item.request_id)
        return state is not None and item.new is None and item.samples and state.sampling.lacks_tokens

    def _compute(self, scheduled: list[ScheduledRequest], step: LaunchedStep) -> None:
        """Computes the scheduled tokens, and samples or pools. The draft model, if there is one, makes drafts
        first."""
        if self.draft is not None:
            step.phase("draft")
            scheduled, step.output.has_caught_up = self.draft.fill(scheduled, self.batch)
            step.phase("prepare")
        self.num_computed_tokens += sum(item.num_scheduled_tokens for item in scheduled)
        if self.graphs is not None and not self.batch.embedded and self.graphs.can_run(scheduled):
            step.phase("model")
            best, logits, input_ids = self.graphs.run(scheduled)
            step.phase("sample")
            states = [self.batch.requests[item.request_id] for item in scheduled]
            rows, drawn = [state.sampling for state in states], Draw(best)
            if not all(row.wants_best_only for row in rows):
                drawn = draw(logits, rows, input_ids)
                table_rows = np.array([state.row for state in states])
                self.batch.last_tokens[to_device(table_rows, self.device)] = drawn.token_ids
            step.set_drawn(list(enumerate(states)), drawn, rows)
            return
        inputs = self.batch.prepare(scheduled)
        if self.draft is not None:
            self.draft.prepare(inputs.forward)
        step.phase("model")
        found = self._draw(inputs, step)
        if found is None:
            return
        if self._is_ahead:
            first = inputs.first_draws
            newest = found.token_ids if first is None else found.token_ids[first]
            self.batch.last_tokens[inputs.sample_rows] = newest
        step.drafts = inputs.drafts
        step.set_drawn(inputs.samples, found, inputs.sampling_rows)

    def _draw(self, inputs: StepInputs, step: LaunchedStep) -> Draw | None:
        """Runs the model and samples a token per sampling row; None: there are no such rows. Prompt
        log-probabilities and embeddings go to `step`."""
        forward = inputs.forward
        has_all = forward.rows is None
        # What is recorded begins behind the lookup of embeddings, and has no place for more.
        has_levels = forward.embeds is not None and self.model.config.deepstack_levels > 0
        recorded = None if has_levels else self.prompt_graphs
        if recorded is not None and recorded.can_run(forward.metas[0].num_tokens):
            hidden, has_all = recorded.run(forward), True
        elif inputs.samples and inputs.wants_best_only and not has_all:
            best = self.model.next_tokens(forward)
            step.phase("sample")
            return Draw(best)
        else:
            hidden = self.model.forward(forward)
        if self.draft is not None:
            self.draft.keep(hidden, forward)
        step.phase("sample")
        if inputs.prompt_rows:
            vocab_size = self.info.vocab_size
            step.set_prompts(
                PromptLogprobs.compute(inputs.prompt_rows, hidden, self.model.compute_logits, vocab_size)
            )
        if inputs.pool_rows:
            step.set_embeddings(*self._pooler.pool(inputs.pool_rows, hidden))
        if has_all:
            hidden = hidden[inputs.sample_indices]
        return self._sample(hidden, inputs) if inputs.samples else None

    def _settle(self, step: LaunchedStep) -> None:
        """Waits for a step's results, and enters them in its output and its requests. A second call does
        nothing."""
        rows = step.output.rows
        if step.drawn is not None:
            self._settle_drawn(step, *step.drawn)
            step.drawn = None
        if step.prompts is not None:
            (prompts, copy), step.prompts = step.prompts, None
            for number, found in prompts.outputs(copy.wait()):
                if rows[number] is NOTHING:
                    rows[number] = RowOutput()
                rows[number].prompt_logprobs = found
        if step.embeddings is not None:
            (numbers, vectors), step.embeddings = step.embeddings, None
            for number, vector in zip(numbers, vectors.wait(), strict=True):
                rows[number] = embedding_output(vector)

    @staticmethod
    def _settle_drawn(step: LaunchedStep, drawn: Draw, copy: HostCopy) -> None:
        rows = step.output.rows
        outputs, firsts = drawn.outputs(copy.wait()), list(range(len(step.samples)))
        if step.drafts:
            outputs, firsts = join_drafts(outputs, [row for row, _ in step.samples], step.drafts)
            for first, output in zip(firsts, outputs, strict=True):
                output.num_drafts = len(step.drafts.get(step.samples[first][0], ()))
        for first, output in zip(firsts, outputs, strict=True):
            row, state = step.samples[first]
            grammar = step.grammars[first] if step.grammars else None
            if grammar is not None and not output.error:
                assert isinstance(grammar, RowGrammar), "drafts come behind a row's own"
                count, output.is_final = grammar.accept(output.token_ids)
                output.cut(count)
            if rows[row] is NOTHING:
                if output.error:
                    state.on_failed()
                else:
                    state.on_token(output.token_ids)
            if rows[row] is NOTHING or output.error:
                rows[row] = output
            else:
                rows[row].choices.append(output)

    def _sample(self, hidden: torch.Tensor, inputs: StepInputs) -> Draw:
        """Samples one token per sampling row from hidden states [num_logits, hidden_size]."""
        rows, choices = inputs.sampling_rows, inputs.choice_indices
        if inputs.wants_best_only:
            return Draw(self.model.best_tokens(hidden))
        logits = self.model.compute_logits(hidden)
        newest = None
        if any(row.is_uncounted for row in rows):
            newest = inputs.forward.input_ids[inputs.sample_indices]
        if choices is not None:
            logits, newest = logits[choices], None if newest is None else newest[choices]
        return draw(logits, rows, newest)


class LaunchedStep:
    """A step that was launched, with its results under way."""

    def __init__(self, num_rows: int, timer: StepTimer | None = None) -> None:
        self.timer = timer
        self.output = ModelRunnerOutput([NOTHING] * num_rows)
        self.samples: list[tuple[int, CachedRequest]] = []
        """Row index and request of each sample, as in `StepInputs`."""
        self.drawn: tuple[Draw, HostCopy] | None = None
        """Result of sampling for `samples`, and its copy to the host; None: there is none, or it is already
        in `output`."""
        self.prompts: tuple[PromptLogprobs, HostCopy] | None = None
        """Prompt log-probabilities, and their copy to the host; None as with `drawn`."""
        self.embeddings: tuple[list[int], HostCopy] | None = None
        """Indices of rows in the step, and the copy of their embeddings or scores to the host; None as with
        `drawn`."""
        self.grammars: list[RowGrammar | DraftGrammar | None] = []
        """Grammar of each sample; empty: no sample has one."""
        self.drafts: dict[int, Sequence[int]] = {}
        """Draft tokens by index of the row in the step, as in `StepInputs`."""

    def phase(self, name: str) -> None:
        """Records the start of a phase, if the step is timed."""
        if self.timer is not None:
            self.timer.phase(name)

    def set_drawn(
        self, samples: list[tuple[int, CachedRequest]], drawn: Draw, rows: list[SamplingRow]
    ) -> None:
        """Sets what was sampled for `samples` with `rows`, starts its copy to the host, and records in each
        request that a token was sampled."""
        if any(row.grammar is not None for row in rows):
            self.grammars = [row.grammar for row in rows]
        self.samples, self.drawn = samples, (drawn, HostCopy(drawn.tensors))
        for state in {id(state): state for _, state in samples}.values():
            state.on_sampled()

    def set_prompts(self, found: PromptLogprobs) -> None:
        """Sets the prompt log-probabilities, and starts their copy to the host."""
        self.prompts = found, HostCopy(found.found.tensors)

    def set_embeddings(self, numbers: list[int], vectors: list[torch.Tensor]) -> None:
        """Sets the embeddings or scores of rows of the step, and starts their copy to the host."""
        self.embeddings = numbers, HostCopy(vectors)


def check_attention_backend(config: EngineConfig, shape: DecoderConfig, device: torch.device) -> None:
    """Raises ConfigError if the configured `attention_backend` cannot handle one of the model's layers.

    The message says why, and for each backend that it can handle the layer or why it cannot.
    """
    wanted = shape.attention_backend
    if wanted is None:
        return
    # Asks the wanted one only, and all of them if it refuses: some must compile to know what they support.
    known = {one.name: one for one in registry.implementations("paged_attention")}
    for facts in _attention_facts(config, shape):
        reason: str | None = "there is none of this name"
        if wanted in known:
            reason = known[wanted].why_not(device.type, shape.dtype, facts)
        if reason is not None:
            able = registry.capabilities("paged_attention", device.type, shape.dtype, **facts)
            table = "; ".join(f"{name}: {why or 'can'}" for name, why in able.items())
            needs = ", ".join(f"{name} {value}" for name, value in facts.items())
            raise ConfigError(
                f"attention_backend={wanted} cannot serve this model: {reason}. Needed: {shape.dtype} on "
                f"{device.type}, {needs}. {table}"
            )


def attention_is_recordable(config: EngineConfig, shape: DecoderConfig, device: torch.device) -> bool:
    """Returns whether the attention of all layers can be part of recorded decode steps."""
    picked = [
        registry.pick("paged_attention", device.type, shape.dtype, wanted=shape.attention_backend, **facts)
        for facts in _attention_facts(config, shape)
    ]
    return all(one.is_recordable for one in picked)


def _attention_facts(config: EngineConfig, shape: DecoderConfig) -> list[dict[str, Any]]:
    """Returns the properties by which the implementation of decode attention is chosen, one dict for each
    kind of attention in the model."""
    return [
        attention_facts(
            kind.num_heads,
            kind.head_dim,
            kind.num_kv_heads,
            config.cache.tokens_per_block,
            QUANTIZED_DTYPES.get(config.cache.kv_cache_dtype, shape.dtype),
            kind.window,
            kind.softcap,
            sinks=kind.has_sinks,
        )
        for kind in shape.attention_kinds
    ]


def make_graph_backend(device: torch.device, enforce_eager: bool) -> GraphBackend | None:
    """Returns the backend that records steps as graphs; None: the device is not cuda, or `enforce_eager` is
    set."""
    return CudaGraphs() if device.type == "cuda" and not enforce_eager else None


def _default_threads() -> int:
    """Returns OMP_NUM_THREADS if it is a positive number; else the number of cores that this process may
    use."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdigit() and int(named) > 0:
        return int(named)
    return num_cpus()
