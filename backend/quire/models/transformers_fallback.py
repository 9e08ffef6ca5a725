"""TransformersModel: causal models that transformers' code computes. With `model_impl` auto, these are models
without a model family here; with transformers, others too.

transformers' code computes the layers, except those that `pack_layers` replaces. Their attention runs as
`ops.paged_attention` over the paged KV cache, through transformers' attention interface. So a model needs no
code of its own for continuous batching and prefix caching. (vLLM calls this the Transformers modeling
backend.)

Before the weights are read, a forward pass on torch's "meta" device probes the model's attention: which
modules call the interface, with which shapes, and which positions their masks show. A model that does not fit
is refused with the reason.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.moe import ExpertsInterface
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.utils.logging import disable_progress_bar

from quire.converters import INT32_MAX
from quire.errors import CheckpointError, ConfigError
from quire.layers.config import AttentionKind, DecoderConfig
from quire.layers.hf_config import HFConfig
from quire.layers.linear import Weight
from quire.layers.rotary import NO_ROPE, RopeConfig
from quire.layers.scheme import SCHEMES
from quire.models.interface import ForwardInputs, Model
from quire.models.kv_groups import kv_groups
from quire.models.kv_spec import AttentionKV
from quire.models.transformers_layers import pack_layers
from quire_common.errors import one_line, shown
from quire_common.weight_files import NamedTensor
from quire_kernels import ops

logger = logging.getLogger("quire")

_STEP, _PROBE = "quire", "quire_probe"
"""Names under which our functions are in transformers' registries: of attention in steps; of attention, masks
and experts in the probing pass."""
_NUM_TOKENS = 8
"""Tokens in the probing pass."""
_CANNOT = "cannot run on transformers' code"
_PASSES_BY = "its attention does not go by the attention interface"
_MAX_LISTED = 16
_MOST_POSITIONS = 2**24
"""Most positions among which the probing pass looks for the end of a window."""
_KNOWN = frozenset(("dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids"))
"""Keyword arguments of an attention call that are obeyed, or have no effect here."""
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_ROPE_OF_BATCHES = ("longrope", "dynamic")
_MOST_LAYERS = 256
"""Most layers of a model: each takes milliseconds to make. Llama 3.1 405B has 126."""
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""Keys under which transformers' configurations hold the number of layers."""
_MOST = 2**24
"""Largest value of a key in config.json that names a size or a number (`*_size`, `num_*`, `n_*`), except the
number of layers."""
_LABELS = ("_labels", "2label", "2id")
"""Ends of the keys about a classifier's labels. These keys are left out, because transformers would make
tables of any size from them."""
_STORED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Types of stored tensors that are accepted. Tensors of other types may not hold plain numbers."""
_TOLERANCE = 0.02
"""Largest change of a hidden state, relative to the state's size, that counts as rounding."""


class AttentionShape(NamedTuple):
    """One layer's attention, as the probing pass saw it called."""

    module: str
    """Name, in the headless model, of the module that calls the interface."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Size of a key. Values may be smaller; they are padded in the cache."""
    window: int | None
    """Positions that a token sees, itself included; None: all."""
    softcap: float | None
    has_sinks: bool


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(DecoderConfig):
    """A checkpoint's config.json and the results of the probing pass."""

    checkpoint: dict[str, Any]
    """Keys and values of config.json."""
    attention: tuple[AttentionShape, ...]
    """Attention of each layer, in the order of the calls."""
    num_parameters: int

    @property
    def num_weights(self) -> int:
        """See DecoderConfig."""
        return self.num_parameters

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """See DecoderConfig."""
        return tuple(dict.fromkeys(AttentionKind(*shape[1:]) for shape in self.attention))

    @property
    def _undivided(self) -> dict[str, bool]:
        return {"a model on transformers' code": True}


class TransformersModel(nn.Module, Model):
    """Causal model that transformers' code computes. It has no layers until `fill` or `weights` makes
    them."""

    config: TransformersConfig
    base: PreTrainedModel
    """The model without its head; unset until its layers are made."""
    head: PreTrainedModel
    """The model with its head, in which `_Given` replaces `base`; unset until its layers are made."""

    def __init__(self, config: TransformersConfig, max_model_len: int, device: torch.device) -> None:
        super().__init__()
        if config.scheme != SCHEMES[None]:
            raise ConfigError(
                f"quantization={config.scheme.identity()}: models on transformers' code have none"
            )
        self.config, self.kv_groups, self._device = config, kv_groups(config.kv_windows), device
        self._step, self._given = _Step(), _Given()

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> TransformersConfig:
        """See Model."""
        name = _checked_name(hf)
        _check_sizes(hf)
        try:
            found = _read(hf.values)
            _check_kinds(hf, found)
            model = _made(found, dtype, torch.device("meta"), _PROBE)
            num_parameters = sum(one.numel() for one in model.parameters())
            seen = _probe(model)
        except CheckpointError:
            raise
        except Exception as error:  # transformers' code raises what it likes
            raise hf.error(f"{name} {_CANNOT}: {_why(error)}") from error
        modules = {shape.module for shape in seen.attention}
        if not len(modules) == len(seen.attention) == found.num_hidden_layers:
            raise hf.error(
                f"{name} {_CANNOT}: of num_hidden_layers={found.num_hidden_layers} layers {len(modules)} "
                f"call its attention interface, {len(seen.attention)} times in all"
            )
        largest = max(seen.attention, key=lambda shape: shape.num_kv_heads * shape.head_dim)
        longest, inner = found.max_position_embeddings, getattr(found, "intermediate_size", None)
        return TransformersConfig(
            checkpoint=hf.values,
            attention=seen.attention,
            num_parameters=num_parameters,
            vocab_size=seen.vocab_size,
            hidden_size=seen.hidden_size,
            intermediate_size=inner if isinstance(inner, int) else 4 * seen.hidden_size,
            num_layers=len(seen.attention),
            num_heads=largest.num_heads,
            num_kv_heads=largest.num_kv_heads,
            head_dim=largest.head_dim,
            max_position_embeddings=longest,
            dtype=dtype,
            rms_norm_eps=0.0,
            activation="silu",
            tie_word_embeddings=False,
            rope=RopeConfig(
                rope_type=NO_ROPE,
                theta=1.0,
                rotary_dim=0,
                max_position_embeddings=longest,
                original_max_position_embeddings=longest,
                parameters={},
            ),
            sliding_windows=tuple(shape.window for shape in seen.attention),
            attention_scale=1.0,
            attention_softcap=largest.softcap,
            attention_sinks=any(shape.has_sinks for shape in seen.attention),
        )

    @property
    def is_recordable(self) -> bool:
        """See Model."""
        return False

    def kv_spec(self, kv_cache_dtype: str) -> AttentionKV:
        """See Model.

        Raises:
            ConfigError: the cache is to be quantised, and layers differ in the number or size of KV heads.
                Scales add bytes per head, so the layer with the largest keys need not be the one that needs
                most memory.
        """
        shapes = {(shape.num_kv_heads, shape.head_dim) for shape in self.config.attention}
        if kv_cache_dtype != "auto" and len(shapes) > 1:
            raise ConfigError(
                f"kv_cache_dtype={kv_cache_dtype}: {self.config.checkpoint['architectures'][0]} has layers "
                "with different heads, whose keys and values are kept as they are (auto)"
            )
        return AttentionKV(self.config.num_kv_heads, self.config.head_dim, self.config.dtype, kv_cache_dtype)

    def embed(self, inputs: ForwardInputs) -> torch.Tensor:
        """See Model."""
        x: torch.Tensor = self.base.get_input_embeddings()(inputs.input_ids)
        if inputs.embeds is not None:
            x.index_copy_(0, inputs.embeds[0], inputs.embeds[1].to(x.dtype))
        return x

    def compute(self, x: torch.Tensor, inputs: ForwardInputs) -> torch.Tensor:
        """See Model."""
        self._step.inputs = inputs
        hidden = _hidden(self.base, x, inputs.positions)
        return hidden if inputs.rows is None else hidden[inputs.rows]

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """See Model."""
        return self.compute(self.embed(inputs), inputs)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Model."""
        return _logits(self.head, self._given, hidden)

    def weights(self) -> Iterator[Weight]:
        """See Model. If `fill` has not made the layers, they are made here."""
        if not hasattr(self, "head"):
            self._set(_made(_read(self.config.checkpoint), self.config.dtype, self._device))
        return (Weight(name, parameter.data) for name, parameter in self.named_parameters())

    def fill(self, tensors: Iterable[NamedTensor], source: Path) -> bool:
        """See Model. transformers maps older names, and joins tensors that are stored in parts."""
        disable_progress_bar()
        checkpoint = _read(self.config.checkpoint)
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(checkpoint)]
        content = {}
        for stored in tensors:
            if stored.tensor.dtype not in _STORED:
                raise CheckpointError(
                    f"{stored.file}: tensor {shown(stored.name)} is of {stored.tensor.dtype}"
                )
            content[stored.name] = stored.read()
        try:
            found, info = kind.from_pretrained(
                None,
                config=checkpoint,
                state_dict=content,
                ignore_mismatched_sizes=True,  # they are in the information
                dtype=self.config.dtype,
                attn_implementation=_STEP,
                output_loading_info=True,
            )
        except Exception as error:  # transformers' code raises what it likes
            raise CheckpointError(f"{source}: {one_line(error)}") from error
        for name, stored_shape, shape in sorted(info["mismatched_keys"]):
            raise CheckpointError(
                f"{source}: tensor {shown(name)} has shape {list(stored_shape)}, the model "
                f"means {list(shape)}"
            )
        for wrong in ("missing", "unexpected"):
            if names := sorted(info[f"{wrong}_keys"]):
                listed = ", ".join(names[:_MAX_LISTED])
                raise CheckpointError(f"{source}: {len(names)} {wrong} tensors: {listed}")
        self._set(found.to(self._device))
        return True

    def finish(self) -> int:
        """See Model.

        Raises:
            CheckpointError: packing or a trial computation fails, or in that computation a token's hidden
                state changes with another token although attention is off, or is not a number.
        """
        name = type(self.head).__name__
        try:
            packed, change = pack_layers(self.base, self.head), self._change_by_others()
        except Exception as error:  # transformers' code raises what it likes
            raise CheckpointError(f"{name} {_CANNOT}: {_failure(error)}") from error
        if not change <= _TOLERANCE:  # not a number, neither
            raise CheckpointError(
                f"{name} {_CANNOT}: a token's hidden state changes with other tokens of a batch, not by "
                "attention alone (a convolution, or a rotary embedding that follows the longest sequence)"
            )
        logger.warning(
            "transformers %s computes this model (%s; model_impl): a step takes longer, layers being many "
            "calls, and there are no LoRA adapters, quantisation, ranks and CUDA graphs",
            transformers.__version__,
            name,
        )
        return packed + sum(one.nbytes for one in self.parameters())

    def packed_bytes(self, device_type: str) -> int:
        """See Model."""
        return self.config.num_parameters * self.config.dtype.itemsize

    def _set(self, model: PreTrainedModel) -> None:
        """Makes this object compute with a transformers model."""
        base: Any = model.base_model
        config, self.base, self.head = self.config, base, model
        setattr(model, model.base_model_prefix, self._given)
        modules = dict(self.base.named_modules())
        for group, one in enumerate(self.kv_groups):
            for position, layer in enumerate(one.layers):
                shape = config.attention[layer]
                modules[shape.module].quire_attention = _PagedAttention(
                    config, shape, self._step, group, position
                )
        self.eval().requires_grad_(False)

    def _change_by_others(self) -> float:
        """Computes a token beside each of two others, with attention between tokens off. Returns the relative
        change of the token's hidden state."""
        embed, last = self.base.get_input_embeddings(), self.config.max_position_embeddings - 1
        self._step.inputs, found = None, []
        with torch.inference_mode():
            for other, position in ((self.config.vocab_size - 1, last), (1, 0)):
                token_ids = torch.tensor([other, 2], device=self._device)
                positions = torch.tensor([position, 1], device=self._device)
                found.append(_hidden(self.base, embed(token_ids), positions)[1].float())
        return float((found[0] - found[1]).norm() / found[1].norm())


class _Step:
    """The current step, shared by all attention modules of a model. `inputs` is None while attention between
    tokens is off."""

    inputs: ForwardInputs | None = None


class _PagedAttention:
    """One layer's attention; the transformers module holds it as `quire_attention`."""

    def __init__(
        self, config: TransformersConfig, shape: AttentionShape, step: _Step, group: int, position: int
    ) -> None:
        self._step, self._group, self._position = step, group, position
        self._dtype, self._window = config.dtype, shape.window
        self._backend = config.attention_backend
        kept = shape.num_kv_heads, shape.head_dim
        self._kv_shape = None if kept == (config.num_kv_heads, config.head_dim) else kept

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Writes keys and values to the cache, and computes attention of query [1, num_heads, num_tokens,
        head_dim] and keys and values of the same layout. Returns [1, num_tokens, num_heads, value size].
        While attention is off (see _Step), nothing is written, and the result is a sum of query, key and
        value, each token's by itself."""
        size, inputs = value.shape[3], self._step.inputs
        if inputs is None:
            key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
            return ((query + key)[..., :size] + value).transpose(1, 2)
        if size < key.shape[3]:
            value = F.pad(value, (0, key.shape[3] - size))
        query, key, value = (
            one[0].transpose(0, 1).to(self._dtype).contiguous() for one in (query, key, value)
        )
        kv_layer, meta = inputs.kv_cache.layer(self._position, self._kv_shape), inputs.metas[self._group]
        ops.write_kv(key, value, kv_layer, meta.slot_mapping)
        attended = ops.paged_attention(
            query,
            kv_layer,
            meta,
            scale=query.shape[2] ** -0.5 if scaling is None else scaling,
            sliding_window=self._window,
            softcap=softcap,
            sinks=None if sinks is None else sinks.float(),
            implementation=self._backend,
        )
        return attended[None, :, :, :size]


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of steps, for transformers' interface."""
    attention: Any = module.quire_attention
    return attention(query, key, value, scaling, softcap, s_aux), None


class _Given(nn.Module):
    """Stands in for a headless model, and returns `hidden` as its hidden states."""

    hidden: torch.Tensor

    @property
    def decoder(self) -> _Given:
        """This object, under a name by which some heads call their base model."""
        return self

    def forward(self, *_: Any, **__: Any) -> _HiddenStates:
        return _HiddenStates(last_hidden_state=self.hidden)


class _HiddenStates(BaseModelOutputWithPast):
    """A base model's output with hidden states only; every other field is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _hidden(base: PreTrainedModel, x: torch.Tensor, positions: torch.Tensor, **mask: Any) -> torch.Tensor:
    """Returns hidden states [num_tokens, hidden_size] for embeddings [num_tokens, size]."""
    out = base(inputs_embeds=x[None], position_ids=positions[None], use_cache=False, **mask)
    hidden: torch.Tensor = out.last_hidden_state
    return hidden[0]


def _logits(head: PreTrainedModel, given: _Given, hidden: torch.Tensor) -> torch.Tensor:
    given.hidden = hidden[None]
    logits: torch.Tensor = head(inputs_embeds=given.hidden, use_cache=False).logits
    return logits[0].float()


def _checked_name(hf: HFConfig) -> str:
    """Returns the architecture's name. Raises CheckpointError if it is not transformers' causal model of the
    file's model_type, or if the file is a GGUF file or has quantised weights."""
    name, kind, version = hf.architecture, hf.get("model_type"), transformers.__version__
    if hf.gguf is not None or kind not in CONFIG_MAPPING:
        own = ", and code that auto_map names is not run" if hf.get("auto_map") else ""
        raise hf.error(
            f"architecture {name!r} is not supported, and model_type {kind!r:.40} is unknown to transformers "
            f"{version}{own}; supported: its causal models, and those of docs/checkpoints.md"
        )
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if name != known:
        raise hf.error(
            f"architecture {name!r} is not supported, and the causal model of model_type {kind!r} in "
            f"transformers {version} is {known}"
        )
    if hf.get("quantization_config"):
        raise hf.error(f"quantization_config: {name} {_CANNOT} with quantised weights")
    return name


def _rope_types(values: Any) -> Iterator[Any]:
    """Yields the types of rotary embedding in rope parameters, which may be divided by kinds of layers; None
    for an object that states no type."""
    if isinstance(values, dict):
        yield values.get("rope_type", values.get("type"))
        for each in values.values():
            yield from _rope_types(each)


def _check_sizes(hf: HFConfig) -> None:
    """Raises CheckpointError for sizes and counts that are too large, before transformers makes tables of
    that size."""
    for key, value in hf.values.items():
        counts = key.endswith("_size") or key.startswith(("num_", "n_"))
        most = _MOST_LAYERS if key in _LAYER_COUNTS else _MOST
        if counts and not key.endswith(_LABELS) and isinstance(value, int) and value > most:
            raise hf.error(f"{key} must be at most {most}, got {value!r:.40}")


def _check_kinds(hf: HFConfig, found: PreTrainedConfig) -> None:
    """Raises CheckpointError for models that the configuration alone shows to be unsupported, and for wrong
    numbers of layers or positions."""
    name = hf.architecture
    for key in ("rope_parameters", "rope_scaling"):
        for kind in _rope_types(hf.values.get(key)):
            if kind in _ROPE_OF_BATCHES:
                raise hf.error(
                    f"{key}: {name} {_CANNOT} with rope_type {kind}: in its code the longest sequence of a "
                    "batch decides how all of them are rotated"
                )
    if getattr(found, "is_decoder", False):
        raise hf.error(f"is_decoder: {name} {_CANNOT}: encoders that are used as decoders are not served")
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(found)]
    if types := set(getattr(found, "layer_types", None) or ()) - _LAYER_TYPES:
        served = " and ".join(sorted(_LAYER_TYPES))
        raise hf.error(f"layer_types: {name} {_CANNOT}: {served} are served, and not {shown(min(types))}")
    if found.is_encoder_decoder:
        raise hf.error(f"is_encoder_decoder: {name} {_CANNOT}: decoders alone are served")
    if found.get_text_config() is not found:
        raise hf.error(f"{name} {_CANNOT}: models of text alone are served")
    if model._is_stateful:
        raise hf.error(f"{name} {_CANNOT}: it keeps a state beside keys and values")
    if not model._can_set_attn_implementation():
        raise hf.error(f"{name} {_CANNOT}: {_PASSES_BY}")
    for key, most in (("num_hidden_layers", _MOST_LAYERS), ("max_position_embeddings", INT32_MAX)):
        value = getattr(found, key, None)
        if type(value) is not int or not 1 <= value <= most:
            raise hf.error(f"{key} must be a positive whole number up to {most}, got {value!r:.40}")


def _read(values: dict[str, Any]) -> PreTrainedConfig:
    kept = {key: value for key, value in values.items() if not key.endswith(_LABELS)}
    return CONFIG_MAPPING[values["model_type"]].from_dict(copy.deepcopy(kept))


def _made(
    found: PreTrainedConfig, dtype: torch.dtype, device: torch.device, attention: str = _STEP
) -> PreTrainedModel:
    """Makes transformers' causal model of a configuration, with weights of arbitrary values."""
    experts = {"experts_implementation": _PROBE} if attention == _PROBE else {}
    with device:
        made: PreTrainedModel = AutoModelForCausalLM.from_config(
            found, dtype=dtype, attn_implementation=attention, trust_remote_code=False, **experts
        )
    return made


class _Unfit(ValueError):
    """A model does not fit; the message says why."""


def _why(error: Exception) -> str:
    """Returns the reason why a model cannot run, from an error in the check before its weights are read."""
    if isinstance(error, _Unfit):
        return str(error)
    if isinstance(error, NotImplementedError) or re.search(r"\bmeta\b", str(error)):
        return "what its layers compute depends on the values of tensors, which a check without data lacks"
    if isinstance(error, KeyError) and error.args == (_PROBE,):
        return _PASSES_BY
    if "Padding_idx" in str(error):
        return "pad_token_id must be below vocab_size"
    return _failure(error)


def _failure(error: Exception) -> str:
    return f"its code fails with {type(error).__name__}: {one_line(error)}"


class _Seen(NamedTuple):
    """Results of the probing pass."""

    attention: tuple[AttentionShape, ...]
    hidden_size: int
    vocab_size: int


def _probe(model: PreTrainedModel) -> _Seen:
    """Runs the probing pass of a model, which cannot compute afterwards. Raises _Unfit if the model does not
    fit; transformers' code may raise other errors."""
    base: Any = model.base_model
    given, calls = _Given(), list[tuple[nn.Module, AttentionShape]]()
    if base is model:
        raise _Unfit("it has no model without a head")
    if "per_layer_inputs" in inspect.signature(base.forward).parameters:
        raise _Unfit("its layers read token ids, beside the embeddings of the tokens")
    names = {id(module): name for name, module in base.named_modules()}
    token = _calls.set(calls)
    try:
        with torch.device("meta"), torch.no_grad():
            token_ids, positions = torch.zeros(_NUM_TOKENS, dtype=torch.int64), torch.arange(_NUM_TOKENS)
            # Without a mask, transformers would look for sequences in the positions; "meta" has none.
            mask = torch.ones((1, _NUM_TOKENS), dtype=torch.int64)
            hidden = _hidden(base, model.get_input_embeddings()(token_ids), positions, attention_mask=mask)
            setattr(model, model.base_model_prefix, given)
            logits = _logits(model, given, hidden)
    finally:
        _calls.reset(token)
    shapes = tuple(shape._replace(module=names[id(module)]) for module, shape in calls)
    return _Seen(shapes, hidden.shape[1], logits.shape[1])


def _look(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of the probing pass: records each call, and returns a tensor of the result's shape
    with undefined content, and None. Raises _Unfit for a call that is not supported."""
    for name, given in others.items():
        if name not in _KNOWN and given is not None and given is not False:
            raise _Unfit(f"its attention has an argument {name!r}")
    (_, num_heads, _, head_dim), (_, num_kv_heads, num_keys, size) = query.shape, value.shape
    if not hasattr(attention_mask, "quire_window"):
        raise _Unfit("it makes a mask of its own")
    if num_heads % num_kv_heads:
        raise _Unfit(f"{num_heads} query heads are no multiple of {num_kv_heads} KV heads")
    if num_keys != _NUM_TOKENS or not size <= head_dim == key.shape[3]:
        raise _Unfit(f"attention of {list(query.shape)} to {list(key.shape)} and {list(value.shape)}")
    window = attention_mask.quire_window
    shape = AttentionShape("", num_heads, num_kv_heads, head_dim, window, softcap, s_aux is not None)
    _calls.get().append((module, shape))
    return torch.empty_like(query[..., :size]).transpose(1, 2), None


def _look_at_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    config: PreTrainedConfig,
    **_: Any,
) -> torch.Tensor:
    """Mask function of the probing pass, for transformers' interface. It marks the mask with the window that
    it implies (`quire_window`). Raises _Unfit for a mask that is not causal, or of attention in chunks."""
    last = min(config.max_position_embeddings, _MOST_POSITIONS) - 1
    mask: Any = torch.empty((1, 1, q_length, kv_length))
    counts = [_num_seen(mask_function, position, last) for position in (last - 1, last)]
    if counts == [last, last + 1]:
        mask.quire_window = None
    elif counts[0] == counts[1]:
        mask.quire_window = counts[0]
    else:
        raise _Unfit("its mask is that of attention in chunks")
    return mask


def _num_seen(mask_function: Callable[..., torch.Tensor], position: int, last: int) -> int:
    """Returns how many positions a token sees, its own included. Raises _Unfit if these are not its own
    and the ones right before it."""
    with torch.device("cpu"):
        keys, zero = torch.arange(last + 2), torch.tensor(0)
        seen = mask_function(zero, zero, torch.tensor(position), keys).broadcast_to(keys.shape)
    count = int(seen.sum())
    if seen[position + 1 :].any() or not seen[position + 1 - count : position + 1].all():
        raise _Unfit("its tokens see others than those right before them (it is not causal, for one)")
    return count


_calls: ContextVar[list[tuple[nn.Module, AttentionShape]]] = ContextVar("calls")
"""Calls that `_look` has recorded in the current probing pass, each with its module."""
AttentionInterface.register(_STEP, _attend)
AttentionInterface.register(_PROBE, _look)
AttentionMaskInterface.register(_PROBE, _look_at_mask)
ExpertsInterface.register(_PROBE, lambda module, hidden, *_, **__: torch.empty_like(hidden))
