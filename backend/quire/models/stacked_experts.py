"""Stacked experts: checkpoint tensors, each with one matrix, or gate and up, of every routed expert of a
layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.errors import CheckpointError
from quire_common.weight_files import NamedTensor


def split_experts(
    stored: NamedTensor, prefix: str, parts: Sequence[str], num_experts: int
) -> Iterator[NamedTensor]:
    """Splits [num_experts, out_features, in_features] into each expert's tensors.

    Args:
        prefix: name of the experts; their numbers follow in the names of the results.
        parts: names of the matrices that the tensor holds of each expert, in order. Each has an equal share
            of an expert's rows.

    Raises:
        CheckpointError: the tensor does not have three dimensions, holds another number of experts, or its
            rows cannot be divided among the parts.
    """
    tensor, offset = stored.tensor, stored.offset
    if tensor.ndim != 3 or tensor.shape[0] != num_experts or tensor.shape[1] % len(parts):
        raise CheckpointError(
            f"{stored.file}: {stored.name} has shape {list(tensor.shape)}, config.json means "
            f"{num_experts} experts"
        )
    for expert, content in enumerate(tensor):
        for part, rows in zip(parts, content.chunk(len(parts)), strict=True):
            name = f"{prefix}.{expert}.{part}.weight"
            yield stored._replace(name=name, tensor=rows, offset=offset)
            offset = None if offset is None else offset + rows.nbytes
