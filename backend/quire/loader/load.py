"""load_model: makes a model from a checkpoint, with its weights on the device."""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from quire.config import ModelConfig
from quire.errors import CheckpointError, ConfigError
from quire.layers.config import DTYPES, DecoderConfig
from quire.layers.embedding import Embedding
from quire.layers.hf_config import MAX_SIZE, HFConfig
from quire.layers.linear import Linear, Weight
from quire.layers.pooling import read_classifier
from quire.layers.scheme import SCHEMES
from quire.loader.files import Wanted, WeightFiles, find_weights, read_ahead
from quire.loader.info import checkpoint_state, end_token_ids, read_configs
from quire.loader.packed_cache import BackgroundWriter, PackedCache, PackedEntry
from quire.loader.quantized.rules import read_rules
from quire.loader.quantized.scheme import ForeignScheme
from quire.models.draft_head import DecoderHead
from quire.models.interface import Model
from quire.models.mtp import head_class
from quire.models.registry import model_class, with_head
from quire_common.errors import in_line, one_line
from quire_common.host_memory import trim_heap
from quire_common.weight_files import NamedTensor
from quire_kernels.ranks import ALONE, Ranks

logger = logging.getLogger("quire")

_MAX_LISTED = 16
_GIVE_BACK = 2**25
"""Least bytes of weights that are packed between two calls of `trim_heap`. A call takes milliseconds, too
long for each of thousands of experts."""
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
_MOST_WEIGHTS_PER_BYTE = 8
"""Most weights that a byte of a weight file may stand for, however it is quantised. A model with more weights
than that is refused before memory is taken for it."""
_WEIGHTS_PER_EXPERT = 2**14
"""Number of weights added for each expert when the size of a model is compared with that of its files:
Python's objects for an expert take some 10 KB."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with its weights, ready to run."""

    model: Model
    config: DecoderConfig
    eos_token_ids: frozenset[int]
    """Ids of the tokens that end a sequence; see `end_token_ids`."""
    weight_bytes: int
    weights_digest: str = ""
    """`digest_weights` of the model before it was packed; empty: it was not asked for."""
    cache_writer: BackgroundWriter | None = None
    """Writer of the packed weights for the next start; None: they are not written."""


def is_worth_keeping(read_s: float, pack_s: float) -> bool:
    """Whether packed weights are worth caching for the next start: packing took more than a second, and more
    than the rest of reading the weights. Packed weights are usually no larger than the files, so reading
    them takes no longer than reading the files.

    Args:
        read_s: seconds that reading the weights took besides packing.
        pack_s: seconds that packing took.
    """
    return pack_s > max(read_s, 1.0)


class EmptyModel(NamedTuple):
    """A model whose weights have not been read."""

    model: Model
    files: WeightFiles | None
    """Files with its weights; None: weights are random."""
    eos_token_ids: frozenset[int]
    """See `LoadedModel`."""


def load_model(
    config: ModelConfig,
    device: torch.device,
    *,
    check: Callable[[DecoderConfig], None] | None = None,
    with_digest: bool = False,
    ranks: Ranks = ALONE,
    is_head: bool = False,
) -> LoadedModel:
    """Makes the model that a checkpoint describes, and loads its weights.

    Args:
        config: the fields `model` (directory or .gguf file), dtype, load_format, max_model_len, quantization,
            attention_backend, packed_weights_size, model_impl, model_class, draft_model and
            max_resident_experts are used.
        device: device of the weights.
        check: called before the weights are read; raises an error if the model's shape is not allowed.
        with_digest: whether `LoadedModel.weights_digest` is computed.
        ranks: the tensor-parallel ranks; only this rank's part is loaded.
        is_head: whether the checkpoint's head for multi-token prediction is made in place of its model.

    Raises:
        CheckpointError: the checkpoint is missing, broken or unsupported, or changed while it was read. The
            message is one line, which usually names the file.
        ConfigError: the checkpoint or the device does not allow an option, such as the quantisation, this
            number of ranks or a budget of experts; `model_class` or an entry point gives no Model; the
            checkpoint has no head for multi-token prediction; or it is a draft head, and `draft_model` does
            not name it.
    """
    state = checkpoint_state(config.model)
    is_cached = not is_head and config.max_resident_experts is None
    cache = PackedCache.from_config(config, device) if is_cached else None
    entry = cache and PackedEntry(cache, config)
    empty = empty_model(config, device, check=check, ranks=ranks, is_head=is_head)
    model, files = empty.model, empty.files
    cache_writer, weights_digest = None, entry.fill(model, with_digest) if entry else None
    if weights_digest is not None:
        weight_bytes = model.finish()
    elif files is None:
        fill_randomly(model)
        weights_digest = digest_weights(model) if with_digest else ""
        weight_bytes = pack(model)
    else:
        begin, is_filled = time.monotonic(), model.fill(files.tensors(), files.source)
        packing = _Packing(model, with_digest)
        if is_filled:
            for name, memory, _ in model.weights():
                packing.on_filled(name, memory)
        else:
            fill_weights(model, files.tensors(), files.source, packing.on_filled)
        if checkpoint_state(config.model) != state:
            raise CheckpointError(f"{files.source}: the checkpoint changed while it was read: load it again")
        weight_bytes, weights_digest = model.finish(), packing.weights_digest()
        others_s = time.monotonic() - begin - packing.seconds
        if entry and not is_filled and is_worth_keeping(others_s, packing.seconds):
            cache_writer = entry.keep(model, weights_digest)
        if isinstance(model.config.scheme, ForeignScheme):
            model.config.scheme.report()
    trim_heap()
    return LoadedModel(
        model=model,
        config=model.config,
        eos_token_ids=empty.eos_token_ids,
        weight_bytes=weight_bytes,
        weights_digest=weights_digest,
        cache_writer=cache_writer,
    )


def empty_model(
    config: ModelConfig,
    device: torch.device,
    *,
    check: Callable[[DecoderConfig], None] | None = None,
    ranks: Ranks = ALONE,
    is_head: bool = False,
) -> EmptyModel:
    """Makes the model that a checkpoint describes, without its weights. Arguments and errors are as for
    `load_model`.

    On torch's "meta" device the model's weights take no memory, and their size can be computed.
    """
    hf, generation = read_configs(config.model)
    if hf.unused:
        logger.warning("%s: %s: not known, and not used", hf.path, in_line(", ".join(hf.unused)))
    classifier = read_classifier(hf)
    hf = with_head(hf)
    kind = model_class(hf, config.model_impl, config.model_class)
    if is_head:
        kind = head_class(hf, kind)
    if issubclass(kind, DecoderHead) and not is_head and config.model != config.draft_model:
        raise ConfigError(f"{hf.path}: {hf.architecture} is a draft head: name it under draft_model")
    if classifier is not None and kind.class_logits is Model.class_logits:
        raise hf.error(f"{kind.__name__} computes no scores: classifiers are not supported by it")
    backend = None if config.attention_backend == "auto" else config.attention_backend
    with checkpoint_errors(hf):
        rules = read_rules(hf)
        # Quantised weights have lost more precision than bfloat16 takes from activations.
        dtype = _dtype(config.dtype, hf, "float32" if rules is None else "bfloat16")
        if rules is not None and (config.dtype, dtype, device.type) == ("auto", torch.float16, "cpu"):
            dtype = torch.bfloat16  # which CPU kernels can multiply
        parsed = kind.parse_config(hf, dtype)
    files = None if config.load_format == "dummy" else find_weights(config, hf.gguf)
    scheme = (files and files.scheme) or SCHEMES[config.quantization]
    if rules is not None:
        scheme = ForeignScheme(
            rules, hf.path, SCHEMES[config.quantization], keeps_codes=config.quantization is None
        )
        files = files and scheme.prepared(files)
    parsed = replace(parsed, scheme=scheme, attention_backend=backend, classifier=classifier)
    if config.max_resident_experts is not None:
        parsed = _with_budget(parsed, config.max_resident_experts, device)
    experts = parsed.experts
    num_experts = 0 if experts is None else len(experts.layers) * experts.num_experts
    needed = parsed.num_weights + _WEIGHTS_PER_EXPERT * num_experts
    if files is not None and needed > _MOST_WEIGHTS_PER_BYTE * files.num_bytes:
        of_experts = f" in {num_experts} experts" if num_experts else ""
        raise CheckpointError(
            f"{files.source}: {files.num_bytes} bytes are too few for the {parsed.num_weights} weights"
            f"{of_experts} that {hf.path.name} means: truncated, or another model's"
        )
    if ranks.size > 1:
        if rules is not None and any(getattr(form, "is_gemv", False) for _, form in rules.rules):
            raise ConfigError("tensor_parallel_size: ranks do not divide AWQ weights of version gemv")
        parsed = parsed.of_rank(ranks)
    _check_input_sizes(parsed, config.quantization)
    if check is not None:
        check(parsed)
    with checkpoint_errors(hf):
        model = kind(parsed, config.max_model_len or parsed.max_position_embeddings, device)
        ends = end_token_ids(hf, generation)
    return EmptyModel(model, files, ends)


def check_offload(max_resident: int | None, device: torch.device) -> None:
    """Raises ConfigError if there is a budget of resident experts and the device does not support one."""
    if max_resident is not None and device.type == "cuda":
        raise ConfigError("max_resident_experts: on the CPU only: on a GPU all experts are resident")


def _with_budget(config: DecoderConfig, max_resident: int, device: torch.device) -> DecoderConfig:
    """Returns a model's configuration with a budget of resident experts, or unchanged if the budget has room
    for all. Raises ConfigError if the model or the device does not support a budget."""
    check_offload(max_resident, device)
    if config.experts is None:
        raise ConfigError("max_resident_experts: the model has no experts, or transformers computes them")
    if max_resident >= config.experts.num_experts:
        return config
    return replace(config, experts=replace(config.experts, max_resident=max_resident))


@contextmanager
def checkpoint_errors(hf: HFConfig) -> Iterator[None]:
    """Re-raises errors that impossible values in a configuration cause as CheckpointError, which names the
    file."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise hf.error(f"holds a value that cannot be right: {one_line(error)}") from error


def digest_weights(model: Model) -> str:
    """Returns a digest of every bit of a model's weights that are not packed yet. 20 GB take about a second
    on a CPU.

    XXH3 detects accidental changes. It need not resist attacks: whoever chooses the weights can change the
    output anyway.
    """
    return _joined([_digest(name, weight) for name, weight, _ in model.weights()])


def _digest(name: str, weight: torch.Tensor) -> bytes:
    bits = weight.detach().cpu().contiguous().flatten().view(torch.uint8)
    head = f"{name} {list(weight.shape)} {weight.dtype}\n".encode()
    return head + xxhash.xxh3_128(bits.numpy().data).digest()


def _joined(digests: Iterable[bytes]) -> str:
    return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()


def pack(model: Model) -> int:
    """Packs a model whose weights are all loaded. Returns the bytes of its weights in memory."""
    packer = Packer()
    for _, module in model.packed_modules():
        packer.pack(module)
    return model.finish()


class Packer:
    """Packs modules, and returns freed memory to the system. Without that, memory could hold all weights
    twice at the end."""

    def __init__(self) -> None:
        self._num_bytes = 0
        """Bytes of the modules packed since the last `trim_heap`."""

    def pack(self, module: Linear | Embedding) -> None:
        """Packs one of a model's `packed_modules`."""
        module.pack()
        self._num_bytes += module.nbytes
        if self._num_bytes >= _GIVE_BACK:
            trim_heap()
            self._num_bytes = 0


class _Packing:
    """Packs each layer when its last tensor is filled. Tensors of other layers may be read meanwhile."""

    def __init__(self, model: Model, with_digest: bool) -> None:
        self._packer, self._with_digest = Packer(), with_digest
        self._digests = {name: b"" for name, _, _ in model.weights()}
        self._layers: dict[str, tuple[Linear | Embedding, set[str]]] = {}
        for _, module in model.packed_modules():
            names = {weight.name for weight in module.weights()}
            self._layers |= dict.fromkeys(names, (module, names))
        self.seconds = 0.0
        """Seconds spent packing."""

    def on_filled(self, name: str, memory: torch.Tensor) -> None:
        """Notes that a weight is filled, and packs its layer if it was the last. The memory may be freed
        then."""
        if self._with_digest:
            self._digests[name] = _digest(name, memory)
        if name in self._layers:
            module, left = self._layers[name]
            left.remove(name)
            if not left:
                begin = time.monotonic()
                self._packer.pack(module)
                self.seconds += time.monotonic() - begin

    def weights_digest(self) -> str:
        """Returns `digest_weights` of the loaded tensors; empty: it was not asked for. All tensors must have
        been loaded."""
        return _joined(self._digests.values()) if self._with_digest else ""


def fill_randomly(model: Model) -> None:
    """Fills the weights of a model. Vectors of floating-point numbers get 1, vectors of integers 0. Other
    weights get seeded random numbers, such that products with plain matrices are about as large as their
    inputs. Matrices of integers, which hold codes of quantised weights, get random bits."""
    weights = {name: weight for name, weight, _ in model.weights()}
    generator = torch.Generator(next(iter(weights.values())).device).manual_seed(0)
    for name, weight in weights.items():
        prefix, _, suffix = name.rpartition(".")
        if suffix == "g_idx":  # the group of each input
            groups = weights[f"{prefix}.scales"].shape[0]
            weight.copy_(torch.arange(len(weight), device=weight.device) * groups // len(weight))
        elif weight.dim() == 1:
            weight.fill_(1 if weight.is_floating_point() else 0)
        elif weight.is_floating_point():
            size = weight.shape[1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator, device=weight.device) * size)
        else:
            limits = (118, 122) if "scale" in suffix else ()  # exponents plus 127
            weight.random_(*limits, generator=generator)


def fill_weights(
    model: Model,
    tensors: Iterable[NamedTensor],
    source: Path,
    on_filled: Callable[[str, torch.Tensor], None] = lambda name, memory: None,
) -> None:
    """Reads tensors into the model, and converts their type and device.

    Args:
        model: model whose `weights()` are filled.
        tensors: tensors of the checkpoint, in any order.
        source: file that errors about missing tensors name.
        on_filled: called with the name and memory of each filled weight. Soon afterwards this function drops
            its own references to that memory.

    Raises:
        CheckpointError: a tensor cannot be read, is there twice, or has a wrong shape or type; tensors are
            missing; the model has no place for one; or a tied output head differs from the embedding.
    """
    with torch.no_grad():
        for name, memory in _filled(model, tensors, source):
            on_filled(name, memory)


def _filled(model: Model, tensors: Iterable[NamedTensor], source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    targets = {weight.name: weight for weight in model.weights()}
    needed = frozenset(targets)
    unexpected: dict[Path, list[str]] = {}
    tables: list[NamedTensor] = []
    tied_heads: list[NamedTensor] = []
    nothing = torch.empty(0)

    def wanted() -> Iterator[Wanted]:
        for whole in (part for one in tensors for part in model.split(one)):
            name, tensor, file = whole[:3]
            own = model.canonical_name(name)
            if own not in needed and f"model.{own}" in needed:
                own = f"model.{own}"  # saved without its head, and so without the prefix
            weight = targets.pop(own, None)
            if weight is None and own in needed:
                raise CheckpointError(f"{file}: {name} stands for {own}, as a tensor before it does")
            if weight is None:
                if own == HEAD and model.config.tie_word_embeddings:
                    tied_heads.append(whole)
                elif not model.ignores(own) and not _is_absent_bias(own, whole):
                    unexpected.setdefault(file, []).append(name)
                continue
            shape, target = _whole_shape(weight), weight.memory
            if _sizes(tensor.shape) != _sizes(shape):
                ranks = model.config.ranks.size
                means = "config.json means" + (f", for {ranks} ranks," if ranks > 1 else "")
                raise CheckpointError(f"{file}: {name} has shape {list(tensor.shape)}, {means} {shape}")
            if tensor.dtype != target.dtype and not (_is_wide(tensor) and _is_wide(target)):
                wanted = "floating point" if _is_wide(target) else target.dtype
                raise CheckpointError(f"{file}: {name} has type {tensor.dtype}, expected {wanted}")
            stored = _part_of(whole, weight)
            is_kept = (
                stored.offset is not None
                and stored.change is None
                and tensor.dtype == target.dtype
                and target.is_contiguous()
                and target.device.type == "cpu"
                and model.convert(own, nothing) is nothing
            )
            if own == TABLE:
                tables.append(whole)
            yield Wanted(stored, own, target, is_kept)

    try:
        for one, content in read_ahead(wanted()):
            if not one.is_kept:
                one.memory.copy_(model.convert(one.name, content).reshape(one.memory.shape))
            yield one.name, one.memory
        for head, table in itertools.product(tied_heads, tables):
            check_tied(head, table, model.config.dtype)
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"a weight file cannot be read: {one_line(error)}") from None
    complaints = [f"{source}: {len(targets)} missing tensors: {_listed(targets)}"] if targets else []
    complaints += [
        f"{file}: {len(names)} unexpected tensors: {_listed(names)}" for file, names in unexpected.items()
    ]
    if complaints:
        raise CheckpointError("; ".join(complaints))


def check_tied(head: NamedTensor, table: NamedTensor, dtype: torch.dtype) -> None:
    """Raises CheckpointError if a stored output head differs from the embedding that it is tied to, in shape
    or, both converted to `dtype`, in values."""
    if head.tensor.shape != table.tensor.shape or not torch.equal(
        head.read().to(dtype), table.read().to(dtype)
    ):
        raise CheckpointError(
            f"{head.file}: {head.name} is not {TABLE}, but tie_word_embeddings says that they are one"
        )


def _whole_shape(weight: Weight) -> list[int]:
    """Returns the shape of a weight's whole tensor, of which a rank may have a part only."""
    shape = list(weight.memory.shape)
    if weight.part is not None:
        shape[weight.part.dim] = weight.part.whole
    return shape


def _part_of(stored: NamedTensor, weight: Weight) -> NamedTensor:
    """Returns this rank's part of a stored tensor.

    Only the part is read if the tensor is divided along its first dimension and is used as it is stored.
    """
    if weight.part is None:
        return stored
    (dim, begin, _), shape, change = weight.part, _whole_shape(weight), stored.change
    size, has_groups = weight.memory.shape[dim], weight.name.endswith("g_idx")

    def cut(content: torch.Tensor) -> torch.Tensor:
        part = (content if change is None else change(content)).reshape(shape).narrow(dim, begin, size)
        return part - part.min() if has_groups else part  # a rank counts its groups from its own first

    tensor = stored.tensor.reshape(shape).narrow(dim, begin, size)
    if change is None and stored.offset is None:
        return stored._replace(tensor=cut(stored.tensor))
    if change is None and stored.offset is not None and dim == 0 and not has_groups:
        return stored._replace(tensor=tensor, offset=stored.offset + begin * stored.tensor.nbytes // shape[0])
    raw = stored.tensor if stored.raw is None else stored.raw
    return stored._replace(tensor=tensor, change=cut, raw=raw)


def _sizes(shape: Iterable[int]) -> list[int]:
    """Returns the shape without dimensions of size 1; checkpoints store scales with or without them."""
    return [size for size in shape if size > 1]


def _is_wide(tensor: torch.Tensor) -> bool:
    """Whether the tensor holds floating-point numbers of more than 8 bits."""
    return tensor.is_floating_point() and tensor.itemsize > 1


def _is_absent_bias(name: str, stored: NamedTensor) -> bool:
    """Whether the tensor is the zero bias that some quantisers write for layers without a bias."""
    is_bias = name.endswith(".bias") and stored.tensor.numel() <= MAX_SIZE
    return is_bias and not stored.read().any()


def _check_input_sizes(config: DecoderConfig, quantization: str | None) -> None:
    group = config.scheme.input_multiple
    for name, size in config.input_sizes.items():
        if size % group:
            raise ConfigError(
                f"quantization={quantization} has groups of {group} input features, and the checkpoint's "
                f"{name}={size} is no multiple of it: use int8"
            )


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)[:_MAX_LISTED]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _dtype(asked: str, hf: HFConfig, default: str) -> torch.dtype:
    stated = hf.get("dtype") or hf.get("torch_dtype") or default
    name = stated.removeprefix("torch.") if asked == "auto" else asked
    if name not in DTYPES:
        raise hf.error(f"dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[name]
