"""Cache memory of one device and its swap space on the host, and the copies of a plan.

`CacheIndex` decides which request owns which unit; this module only stores the bytes. Device tensors are allocated
zeroed and receive only finite values, so that masked keys are never NaN. No copy makes the host wait for the device:
units swapped out are written to the swap space by a later call, once their transfer is complete.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from quire.kernels.upload import HostCopy, send
from quire.types import CacheSpec, Copy, CopyKind

MAX_RUN_BYTES = 64 << 20  # maximum bytes per copy, which needs as much temporary memory on both sides
MAX_PENDING_BYTES = 512 << 20  # maximum bytes being swapped out, in pinned memory; beyond it the host waits


class CorruptUnits(Exception):
    """Units being swapped in do not match their checksums. Raised before any is written to the device: the step fails,
    and its requests fall back to their committed prefix and compute the rest again."""


@dataclass(frozen=True, slots=True)
class _PendingOut:
    """Units that are being swapped out and are not in the swap space yet."""

    group: int
    targets: list[int]
    moved: HostCopy


class CacheStore:
    """The cache's tensors on the device, and its swap space on the host."""

    def __init__(
        self,
        specs: list[CacheSpec],
        num_units: list[int],
        num_host_units: list[int] | None,
        device: torch.device,
        *,
        checksums: bool = True,
    ):
        """`checksums`: whether to compute a checksum of every unit swapped out and compare it at swap-in."""
        self.specs = specs
        self._checksums: dict[tuple[int, int], int] | None = {} if checksums else None  # (group, host unit) -> CRC
        self._num_host_units = num_host_units or [0] * len(specs)
        self._pin = device.type == "cuda"
        self._num_units = num_units
        self._device = [_zeros(unit_shape(s, n), _dtype(s), device) for s, n in zip(specs, num_units, strict=True)]
        self._host: dict[int, Tensor] = {}  # group -> swap space, mapped on first use
        self._pending: deque[_PendingOut] = deque()  # in the order of their transfers
        self.tensors: dict[str, Tensor] = {s.group: t for s, t in zip(specs, self._device, strict=True)}

    def release(self) -> None:
        """Gives the device's memory of the cache back; what it holds is lost."""
        for group, tensor in enumerate(self._device):
            self._put(group, torch.empty(0, dtype=tensor.dtype, device=tensor.device))

    def restore(self) -> None:
        """Takes the memory again that `release` gave back, with zeros; nothing otherwise."""
        for group, (tensor, num) in enumerate(zip(self._device, self._num_units, strict=True)):
            if not tensor.numel():
                spec = self.specs[group]
                self._put(group, _zeros(unit_shape(spec, num), _dtype(spec), tensor.device))

    def _put(self, group: int, tensor: Tensor) -> None:
        self._device[group] = self.tensors[self.specs[group].group] = tensor

    def apply(self, copies: list[Copy]) -> None:
        """Runs copies in order. Consecutive copies of one kind and group run as one, unless one reads a unit that
        another wrote."""
        self._store_arrived()
        run: list[Copy] = []
        for copy in copies:
            follows = run and (copy.kind, copy.group) == (run[0].kind, run[0].group)
            full = len(run) * _unit_bytes(self.specs[copy.group]) >= MAX_RUN_BYTES
            if run and (not follows or full or any(copy.source == earlier.target for earlier in run)):
                self._apply_run(run)
                run = []
            run.append(copy)
        if run:
            self._apply_run(run)

    def _apply_run(self, run: list[Copy]) -> None:
        kind, group = run[0].kind, run[0].group
        if not self.specs[group].layers:
            return  # a pipeline stage that has none of this group's layers
        dim = _unit_dim(self.specs[group])
        device = _as_bytes(self._device[group])
        targets = torch.tensor([c.target for c in run], device="cpu")
        if kind is CopyKind.ZERO:
            device.index_fill_(dim, send(targets, device.device), 0)
            return
        sources = torch.tensor([c.source for c in run], device="cpu")
        if kind is CopyKind.IN:
            moved = self._from_host(run, sources).to(device.device, non_blocking=True)
        else:
            moved = device.index_select(dim, send(sources, device.device))
        if kind is CopyKind.OUT:
            self._host_of(group)  # allocates now, so that a lack of memory fails this step
            while self._pending and _num_bytes(self._pending) + moved.nbytes > MAX_PENDING_BYTES:
                self._store_arrived(1)
            self._pending.append(_PendingOut(group, [c.target for c in run], HostCopy(moved)))
            self._store_arrived()
        else:
            device.index_copy_(dim, send(targets, device.device), moved)

    def _store_arrived(self, num_needed: int = 0) -> None:
        """Writes completed transfers to the swap space in the order in which they started, so that the last write to a
        unit wins. Waits only for the first `num_needed`."""
        while self._pending and (num_needed > 0 or self._pending[0].moved.is_done()):
            out = self._pending[0]
            moved, dim = out.moved.wait(), _unit_dim(self.specs[out.group])
            if self._checksums is not None:
                for unit, checksum in zip(out.targets, _checksums_of(moved, dim), strict=True):
                    self._checksums[out.group, unit] = checksum
            self._host_of(out.group).index_copy_(dim, torch.tensor(out.targets, device="cpu"), moved)
            self._pending.popleft()
            num_needed -= 1

    def _from_host(self, run: list[Copy], sources: Tensor) -> Tensor:
        """Copies a run's units out of the swap space to memory of their own, from which the device reads them later."""
        group, dim = run[0].group, _unit_dim(self.specs[run[0].group])
        wanted = {copy.source for copy in run}
        holding = (
            i for i, out in enumerate(self._pending) if out.group == group and not wanted.isdisjoint(out.targets)
        )
        self._store_arrived(max(holding, default=-1) + 1)
        host = self._host_of(group)
        shape = (*host.shape[:dim], len(run), *host.shape[dim + 1 :])
        moved = torch.empty(shape, dtype=host.dtype, device="cpu", pin_memory=self._pin)
        torch.index_select(host, dim, sources, out=moved)
        if self._checksums is not None:
            for copy, checksum in zip(run, _checksums_of(moved, dim), strict=True):
                if self._checksums.get((group, copy.source)) != checksum:
                    raise CorruptUnits(f"host unit {copy.source} of group {group} does not match its checksum")
        return moved

    def host_bytes(self, group: int) -> np.ndarray:
        """Returns a group's host memory as bytes, with the shape of its units; the last dimension is in bytes."""
        self._host_of(group)
        array: np.ndarray = self._host[group].view(torch.uint8).numpy()
        return array

    def note_checksum(self, group: int, unit: int) -> None:
        """Takes the checksum of a host unit that was written by other means than a copy of a plan."""
        if self._checksums is not None:
            dim = _unit_dim(self.specs[group])
            (checksum,) = _checksums_of(self._host_of(group).select(dim, unit).unsqueeze(dim), dim)
            self._checksums[group, unit] = checksum

    def is_intact(self, group: int, unit: int) -> bool:
        """Whether a host unit matches its checksum; true where there is none. Any thread may ask."""
        expected = None if self._checksums is None else self._checksums.get((group, unit))
        if expected is None:
            return True
        dim = _unit_dim(self.specs[group])
        return _checksums_of(self._host_of(group).select(dim, unit).unsqueeze(dim), dim) == [expected]

    def has_arrived(self, group: int, unit: int) -> bool:
        """Whether no copy to this host unit is under way."""
        self._store_arrived()
        return not any(out.group == group and unit in out.targets for out in self._pending)

    def _host_of(self, group: int) -> Tensor:
        """Returns a group's swap space. It is not pinned: that takes seconds for gigabytes, and copies use pinned
        buffers of their own."""
        if group not in self._host:
            spec = self.specs[group]
            self._host[group] = _zeros(unit_shape(spec, self._num_host_units[group]), _dtype(spec), torch.device("cpu"))
        return _as_bytes(self._host[group])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates zeroed memory. On a CPU it is mapped, and the system zeroes pages on first touch, since clearing
    gigabytes now would take a second. NumPy's allocator would request huge pages: the first token, which touches one in
    every layer's plane, would then wait until hundreds of megabytes are cleared."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes can't be mapped: {error}") from error
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes).view(dtype).view(shape)


def _checksums_of(moved: Tensor, dim: int) -> list[int]:
    """Returns one checksum per unit; `dim` is the dimension of units."""
    return [crc32(unit.contiguous().view(torch.uint8).numpy().data) for unit in moved.unbind(dim)]


def unit_shape(spec: CacheSpec, num_units: int) -> tuple[int, ...]:
    if spec.kind == "paged":
        return (len(spec.layers), spec.planes, num_units, spec.page_tokens, *spec.shape)
    return (len(spec.layers), num_units, *spec.shape)


def _unit_dim(spec: CacheSpec) -> int:
    """Returns the dimension of a group's tensor that counts units."""
    return 2 if spec.kind == "paged" else 1


def _unit_bytes(spec: CacheSpec) -> int:
    return spec.unit_elements * _dtype(spec).itemsize


def _num_bytes(pending: Iterable[_PendingOut]) -> int:
    return sum(out.moved.num_bytes for out in pending)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Returns 8-bit floats as bytes, because torch's copy ops do not support them."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _dtype(spec: CacheSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype
