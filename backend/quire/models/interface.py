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
    """New tokens of a ragged batch, and the KV cache with the tokens before them."""

    input_ids: torch.Tensor
    """int64 [num_tokens]."""
    positions: torch.Tensor
    """int64 [num_tokens]; [3, num_tokens] where a request's positions have three axes (M-RoPE)."""
    kv_cache: KVLayers
    """KV cache. The forward pass writes the new tokens' keys and values into it."""
    metas: Sequence[AttentionMetadata]
    """Metadata of each KV group: each sequence's new tokens, and the blocks with its past."""
    rows: torch.Tensor | None = None
    """int64 [n], ascending: batch rows whose hidden states are returned; None: all rows."""
    embeds: tuple[torch.Tensor, torch.Tensor] | None = None
    """(int64 [n], [n, embeds_size]): batch rows whose embedding is given instead of looked up, and their
    values. A value row holds the embedding, then what each deepstack level adds."""
    adapters: AdapterStep | None = None
    """Adapters of the batch's tokens; None: no token has an adapter."""
    token_types: torch.Tensor | None = None
    """int64 [num_tokens]: 1 for tokens of the second text of a pair, else 0; None: all are 0. Decoders ignore
    it."""
    taps: tuple[int, ...] = ()
    """Indices of layers whose inputs (the residual stream) are wanted beside the result, ascending."""
    tapped: list[torch.Tensor] = field(default_factory=list)
    """[num_tokens, hidden_size] for each of `taps`, which the forward pass appends."""


class Model(Protocol):
    """Model over a paged KV cache: computes hidden states from token ids, and logits from hidden states.

    The worker and the loader use a model by this interface, and a draft head by HeadModel. A model class
    inherits from `torch.nn.Module` first and from this class second. Methods with a body are defaults.
    """

    config: DecoderConfig
    """The model's shape."""
    kv_groups: tuple[KVGroup, ...]
    """KV groups: layers that share a block table. `ForwardInputs.metas` has one AttentionMetadata per
    group."""
    accepts_image_embeds: bool = True
    """Whether requests may give `image_embeds`. False: the family computes text only."""

    has_joint_images: bool = False
    """Whether the tokens of an image see each other in both directions."""

    def __init__(self, config: DecoderConfig, max_model_len: int, device: torch.device) -> None:
        """Makes the model, its weights uninitialised.

        Args:
            config: shape, from `parse_config`.
            max_model_len: longest sequence served, in tokens.
            device: device on which the weights are made.
        """

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """Returns the shape that config.json states, read as the family does. Raises CheckpointError; the
        loader makes one of the other errors that wrong values cause."""
        ...

    # What a step needs.

    def kv_spec(self, kv_cache_dtype: str) -> KVSpec:
        """Spec of the KV cache: what each layer keeps of a token.

        Args:
            kv_cache_dtype: see `CacheConfig`.

        Raises:
            ConfigError: this model does not support `kv_cache_dtype`.
        """
        ...

    def embed(self, inputs: ForwardInputs) -> torch.Tensor:
        """Returns the input of the first layer, [num_tokens, embedded_size]."""
        ...

    def compute(self, x: torch.Tensor, inputs: ForwardInputs) -> torch.Tensor:
        """Computes the rest of `forward` from the result `x` of `embed`. It may overwrite `x`, and reads no
        token ids."""
        ...

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """Computes the new tokens, and stores their keys and values.

        Returns:
            [n, hidden_size]: hidden states of `inputs.rows`, or of all tokens, after the final norm.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits [n, vocab_size] of hidden states [n, hidden_size] from `forward`."""
        ...

    def best_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns `ops.argmax` of `compute_logits(hidden)`, int64 [n]; -1 for a row without a best token."""
        return ops.argmax(self.compute_logits(hidden))

    def class_logits(self, pooled: torch.Tensor) -> torch.Tensor:
        """Returns the classifier's float32 logits [num_labels] of a pooled hidden state [hidden_size]. Needs
        `config.classifier`."""
        raise NotImplementedError

    def next_tokens(self, inputs: ForwardInputs) -> torch.Tensor:
        """Returns `best_tokens` of the result of `forward`. A model may do both in one call."""
        return self.best_tokens(self.forward(inputs))

    @property
    def fed_size(self) -> int:
        """Numbers per token in what a draft head reads of the target (the result of `HeadModel.fed`); 0: the
        model is no draft head."""
        return 0

    @property
    def is_fused(self) -> bool:
        """Whether one call computes all layers. The runner then records no PromptGraphs, and does without
        `torch.inference_mode`, which only saves time in each operator."""
        return False

    @property
    def is_encoder(self) -> bool:
        """Whether tokens see those behind them. The engine then computes each prompt in one step, and
        generates no tokens."""
        return False

    @property
    def pooling_mode(self) -> PoolingMode:
        """How prompts are pooled for a classifier's scores, and for embeddings if the checkpoint does not
        say."""
        return "last"

    @property
    def is_recordable(self) -> bool:
        """Whether steps may be recorded as CUDA graphs."""
        return True

    def work(self, kv_token_bytes: int) -> ModelWork | None:
        """Returns the numbers from which a step's bytes and operations are computed, once the model is
        packed; None: they are not known. `kv_token_bytes`: bytes that a layer keeps per token."""
        return None

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields modules by name, as torch does. Adapters change the Linear layers among them."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that no module packs, by name, as torch does."""
        ...

    def count_experts(self, counts: ExpertCounts) -> bool:
        """Adds what happens to offloaded experts from now on to `counts`. False: no expert is offloaded."""
        return False

    def take_slots(self) -> None:
        """Called once, after the model's Linear layers have made their adapter slots. Raises ConfigError if
        the model does not support adapters."""

    # What loading needs.

    def weights(self) -> Iterator[Weight]:
        """Yields the weights to be filled, one for every tensor that the model needs."""
        ...

    def fill(self, tensors: Iterable[NamedTensor], source: Path) -> bool:
        """Fills all weights from a checkpoint's tensors. False: it did nothing, and the loader fills them.

        Args:
            source: file that errors name.

        Raises:
            CheckpointError: tensors are missing, of another shape, or unknown.
        """
        return False

    def packed_modules(self) -> Iterator[tuple[str, Linear | Embedding]]:
        """Yields the modules that have a packed form, by name. The loader packs each one when its weights are
        filled."""
        return iter(())

    def finish(self) -> int:
        """Completes the model after all `packed_modules` are packed. Returns the bytes of its weights in
        memory; experts with a budget of slots count by these."""
        ...

    def packed_bytes(self, device_type: str) -> int:
        """Estimates the bytes that `finish` will return on this type of device, before any weight is
        loaded."""
        ...

    def split(self, stored: NamedTensor) -> Iterator[NamedTensor]:
        """Splits a stored tensor into the tensors that it holds, under names that `canonical_name` accepts.
        Most tensors stay whole."""
        yield stored

    def canonical_name(self, name: str) -> str:
        """Returns the name in `weights()` for a name in the checkpoint."""
        return name

    def convert(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Converts a checkpoint's tensor into what the model keeps.

        Args:
            name: one of `weights()`, or the name of a matrix that an adapter changes.
            tensor: the tensor, or the adapter's B [out_features, rank]. The loader also passes an empty
                tensor: if that comes back itself, tensors of this name are kept as they are.
        """
        return tensor

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although the model has no use for it. `name` is a result
        of `canonical_name`."""
        return False


class HeadModel(Model, Protocol):
    """Draft head: a small model that guesses a target's next tokens from the target's hidden states.

    Its input i is token i + 1 and the target's hidden state after token i. Its output i predicts token i + 2.
    Logits are computed from results of `guess`.
    """

    def share(self, target: Model) -> None:
        """Uses the target's embedding, and its output head if the draft head has none of its own. Called
        once, after the weights are loaded. Raises ConfigError if the head does not fit the target."""

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
        """Computes the head, and stores its keys and values.

        Args:
            inputs: tokens i + 1, at positions i.
            hidden: [num_tokens, fed_size]: results of `fed` for tokens i. For tokens that the target has not
                computed, the head's own result for the token before stands in for them.

        Returns:
            [n, hidden_size]: hidden states of `inputs.rows`, or of all tokens.
        """
        ...
