"""Expert offload: all of a layer's routed experts lie in mapped files. Some of them also lie in memory, in
slots."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from quire.errors import ConfigError
from quire.outputs import ExpertCounts
from quire_common.cache import lasting_directory
from quire_common.host_memory import ALIGNMENT, aligned_bytes, file_bytes, read_ahead
from quire_kernels import ops
from quire_kernels.cpu.linear import NativeLinear
from quire_kernels.reference.linear import TorchLinear
from quire_kernels.weights import PackedLinear


class OffloadedMatrices:
    """One packed matrix (gate and up, or down) of each of a layer's routed experts: all of them in a mapped
    file, some also in slots.

    The file has no name, so that it is gone when its process has ended, however that ends.
    """

    def __init__(self, num_experts: int, num_slots: int) -> None:
        self.num_experts, self.num_slots = num_experts, num_slots
        self.layers: list[PackedLinear] = []
        """For each slot, the packed linear layer that reads it; empty until the first expert is kept."""

    def keep(self, expert: int, packed: PackedLinear) -> PackedLinear:
        """Copies an expert's packed matrix into the file. Returns the packed linear layer of the first slot,
        in the matrix's place.

        Raises:
            ConfigError: the file cannot be made, or the matrix has another form than those before it, or one
                that is not supported.
        """
        tensors = _tensors(packed)
        form = [_fixed(packed), [(name, one.shape, one.dtype) for name, one in tensors.items()]]
        if not self.layers:
            self._form = form
            self._make(packed, tensors)
        if form != self._form:
            raise ConfigError("max_resident_experts: the experts of a layer have weights of different forms")
        for tensor, place in zip(tensors.values(), self._placed(tensors, self.homes[expert]), strict=True):
            place.copy_(tensor)
        return self.layers[0]

    def _make(self, packed: PackedLinear, tensors: dict[str, torch.Tensor]) -> None:
        size = sum(-(-one.nbytes // ALIGNMENT) * ALIGNMENT for one in tensors.values())
        directory = lasting_directory("experts")
        if directory is None:
            raise ConfigError("max_resident_experts: no cache directory lasts, see QUIRE_CACHE_DIR")
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.homes = file_bytes(self.num_experts * size, directory).view(self.num_experts, size)
        except OSError as error:
            raise ConfigError(
                f"max_resident_experts: {directory} has no room for {self.num_experts * size / 1e6:.1f} MB "
                f"of a layer's experts: {error.strerror}"
            ) from None
        self._slots = aligned_bytes(self.num_slots * size).view(self.num_slots, size)
        for slot in self._slots:
            views = dict(zip(tensors, self._placed(tensors, slot), strict=True))
            self.layers.append(_with_tensors(packed, views))

    @staticmethod
    def _placed(tensors: dict[str, torch.Tensor], memory: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of `memory`, uint8 [size]: one for each of the tensors, with its type and shape."""
        begin, views = 0, []
        for one in tensors.values():
            views.append(memory[begin : begin + one.nbytes].view(one.dtype).view(one.shape))
            begin += -(-one.nbytes // ALIGNMENT) * ALIGNMENT
        return views

    def load(self, expert: int, slot: int) -> None:
        """Copies an expert's matrix from the file into a slot."""
        self._slots[slot].copy_(self.homes[expert])

    def read_ahead(self, expert: int) -> None:
        """Asks the system to read an expert's matrix from the disk where it is not in memory."""
        read_ahead(self.homes[expert])

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return self._slots.nbytes


class OffloadedExperts:
    """Experts of a layer, of which at most `num_slots` have a slot in memory. They are called like
    PackedExperts. The shared expert, if any, needs no slot.

    An expert without a slot is loaded when a batch needs it, if necessary in place of another one. If a batch
    needs more experts than there are slots, groups of them are loaded and computed one after the other.
    Before any is loaded, the system is asked to read from the file what the batch lacks, and what the next
    layer will probably need.
    """

    def __init__(self, num_experts: int, num_slots: int) -> None:
        self.num_experts, self.num_slots = num_experts, num_slots
        self.gate_up = OffloadedMatrices(num_experts, num_slots)
        self.down = OffloadedMatrices(num_experts, num_slots)
        self.counts = ExpertCounts()
        """Counts to which this layer adds its own. Layers may share them."""
        self._slot_of: dict[int, int] = {}
        """Slot of each expert that has one, the least recently used first."""
        self.following: tuple[Callable[[torch.Tensor], Any], OffloadedExperts] | None = None
        """Router and experts of the next layer with offloaded experts; None: there is none. To predict what
        that layer needs, its router is called with the input of this layer's experts, which is similar to its
        own (Eliseev and Mazur, 2023, arXiv 2312.17238)."""
        self._expected: set[int] = set()
        """Experts without a slot that the next call will probably need, as far as a prediction was made."""

    def finish(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], **packing: Any) -> None:
        """Joins the experts, once all of them are kept, with the matrices of the shared expert, if there is
        one. `packing`: see `ops.pack_experts`."""
        self._joined = ops.pack_experts(
            [*self.gate_up.layers[:1] * self.num_experts, *gate_up],
            [*self.down.layers[:1] * self.num_experts, *down],
            **packing,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return self.gate_up.nbytes + self.down.nbytes

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """See PackedExperts."""
        needed = [expert for expert in experts.unique().tolist() if expert < self.num_experts]
        self.counts.num_prefetch_hits += len(self._expected.intersection(needed))
        self._read_ahead(set(needed).difference(self._slot_of, self._expected))
        self._expected = set()
        if self.following is not None:
            router, others = self.following
            others.expect(router(x).experts)
        count = self._provide(needed)
        if count == len(needed):
            return self._joined(x, experts, shares)
        # Groups follow each other in the order of numbers, in which a token's results are added.
        sums = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        while count < len(needed):
            is_later = experts >= needed[count]
            self._joined(x, experts.masked_fill(is_later, -1), shares, sums)
            experts, needed = experts.masked_fill(~is_later, -1), needed[count:]
            count = self._provide(needed)
        return self._joined(x, experts, shares, sums)

    def _provide(self, needed: Sequence[int]) -> int:
        """Sees to it that the first of the needed experts have slots: as many as find one without taking that
        of another needed expert, but at least one. Returns their number.

        Args:
            needed: ascending numbers of the experts that a batch still needs; not empty.
        """
        all_needed = set(needed)
        for place, expert in enumerate(needed):
            slot = self._slot_of.pop(expert, None)
            if slot is not None:
                self.counts.num_hits += 1
            else:
                slot = self._free_slot(all_needed, must=place == 0)
                if slot is None:
                    return place
                self._give(expert, slot)
                self.gate_up.load(expert, slot)
                self.down.load(expert, slot)
                self.counts.num_misses += 1
            self._slot_of[expert] = slot
        return len(needed)

    def expect(self, experts: torch.Tensor) -> None:
        """Asks the system to read those of `experts` that have no slot, because the next call of this layer
        will probably need them.

        Args:
            experts: indices of experts, in any shape; those of the shared expert are ignored.
        """
        expected = {expert for expert in experts.unique().tolist() if expert < self.num_experts}
        self._expected = expected.difference(self._slot_of)
        self._read_ahead(self._expected)
        self.counts.num_prefetches += len(self._expected)

    def _read_ahead(self, experts: Collection[int]) -> None:
        for expert in sorted(experts):
            self.gate_up.read_ahead(expert)
            self.down.read_ahead(expert)

    def _free_slot(self, needed: Collection[int], *, must: bool = False) -> int | None:
        """Returns an unused slot, or takes that of the least recently used expert that is not needed. If all
        experts with slots are needed, takes the slot of the one with the highest number if `must`, else
        returns None."""
        if len(self._slot_of) < self.num_slots:
            return len(self._slot_of)
        last = max(self._slot_of) if must else None
        victim = next((expert for expert in self._slot_of if expert not in needed), last)
        if victim is None:
            return None
        return self._slot_of.pop(victim)

    def _give(self, expert: int, slot: int) -> None:
        """Has an expert computed from now on with the weights in a slot, and counts the bytes to load."""
        self._joined.replace(expert, self.gate_up.layers[slot], self.down.layers[slot])
        self.counts.num_loaded_bytes += self.nbytes // self.num_slots


def _tensors(packed: PackedLinear) -> dict[str, torch.Tensor]:
    """Returns the tensors of a packed matrix by name; raises ConfigError for kinds that are not supported."""
    if not isinstance(packed, NativeLinear | TorchLinear):
        raise ConfigError(
            "max_resident_experts: not supported for weights that are reordered or of several forms"
        )
    values = packed.state() if isinstance(packed, NativeLinear) else vars(packed)
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _fixed(packed: PackedLinear) -> list[Any]:
    """Returns what must be equal in the packed matrices of all experts, beside their tensors' types and
    shapes."""
    return [type(packed), packed.state()["struct"] if isinstance(packed, NativeLinear) else None]


def _with_tensors(packed: PackedLinear, tensors: dict[str, torch.Tensor]) -> PackedLinear:
    """Returns a copy of a packed matrix that has other tensors."""
    if isinstance(packed, NativeLinear):
        return NativeLinear.restored(packed.library, packed.state() | tensors)
    other = copy.copy(packed)
    vars(other).update(tensors)
    return other
