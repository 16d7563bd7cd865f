"""Groups of ranks that are processes of one machine and exchange tensors of a CPU through shared memory.

The native library does the exchange (`src/group.h`), so a stack of layers can sum over ranks without returning to
Python. The owner of a group makes its memory with `create_group_memory`, and each rank joins it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.kernels.native.hooks import Hook
from quire.kernels.native.library import load_library
from quire.parallel.communicator import RankTimeout

SLOT_BYTES = 1 << 20  # bytes that one rank exchanges in one turn; larger tensors take several turns
SHARED_FOLDER = Path("/dev/shm")


def create_group_memory(size: int) -> Path:
    """Returns a new file with the memory of a group of `size` ranks. The caller deletes it once all ranks have joined;
    their mappings stay."""
    folder = SHARED_FOLDER if os.access(SHARED_FOLDER, os.W_OK) else None
    descriptor, name = tempfile.mkstemp(prefix="quire-ranks-", dir=folder)  # readable by this user only
    try:
        os.truncate(descriptor, load_library().quire_group_bytes(size, SLOT_BYTES))
    finally:
        os.close(descriptor)
    return Path(name)


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where a rank is: the operations of its group that it has joined, and its step."""

    joined: int
    step: int


class GroupMemory:
    """A mapping of a group's memory, for ranks and for those that watch them."""

    def __init__(self, path: Path):
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def end(self, rank: int) -> None:
        """Says that a rank has ended: operations that wait for it fail at once."""
        load_library().quire_group_end(self.address, rank)

    def has_ended(self, rank: int) -> bool:
        return bool(load_library().quire_group_has_ended(self.address, rank))

    def position(self, rank: int) -> RankPosition:
        joined, step = ctypes.c_int64(), ctypes.c_int64()
        load_library().quire_group_read(self.address, rank, ctypes.byref(joined), ctypes.byref(step))
        return RankPosition(joined.value, step.value)


class SharedMemoryCommunicator:
    """Implements `Communicator` for one rank of a group."""

    def __init__(self, memory: GroupMemory, rank: int, size: int, seconds: float = 30.0):
        """`seconds`: deadline of each operation."""
        self._memory = memory
        self._library = load_library()
        self._rank, self._size, self._seconds = rank, size, seconds
        handle = self._library.quire_group_join(memory.address, rank, size, SLOT_BYTES, seconds)
        assert handle is not None
        self._handle: int = handle

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce(self, x: Tensor) -> Tensor:
        values = x.float().contiguous()
        self._check(self._library.quire_group_reduce(self._handle, values.data_ptr(), values.numel()), "all_reduce")
        return values.to(x.dtype)

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        assert x.shape[-1] == sizes[self._rank]
        lead = x.shape[:-1]
        parts = self._gather(x, [(*lead, size) for size in sizes], "all_gather")
        return torch.cat(parts, -1)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        counts = torch.tensor(sent, dtype=torch.int64)
        every = self._gather(counts, [(self._size,)] * self._size, "all_to_all")
        totals = [int(counts.sum()) for counts in every]
        parts = self._gather(x, [(total, *x.shape[1:]) for total in totals], "all_to_all")
        found = []
        for source, (counts, part) in enumerate(zip(every, parts, strict=True)):
            first = int(counts[: self._rank].sum())
            found.append(part[first : first + int(counts[self._rank])])
            assert len(found[-1]) == received[source]
        return torch.cat(found)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        shapes = [tuple(x.shape) if rank == source else (0,) for rank in range(self._size)]
        return self._gather(x, shapes, "broadcast")[source]

    def reduction(self) -> Hook:
        """Returns the hook with which a stack of the native library sums over this group."""
        address = ctypes.cast(self._library.quire_group_reduction, ctypes.c_void_p).value
        assert address is not None
        return GroupReduction(self, address, self._handle)

    def enter_step(self, step: int) -> None:
        """Notes this rank's step for those that watch the group."""
        self._library.quire_group_step(self._handle, step)

    def rejoin(self, memory: GroupMemory) -> None:
        """Goes on in the memory of a group that has been rebuilt with as many ranks."""
        self._library.quire_group_rejoin(self._handle, memory.address)
        self._memory = memory

    @property
    def is_cancelled(self) -> bool:
        """Whether the group has lost a rank, so that waiting is useless."""
        return self._memory.has_ended(self._rank)

    def leave(self) -> None:
        """Ends this rank's part: operations that wait for it fail at once."""
        self._library.quire_group_leave(self._handle)

    def _gather(self, x: Tensor, shapes: Sequence[tuple[int, ...]], operation: str) -> list[Tensor]:
        """Returns the tensors of all ranks, which have these shapes and x's dtype."""
        mine, sizes = x.contiguous(), [torch.Size(shape).numel() * x.element_size() for shape in shapes]
        out = torch.empty(sum(sizes), dtype=torch.uint8)
        bytes_by_rank = (ctypes.c_int64 * self._size)(*sizes)
        code = self._library.quire_group_gather(self._handle, mine.data_ptr(), bytes_by_rank, out.data_ptr())
        self._check(code, operation)
        parts = out.split(sizes)
        return [part.clone().view(x.dtype).view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _check(self, code: int, operation: str) -> None:
        if code:
            raise self.timeout(operation)

    def timeout(self, operation: str) -> RankTimeout:
        """Returns the error of an operation that a rank did not join."""
        missing = self._library.quire_group_missing(self._handle)
        position = self._memory.position(self._rank)
        return RankTimeout((missing,), f"{operation} in step {position.step},", position.joined, self._seconds)


class GroupReduction(Hook):
    """The sum over a group inside a native call."""

    def __init__(self, communicator: SharedMemoryCommunicator, call: int, context: int):
        super().__init__(call, context)
        self._communicator = communicator

    def raise_failure(self) -> None:
        raise self._communicator.timeout("all_reduce")
