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
    """Rows of a table by token id, an output head, or both of one table.

    Args:
        scale: what looked-up rows (not logits) are multiplied by.
        is_looked_up: whether rows are looked up.
        is_head: whether logits are computed.
        ranks: who divide the vocabulary among them.
    """

    tensors: LayerTensors
    """Tensors that the loader fills, between `allocate` and `pack`."""
    packed: PackedLinear
    """The table as output head, whose rows are looked up unless there is a `table`; none before `pack`."""
    table: torch.Tensor | None
    """See `LayerTensors.table`; none before `pack`."""

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
        """int64 [num_tokens] to [num_tokens, size]; ids are within the vocabulary (checked at admission)."""
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
        """[n, size] to float32 [n, vocab_size]."""
        return self.ranks.concat(self.packed(hidden, torch.float32), self.vocab_size)

    def best(self, hidden: torch.Tensor) -> torch.Tensor:
        """int64 [n]: `ops.argmax` of the logits of hidden [n, size]."""
        if self.ranks.size > 1:
            return ops.argmax(self.logits(hidden))
        return self.packed.argmax(hidden)

    def allocate(self, scheme: LinearScheme, path: str) -> None:
        """Makes the tensors that a scheme has for the table; `path` is its name."""
        begin, end = self._bounds
        self.tensors = scheme.table(path, end - begin, self.size, is_head=self.is_head, dtype=self.dtype)

    def pack(self) -> None:
        """Brings the loaded tensors into the form that computes."""
        self.set_packed(self.tensors.pack(None), self._kept_table())

    def set_packed(self, packed: PackedLinear, table: torch.Tensor | None) -> None:
        """Computes with what `pack` made of the same tensors before."""
        self.packed, self.table = packed, table
        del self.tensors

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights, `table` included."""
        return self.packed.nbytes + (0 if self.table is None else self.table.nbytes)

    def packed_bytes(self, device_type: str) -> int:
        """Bytes that the weights will have on such a device once they are packed, about."""
        table = self._kept_table()
        return self.tensors.packed_bytes(None, device_type) + (0 if table is None else table.nbytes)

    def weights(self) -> Iterator[Weight]:
        """Weights to be filled, one for each of the table's tensors; raises ConfigError where ranks cannot
        divide one."""
        for tensor in self.tensors.stored():
            part = None
            if self.ranks.size > 1:
                if tensor.out_dim is None:
                    raise ConfigError(f"tensor_parallel_size: {tensor.name} cannot be divided by tokens")
                part = Part(tensor.out_dim, self._bounds[0], self.vocab_size)
            yield Weight(tensor.name, tensor.memory, part)

    def _kept_table(self) -> torch.Tensor | None:
        return self.tensors.table if self.is_looked_up else None
