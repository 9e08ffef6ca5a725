"""Token embedding and output head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from quire.errors import ConfigError
from quire.layers.linear import Part, Weight
from quire.layers.scheme import LayerTensors, LinearScheme
from quire_kernels import ops
from quire_kernels.ranks import ALONE, Ranks
from quire_kernels.weights import PackedLinear


class Embedding(nn.Module):
    """Embedding table, output head, or both from one table.

    Args:
        scale: factor of looked-up rows, but not of logits; None: 1.
        is_looked_up: whether rows are looked up.
        is_head: whether logits are computed.
        ranks: tensor-parallel ranks, which divide the vocabulary.
    """

    tensors: LayerTensors
    """Tensors that the loader fills, between `allocate` and `pack`."""
    packed: PackedLinear
    """The packed table. With `is_head` it computes logits. Rows are looked up in it, unless `table` is set.
    It does not exist before `pack`."""
    table: torch.Tensor | None
    """Matrix in which rows are looked up, see `LayerTensors.table`; None: they are looked up in `packed`, or
    no rows are looked up. It does not exist before `pack`."""

    def __init__(
        self,
        vocab_size: int,
        size: int,
        *,
        dtype: torch.dtype,
        scale: float | None = None,
        is_looked_up: bool = True,
        is_head: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.vocab_size, self.size, self.dtype, self.ranks = vocab_size, size, dtype, ranks
        self._bounds = ranks.bounds(vocab_size)
        self.is_looked_up, self.is_head = is_looked_up, is_head
        self.scale = scale

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows [num_tokens, size] of int64 token ids [num_tokens], times `scale`. Ids must be
        within the vocabulary."""
        if self.ranks.size > 1:
            begin, end = self._bounds
            is_own = (token_ids >= begin) & (token_ids < end)
            rows = self._rows(torch.where(is_own, token_ids - begin, 0))
            rows = self.ranks.sum(torch.where(is_own[:, None], rows, 0))
        else:
            rows = self._rows(token_ids)
        return rows if self.scale is None else rows * self.scale

    def _rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.packed.rows(token_ids) if self.table is None else F.embedding(token_ids, self.table)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the float32 logits [n, vocab_size] that the table gives for hidden states [n, size]."""
        return self.ranks.concat(self.packed(hidden, torch.float32), self.vocab_size)

    def best(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns `ops.argmax` of `logits(hidden)`, int64 [n], for hidden states [n, size]."""
        if self.ranks.size > 1:
            return ops.argmax(self.logits(hidden))
        return self.packed.argmax(hidden)

    def allocate(self, scheme: LinearScheme, path: str) -> None:
        """Makes the tensors that a scheme stores for this rank's part of the table. `path` is the table's
        name."""
        begin, end = self._bounds
        self.tensors = scheme.table(path, end - begin, self.size, is_head=self.is_head, dtype=self.dtype)

    def pack(self) -> None:
        """Packs the loaded tensors, and drops `tensors`."""
        self.set_packed(self.tensors.pack(None), self._kept_table())

    def set_packed(self, packed: PackedLinear, table: torch.Tensor | None) -> None:
        """Uses weights that `pack` made earlier from the same tensors, and drops `tensors`."""
        self.packed, self.table = packed, table
        del self.tensors

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights, `table` included."""
        return self.packed.nbytes + (0 if self.table is None else self.table.nbytes)

    def packed_bytes(self, device_type: str) -> int:
        """Estimates what `nbytes` will be on this type of device. Works only before `pack`."""
        table = self._kept_table()
        return self.tensors.packed_bytes(None, device_type) + (0 if table is None else table.nbytes)

    def weights(self) -> Iterator[Weight]:
        """Yields the weights to be filled, one for each of the table's tensors. Raises ConfigError if a
        tensor cannot be divided among the ranks."""
        for tensor in self.tensors.stored():
            part = None
            if self.ranks.size > 1:
                if tensor.out_dim is None:
                    raise ConfigError(f"tensor_parallel_size: {tensor.name} cannot be divided by tokens")
                part = Part(tensor.out_dim, self._bounds[0], self.vocab_size)
            yield Weight(tensor.name, tensor.memory, part)

    def _kept_table(self) -> torch.Tensor | None:
        return self.tensors.table if self.is_looked_up else None
