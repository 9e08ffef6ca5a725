"""Model: the interface between a model and those who load and run it; ForwardInputs: a step as it sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from quire.layers.config import DecoderConfig
from quire.layers.context import AdapterStep
from quire.layers.embedding import Embedding
from quire.layers.hf_config import HFConfig
from quire.layers.linear import Linear, Weight
from quire.models.kv_groups import KVGroup
from quire.models.kv_spec import KVLayers, KVSpec
from quire.roofline import ModelWork
from quire_common.weight_files import NamedTensor
from quire_kernels import ops
from quire_kernels.metadata import AttentionMetadata


@dataclass(slots=True)
class ForwardInputs:
    """New tokens of a ragged batch, and the KV cache with their past."""

    input_ids: torch.Tensor
    """int64 [num_tokens]."""
    positions: torch.Tensor
    """int64 [num_tokens]; [3, num_tokens] where a request's positions have three axes (M-RoPE)."""
    kv_cache: KVLayers
    """KV cache, in which keys and values of the new tokens are written."""
    metas: Sequence[AttentionMetadata]
    """One per KV group: which tokens belong together, and which blocks have their past."""
    rows: torch.Tensor | None = None
    """int64 [n], ascending: tokens whose hidden states are wanted; None: all."""
    embeds: tuple[torch.Tensor, torch.Tensor] | None = None
    """(int64 [n], [n, embeds_size]): tokens whose embedding is given and not looked up. A row holds the
    embedding, and behind it what each level of deepstack adds."""
    adapters: AdapterStep | None = None
    """Adapters of the tokens; None: no token has one."""


class Model(Protocol):
    """Token ids to hidden states to logits, over a paged KV cache.

    Worker and loader know no more of a model than this. Its class inherits from `torch.nn.Module` and then
    from this one, where methods with a body are defaults.
    """

    config: DecoderConfig
    """The model's shape."""
    kv_groups: tuple[KVGroup, ...]
    """Layers that share a block table; `ForwardInputs` has one AttentionMetadata for each group."""

    def __init__(self, config: DecoderConfig, max_model_len: int, device: torch.device) -> None:
        """Makes the model, its weights uninitialised.

        Args:
            config: shape, from `parse_config`.
            max_model_len: longest sequence served.
            device: where the weights are made.
        """

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """The family's reading of config.json; raises CheckpointError."""
        ...

    # What a step needs.

    def kv_spec(self, kv_cache_dtype: str) -> KVSpec:
        """Spec of the KV cache: what each layer keeps of a token.

        Args:
            kv_cache_dtype: see `CacheConfig`.

        Raises:
            ConfigError: the model's cache cannot have it.
        """
        ...

    def embed(self, inputs: ForwardInputs) -> torch.Tensor:
        """Input of the first layer, [num_tokens, embedded_size]."""
        ...

    def compute(self, x: torch.Tensor, inputs: ForwardInputs) -> torch.Tensor:
        """`forward` behind `embed`, whose result `x` may be overwritten; reads no token ids."""
        ...

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """Computes new tokens, and stores their keys and values.

        Returns:
            Hidden states of `inputs.rows`, or of all tokens, [n, hidden_size], the final norm applied.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] of `forward` to float32 [n, vocab_size]."""
        ...

    def best_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """`ops.argmax` of `compute_logits(hidden)`: int64 [n], -1 where there is none."""
        return ops.argmax(self.compute_logits(hidden))

    def next_tokens(self, inputs: ForwardInputs) -> torch.Tensor:
        """`best_tokens` of `forward`; a model may have one call for both."""
        return self.best_tokens(self.forward(inputs))

    @property
    def is_fused(self) -> bool:
        """Whether all layers are one call: then there are no pieces to record, and no operator asks torch
        about gradients."""
        return False

    @property
    def is_recordable(self) -> bool:
        """Whether steps may be recorded as CUDA graphs."""
        return True

    def work(self, kv_token_bytes: int) -> ModelWork | None:
        """Bytes that steps of the packed model read, and operations that they compute; `kv_token_bytes`:
        bytes that a layer keeps of a token. None: nobody knows."""
        return None

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules by name, as torch has them: adapters change the Linear layers among them."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Weights that no module packs, by name, as torch has them."""
        ...

    def take_slots(self) -> None:
        """Called once, when the model's Linear layers have got slots for adapters."""

    # What loading needs.

    def weights(self) -> Iterator[Weight]:
        """Weights to be filled, one for every tensor that the model needs."""
        ...

    def fill(self, tensors: Iterable[NamedTensor], source: Path) -> bool:
        """Fills all weights from a checkpoint's tensors; False: nothing is done, and the loader fills them.

        Args:
            source: file named in complaints.

        Raises:
            CheckpointError: tensors are missing, of another shape, or unknown.
        """
        return False

    def packed_modules(self) -> Iterator[tuple[str, Linear | Embedding]]:
        """Modules with a packed form, by name; each is packed as soon as its weights are filled."""
        return iter(())

    def finish(self) -> int:
        """Completes the model once all `packed_modules` are packed; returns the bytes of all weights."""
        ...

    def packed_bytes(self, device_type: str) -> int:
        """Bytes that `finish` will return on such a device, about; known before any weight is loaded."""
        ...

    def split(self, stored: NamedTensor) -> Iterator[NamedTensor]:
        """Splits a tensor of the checkpoint into those that it holds, mostly itself alone, under names that
        `canonical_name` takes."""
        yield stored

    def canonical_name(self, name: str) -> str:
        """The name in `weights()` of a checkpoint's tensor."""
        return name

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Converts a checkpoint's tensor into what the model keeps; `name` is one of `weights()`."""
        return tensor

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although the model has no use for it."""
        return False
