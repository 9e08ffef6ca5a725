"""Model: the interface of a model for the loader and the runner. HeadModel: that of a draft head.
ForwardInputs: a model's inputs in one step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from quire.layers.config import DecoderConfig
from quire.layers.context import AdapterStep
from quire.layers.embedding import Embedding
from quire.layers.hf_config import HFConfig
from quire.layers.linear import Linear, Weight
from quire.layers.pooling import PoolingMode
from quire.models.kv_groups import KVGroup
from quire.models.kv_spec import KVLayers, KVSpec
from quire.outputs import ExpertCounts
from quire.roofline import ModelWork
from quire_common.weight_files import NamedTensor
from quire_kernels import ops
from quire_kernels.metadata import AttentionMetadata


@dataclass(slots=True)
class ForwardInputs:
    """Inputs of one forward pass: the new tokens of a ragged batch, and the KV cache with their past."""

    input_ids: torch.Tensor
    """int64 [num_tokens]: ids of the new tokens. It may be empty for `Model.compute`, which reads no ids."""
    positions: torch.Tensor
    """int64 [num_tokens], or [3, num_tokens] for positions on three axes (M-RoPE)."""
    kv_cache: KVLayers
    """KV cache. Layers write the new tokens' keys and values, or states, into it. An encoder's layers write
    nothing."""
    metas: Sequence[AttentionMetadata]
    """Metadata for each KV group, in the groups' order: the number of each sequence's new tokens, and the
    sequence's blocks in that group."""
    rows: torch.Tensor | None = None
    """int64 [n], ascending: indices in the batch of the tokens whose hidden states are returned; None: those
    of all tokens are."""
    embeds: tuple[torch.Tensor, torch.Tensor] | None = None
    """(int64 [n], [n, embeds_size]): indices in the batch of the tokens whose embeddings are given instead of
    looked up, and one row for each of them. A row holds the embedding, then what each deepstack level adds.
    None: no embedding is given."""
    adapters: AdapterStep | None = None
    """Adapters to apply to the batch's tokens; None: none is applied."""
    token_types: torch.Tensor | None = None
    """int64 [num_tokens]: 1 from the first token of a pair's second text on, else 0; None: all are 0. Most
    models ignore it."""
    taps: tuple[int, ...] = ()
    """Indices of layers whose inputs (the residual stream) are wanted beside the result, ascending."""
    tapped: list[torch.Tensor] = field(default_factory=list)
    """Inputs of the layers `taps`, each [num_tokens, hidden_size]. The forward pass appends them."""


class Model(Protocol):
    """Interface of a model, by which the worker and the loader use it.

    A model computes hidden states of tokens over a paged KV cache, and logits from hidden states. An encoder
    keeps nothing in the cache and has no logits of tokens. A model class inherits from `torch.nn.Module`
    first and from this class second, or from a class that does. Methods whose body is `...` have no default.
    """

    config: DecoderConfig
    """Shape and switches of the model, or of one tensor-parallel rank's part of it."""
    kv_groups: tuple[KVGroup, ...]
    """KV groups: layers that share a block table. `ForwardInputs.metas` has one AttentionMetadata per
    group."""
    accepts_image_embeds: bool = True
    """Whether requests may give `image_embeds`. False: the family computes text only."""

    has_joint_images: bool = False
    """Whether the tokens of an image see each other in both directions, in some layers or all."""

    def __init__(self, config: DecoderConfig, max_model_len: int, device: torch.device) -> None:
        """Makes the model, with weights that are uninitialised or do not exist yet.

        Args:
            config: result of `parse_config`, which the loader may have changed.
            max_model_len: most tokens of a sequence.
            device: device on which the weights are made.
        """

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """Returns the configuration that config.json, or a GGUF file, means in the model's family.

        Raises:
            CheckpointError: a value is missing, wrong or not supported. Wrong values may also raise other
                errors, most of which the loader turns into a CheckpointError.
        """
        ...

    # What a step needs.

    def kv_spec(self, kv_cache_dtype: str) -> KVSpec:
        """Returns the spec by which the KV cache gives memory to layers with attention. If layers differ, it
        is the spec of one that needs most bytes.

        Args:
            kv_cache_dtype: see `CacheConfig`.

        Raises:
            ConfigError: this model does not support `kv_cache_dtype`.
        """
        ...

    def embed(self, inputs: ForwardInputs) -> torch.Tensor:
        """Returns what `compute` reads in place of token ids: [num_tokens, `config.embedded_size`]. On
        transformers' code the second size may be another one."""
        ...

    def compute(self, x: torch.Tensor, inputs: ForwardInputs) -> torch.Tensor:
        """Computes the rest of `forward` from the result `x` of `embed`. It may overwrite `x`, and reads no
        token ids."""
        ...

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """Computes the new tokens, and writes to the KV cache what the model keeps of them.

        Returns:
            [n, hidden_size]: hidden states of `inputs.rows`, or of all tokens, after the final norm, if there
            is one.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits [n, vocab_size] of hidden states [n, hidden_size], which are results of
        `forward` or, for a draft head, of `guess`. An encoder raises NotImplementedError."""
        ...

    def best_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns, for each row of `hidden`, a token with the largest logit: int64 [n]. A row has -1 if its
        logits hold NaN, or the largest one is not finite."""
        return ops.argmax(self.compute_logits(hidden))

    def class_logits(self, pooled: torch.Tensor) -> torch.Tensor:
        """Returns the classifier's float32 logits [num_labels] of a pooled hidden state [hidden_size]. Needs
        `config.classifier`."""
        raise NotImplementedError

    def next_tokens(self, inputs: ForwardInputs) -> torch.Tensor:
        """Returns `best_tokens` of the result of `forward`. A model may compute both in one operator."""
        return self.best_tokens(self.forward(inputs))

    @property
    def fed_size(self) -> int:
        """Number of columns of `HeadModel.fed`'s result, which has a row for each token; 0: the model is no
        draft head."""
        return 0

    @property
    def is_fused(self) -> bool:
        """Whether one call of an operator computes all layers, for most batches. It is known after `finish`.
        For a model that is fused, the runner records no PromptGraphs."""
        return False

    @property
    def is_encoder(self) -> bool:
        """Whether the model is an encoder, in which tokens also see later ones. The engine computes each
        prompt of an encoder in one step, and generates no tokens."""
        return False

    @property
    def pooling_mode(self) -> PoolingMode:
        """How prompts are pooled for a classifier's scores, and for embeddings if the checkpoint does not
        say."""
        return "last"

    @property
    def is_recordable(self) -> bool:
        """Whether the model allows that its steps are recorded as CUDA graphs. The runner may have other
        reasons not to."""
        return True

    def work(self, kv_token_bytes: int) -> ModelWork | None:
        """Returns the numbers from which a step's bytes and operations are computed, once the model is
        packed; None: they are not known. `kv_token_bytes`: bytes that a layer keeps per token."""
        return None

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields (name, module) pairs, as torch does. Adapters may change most Linear layers among them."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields (name, parameter) pairs, as torch does. Tensors of Linear and Embedding, which are packed,
        are no parameters."""
        ...

    def count_experts(self, counts: ExpertCounts) -> bool:
        """Has offloaded experts add to `counts` what happens to them from now on. Returns whether there are
        offloaded experts."""
        return False

    def take_slots(self) -> None:
        """Called once, only with `enable_lora`, when the Linear layers that adapters may change have made
        their adapter slots. Raises ConfigError to refuse adapters."""

    # What loading needs.

    def weights(self) -> Iterator[Weight]:
        """Yields the weights to be filled, one for every tensor that the model needs."""
        ...

    def fill(self, tensors: Iterable[NamedTensor], source: Path) -> bool:
        """Fills all weights from a checkpoint's tensors. False: it did nothing, and the loader fills them.

        Args:
            source: file that errors name.

        Raises:
            CheckpointError: the tensors do not fit the model.
        """
        return False

    def packed_modules(self) -> Iterator[tuple[str, Linear | Embedding]]:
        """Yields (name, module) pairs of the modules that the loader packs, once it has filled their
        weights."""
        return iter(())

    def finish(self) -> int:
        """Completes the model after all `packed_modules` are packed. Returns the bytes of its weights in
        memory; experts with a budget of slots count by these."""
        ...

    def packed_bytes(self, device_type: str) -> int:
        """Estimates, before any weight is loaded, the bytes that `finish` will return on this type of
        device."""
        ...

    def split(self, stored: NamedTensor) -> Iterator[NamedTensor]:
        """Splits a stored tensor into the tensors that it holds, under names that `canonical_name` accepts.
        Most tensors stay whole."""
        yield stored

    def canonical_name(self, name: str) -> str:
        """Returns the name in `weights()` for a tensor's name in the checkpoint, or from `split`. Names of
        tensors that the model does not need have results that are not in `weights()`. The loader tries
        results also with `model.` before them."""
        return name

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Converts a checkpoint's tensor into what the model keeps.

        Args:
            name: one of the names in `weights()`, or the name of a matrix that an adapter changes.
            tensor: the tensor, or the adapter's B [out_features, rank]. The loader also passes an empty
                tensor. If `convert` returns that very tensor, tensors of this name need no conversion.
        """
        return tensor

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although the model has no use for it. `name` is a result
        of `canonical_name`."""
        return False


class HeadModel(Model, Protocol):
    """Interface of a draft head: a small model that guesses a target's next tokens, from tokens and the
    target's hidden states.

    The head's input i is token i + 1, and what `fed` makes of the target's hidden states of token i. The
    head's output i predicts token i + 2. Logits are computed from results of `guess`.
    """

    def share(self, target: Model) -> None:
        """Makes the draft head use the target's embedding and, if it has no output head of its own, the
        target's. Called once, after the weights of both are loaded. Raises ConfigError to refuse a target
        that does not fit."""

    taps: tuple[int, ...] = ()
    """Indices of the target's layers whose inputs `fed` reads; known after `share`."""

    def fed(self, hidden: torch.Tensor, tapped: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns what `guess` reads of the target's tokens, [num_tokens, fed_size].

        Args:
            hidden: [num_tokens, hidden_size]: result of the target's `forward`.
            tapped: inputs of the target's layers `taps`, each [num_tokens, hidden_size].
        """
        return hidden

    def guess(self, inputs: ForwardInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Computes the draft head, and writes its keys and values to its KV cache.

        Args:
            inputs: tokens i + 1, at positions i.
            hidden: [num_tokens, fed_size]: results of `fed` for tokens i. For a draft token, which the target
                has not computed, the head's result for the input before it stands in.

        Returns:
            [n, hidden_size]: the head's hidden states for `inputs.rows`, or for all tokens.
        """
        ...
