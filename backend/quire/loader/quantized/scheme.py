"""ForeignScheme: the scheme of linear layers that another tool quantised."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from quire.errors import CheckpointError
from quire.layers.scheme import OF_HEADS, DenseScheme, LayerTensors, StoredTensor
from quire.loader.files import WeightFiles
from quire.loader.quantized.decoded import Decoded, Matrix
from quire.loader.quantized.formats import Format, Plain, Slot, bnb_state
from quire.loader.quantized.rules import Rules
from quire_common.errors import one_line
from quire_common.weight_files import NamedTensor
from quire_kernels import ops
from quire_kernels.grouped_weights import GroupedWeight
from quire_kernels.weights import JoinedLinear, PackedLinear, QuantizedRows, ReorderedLinear

logger = logging.getLogger("quire")
_UNUSED = ("input_scale", "input_zero_point", "input_global_scale", "weight_format")
"""Suffixes of tensors that are not read. They state how inputs were to be quantised, which is decided at run
time here, or nothing useful."""
_MAX_STATE = 2**16
"""Most bytes that bitsandbytes' `quant_state` of a weight may have. It usually has some 100."""
_KV_SCALES = ("k_scale", "v_scale", "q_scale", "output_scale")
"""Suffixes of tensors with scales for quantised attention: its keys, values, queries and output. They are not
read."""


@dataclass
class Tally:
    """Bytes of the quantised layers that were packed."""

    file_bytes: int = 0
    """About the bytes in the files, without biases. A floating-point number of 16 bits, such as a scale,
    counts as four bytes."""
    packed_bytes: int = 0
    """Bytes after packing."""
    dequantized_bytes: int = 0
    """Part of `packed_bytes`: the bytes of layers that take no fewer than plain numbers in the inputs' type
    would."""

    def add(self, file_bytes: int, packed_bytes: int, whole: int) -> None:
        """Counts a layer. `whole`: bytes that its weights would have as plain numbers in the inputs' type."""
        self.file_bytes += file_bytes
        self.packed_bytes += packed_bytes
        if packed_bytes >= whole:
            self.dequantized_bytes += packed_bytes


@dataclass(frozen=True)
class ForeignScheme:
    """Scheme for checkpoints that another tool quantised; see LinearScheme. A layer has the scheme `plain` if
    the rules give no format to any of its parts."""

    rules: Rules
    source: Path
    """File that the rules are from, usually config.json. Log lines and most error messages name it."""
    plain: DenseScheme
    """Scheme of layers that the checkpoint does not quantise. Without `keeps_codes`, its quantisation also
    applies to the others, after they are dequantised."""
    keeps_codes: bool = True
    """Whether quantised weights keep their codes on devices with kernels for these. False: all weights are
    dequantised."""
    tally: Tally = field(default_factory=Tally, compare=False)

    @property
    def input_multiple(self) -> int:
        """See LinearScheme."""
        return self.plain.input_multiple

    @property
    def of_routers(self) -> ForeignScheme:
        """See LinearScheme."""
        return replace(self, plain=self.plain.of_routers)

    def identity(self) -> Any:
        """See LinearScheme."""
        return [self.rules.values, self.plain.identity(), self.keeps_codes]

    def layer(
        self, names: Sequence[str], in_features: int, sizes: Sequence[int], *, bias: bool, dtype: torch.dtype
    ) -> LayerTensors:
        """See LinearScheme."""
        formats = [self.rules.format_of(name) for name in names]
        if not any(formats):
            return self.plain.layer(names, in_features, sizes, bias=bias, dtype=dtype)
        parts = [
            Part(self, name, form or Plain(), size, in_features)
            for name, form, size in zip(names, formats, sizes, strict=True)
        ]
        biases = [torch.empty(size, dtype=dtype) if bias else None for size in sizes]
        return ForeignTensors(self, parts, biases, dtype)

    def table(
        self, name: str, num_rows: int, size: int, *, is_head: bool, dtype: torch.dtype
    ) -> LayerTensors:
        """See LinearScheme."""
        if self.rules.format_of(name) is not None and name == "lm_head":
            tensors = self.layer([name], size, [num_rows], bias=False, dtype=dtype)
            assert isinstance(tensors, ForeignTensors)
            tensors.is_head = is_head
            return tensors
        return self.plain.table(name, num_rows, size, is_head=is_head, dtype=dtype)

    def prepared(self, files: WeightFiles) -> WeightFiles:
        """Returns the files, changed to give tensors as the slots need them. Some tensors without use are
        left out, such as scales of inputs."""
        return files._replace(read=lambda file: self._prepared(files.read(file)))

    def _prepared(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        for one in tensors:
            layer, _, suffix = one.name.rpartition(".")
            if suffix in _UNUSED or suffix in _KV_SCALES:
                continue
            if suffix == "weight_zero_point" and getattr(self.rules.format_of(layer), "is_symmetric", False):
                continue  # of zeros, as some versions write them
            if suffix.startswith("bitsandbytes__"):
                try:
                    if one.tensor.numel() > _MAX_STATE:
                        raise ValueError(f"it is longer than {_MAX_STATE} bytes")
                    one = one._replace(tensor=bnb_state(one.read()), offset=None)
                except (RecursionError, ValueError, TypeError, LookupError) as error:
                    raise CheckpointError(
                        f"{one.file}: {one.name} is no quantisation state: {one_line(error)}"
                    ) from None
            elif suffix == "weight_scale_inv":
                one = one._replace(name=f"{layer}.weight_scale")
            yield one

    def report(self) -> None:
        """Logs the numbers of `tally`. Logs that `kv_cache_scheme` is not used, if the checkpoint has one
        (`Rules.has_kv_scales`)."""
        stored, packed, dequantized = (number / 2**20 for number in vars(self.tally).values())
        text = f"{self.rules.method} weights: {stored:.1f} MiB in the files are kept in {packed:.1f} MiB"
        if dequantized:
            text += (
                f"; {dequantized:.1f} MiB of these are numbers in the type of the activations, "
                "as there is no product for what is stored here"
            )
        logger.info("%s: %s", self.source, text)
        if self.rules.has_kv_scales:
            logger.info("%s: kv_cache_scheme is not used; kv_cache_dtype quantises the cache", self.source)


class Part:
    """One part of a layer, with its stored tensors.

    Args:
        scheme: the scheme that made it, for its error messages.
        name: prefix of the tensors' names.
        form: format of the stored weights.
        out_features: output features of the part.
        in_features: input features of the layer.
    """

    def __init__(
        self, scheme: ForeignScheme, name: str, form: Format, out_features: int, in_features: int
    ) -> None:
        self.scheme, self.name, self.form, self.shape = scheme, name, form, (out_features, in_features)
        try:
            self.slots: list[Slot] = list(form.slots(out_features, in_features))
        except ValueError as error:
            raise CheckpointError(f"{scheme.source}: {name}: {error}") from None
        # What is stored is decoded on the CPU, wherever it is computed.
        device = "meta" if torch.empty(0).is_meta else "cpu"
        self.tensors = {
            slot.suffix: torch.empty(slot.shape, dtype=slot.dtype, device=device) for slot in self.slots
        }

    @property
    def num_weights(self) -> int:
        """Number of weights: in_features * out_features."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory for the stored tensors; 0 after `decode`."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def stored(self) -> Iterator[StoredTensor]:
        """See LayerTensors."""
        for slot in self.slots:
            yield StoredTensor(
                f"{self.name}.{slot.suffix}", self.tensors[slot.suffix], slot.out_dim, slot.in_dim
            )

    def decode(self) -> Decoded:
        """Returns the part's weights, and frees the stored tensors. Raises CheckpointError if these
        contradict each other or the part's shape."""
        tensors, self.tensors = self.tensors, {}
        whole = tensors.get("weight_shape")
        if whole is not None and not any(
            size % own for size, own in zip(whole.tolist(), self.shape, strict=True)
        ):
            tensors["weight_shape"] = torch.tensor(self.shape)  # the file's is of all ranks' parts
        try:
            decoded = self.form.decode(tensors)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.scheme.source}: {self.name}: {one_line(error)}") from None
        if tuple(decoded.matrix.shape) != self.shape:
            shape = list(decoded.matrix.shape)
            raise CheckpointError(
                f"{self.scheme.source}: {self.name}: stored as {shape}, its layer has {list(self.shape)}"
            )
        return decoded


class ForeignTensors:
    """Tensors of a layer or table that another tool quantised; see LayerTensors."""

    table: torch.Tensor | None = None
    is_head = False
    """Whether the table computes logits."""

    def __init__(
        self,
        scheme: ForeignScheme,
        parts: Sequence[Part],
        biases: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
    ) -> None:
        self.scheme, self.parts, self.biases, self.dtype = scheme, parts, biases, dtype
        self.device = torch.empty(0).device

    def stored(self) -> Iterator[StoredTensor]:
        """See LayerTensors."""
        for part in self.parts:
            yield from part.stored()
        for part, bias in zip(self.parts, self.biases, strict=True):
            if bias is not None:
                yield StoredTensor(f"{part.name}.bias", bias, 0, None)

    def pack(self, activation: str | None) -> PackedLinear:
        """See LayerTensors."""
        stored = sum(part.nbytes for part in self.parts)
        decoded = [self._computable(part.decode()) for part in self.parts]
        whole = joined(decoded)
        if whole is None and activation is not None:
            # A gate and what it gates are computed together.
            whole = joined([Decoded(one.dequantize().to(self.dtype)) for one in decoded])
        if whole is not None:
            biases = [bias for bias in self.biases if bias is not None]
            packed = self._packed(whole, torch.cat(biases) if biases else None, activation)
        else:
            parts = zip(decoded, self.biases, strict=True)
            packed = JoinedLinear([self._packed(part, bias, None) for part, bias in parts])
        num_weights = sum(part.num_weights for part in self.parts)
        self.scheme.tally.add(stored, packed.nbytes, num_weights * self.dtype.itemsize)
        return packed

    def packed_bytes(self, activation: str | None, device_type: str) -> int:
        """See LayerTensors."""
        keeps, plain = self.scheme.keeps_codes, self.scheme.plain
        return sum(
            part.nbytes
            if keeps and device_type in part.form.devices
            else ops.packed_bytes(
                torch.empty(part.shape, dtype=self.dtype, device="meta"),
                device_type=device_type,
                quantization=plain.quantization,
            )
            for part in self.parts
        )

    def _computable(self, decoded: Decoded) -> Decoded:
        """Moves decoded weights to the device, in a form for which it has kernels."""
        matrix, device = decoded.matrix, self.device
        if not self.scheme.keeps_codes:
            matrix = decoded.dequantize().to(device, self.dtype)
            return Decoded(matrix)
        if isinstance(matrix, QuantizedRows) and device.type != "cpu":
            quantization = "fp8" if matrix.quantization == "fp8" else "int8"
            if self.is_head:
                quantization = OF_HEADS.get(quantization, quantization)
            codes, scales = matrix.codes.to(device), matrix.scales.to(device)
            matrix = QuantizedRows(codes, scales, quantization)
        elif isinstance(matrix, torch.Tensor):
            matrix = matrix.to(device, self.dtype)
        elif device.type != "cpu" or (isinstance(matrix, QuantizedRows) and matrix.quantization == "fp8"):
            matrix = matrix.dequantize().to(device, self.dtype)
        return Decoded(matrix, None if decoded.order is None else decoded.order.to(device))

    def _packed(self, decoded: Decoded, bias: torch.Tensor | None, activation: str | None) -> PackedLinear:
        matrix = decoded.matrix
        if isinstance(matrix, torch.Tensor):
            quantization = self.scheme.plain.quantization
            if self.is_head:
                quantization = OF_HEADS.get(quantization, quantization)
            packed = ops.pack_linear(matrix, bias, activation=activation, quantization=quantization)
        else:
            packed = ops.pack_linear(matrix, bias, activation=activation, dtype=self.dtype)
        return packed if decoded.order is None else ReorderedLinear(packed, decoded.order)


def joined(parts: Sequence[Decoded]) -> Decoded | None:
    """Joins the rows of several matrices into one matrix; None: that is not possible, for example because
    their column orders differ."""
    order = parts[0].order
    for part in parts[1:]:
        if (part.order is None) != (order is None):
            return None
        if order is not None and part.order is not None and not torch.equal(part.order, order):
            return None
    matrix = _joined_matrix([part.matrix for part in parts])
    return None if matrix is None else Decoded(matrix, order)


def _joined_matrix(parts: Sequence[Matrix]) -> Matrix | None:
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, torch.Tensor):
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        return torch.cat(tensors) if len(tensors) == len(parts) else None
    if isinstance(first, QuantizedRows):
        rows = [part for part in parts if isinstance(part, QuantizedRows)]
        if len(rows) < len(parts) or any(part.quantization != first.quantization for part in rows):
            return None
        codes, scales = (
            torch.cat(column) for column in zip(*((one.codes, one.scales) for one in rows), strict=True)
        )
        return QuantizedRows(codes, scales, first.quantization)
    groups = [part for part in parts if isinstance(part, GroupedWeight)]
    kinds = {
        (one.bits, one.group, one.zero, one.table, one.minimums is None, one.row_scales is None)
        for one in groups
    }
    if len(groups) < len(parts) or len(kinds) > 1:
        return None
    dtypes = {one.scales.dtype for one in groups}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32

    def column(name: str) -> torch.Tensor | None:
        found = [getattr(one, name) for one in groups]
        return None if found[0] is None else torch.cat(found)

    return replace(
        first,
        codes=torch.cat([one.codes for one in groups]),
        scales=torch.cat([one.scales.to(dtype) for one in groups]),
        minimums=column("minimums"),
        row_scales=column("row_scales"),
    )
