"""The cache's bytes on one device, with the host space beside them, and the copies a plan asks for.

`CacheIndex` decides which unit belongs to whom; this only holds the units. A device tensor is allocated zeroed and
only ever receives finite values, so that what attention masks out can't be NaN.
"""

from __future__ import annotations

import math
import mmap
from zlib import crc32

import torch
from torch import Tensor

from quire.kernels.upload import send
from quire.types import CacheSpec, Copy, CopyKind


class CorruptUnits(Exception):
    """What came back from the host is not what went there. Raised before anything is written: the step fails, whoever
    it belonged to falls back to what is committed, and computes it again."""


class CacheStore:
    def __init__(self, specs: list[CacheSpec], num_units: list[int], num_host_units: list[int] | None,
                 device: torch.device, *, checksums: bool = True):  # fmt: skip
        """`checksums`: of every unit that goes to the host, compared when it comes back."""
        self.specs = specs
        self._checksums: dict[tuple[int, int], int] | None = {} if checksums else None  # (group, host unit) -> its own
        self._num_host_units = num_host_units or [0] * len(specs)
        self._pin = device.type == "cuda"
        self._device = [_zeros(unit_shape(s, n), _dtype(s), device) for s, n in zip(specs, num_units, strict=True)]
        self._host: dict[int, Tensor] = {}  # allocated when first needed: pinning gigabytes takes seconds
        self.tensors: dict[str, Tensor] = {s.group: t for s, t in zip(specs, self._device, strict=True)}

    def apply(self, copies: list[Copy]) -> None:
        """Run copies in order. Neighbours of one kind and group go together unless one reads what another wrote."""
        run: list[Copy] = []
        for copy in copies:
            follows = run and (copy.kind, copy.group) == (run[0].kind, run[0].group)
            if run and (not follows or any(copy.source == earlier.target for earlier in run)):
                self._apply_run(run)
                run = []
            run.append(copy)
        if run:
            self._apply_run(run)

    def _apply_run(self, run: list[Copy]) -> None:
        kind, group = run[0].kind, run[0].group
        dim = 2 if self.specs[group].kind == "paged" else 1  # where units are counted
        device = self._device[group]
        targets = torch.tensor([c.target for c in run], device="cpu")
        if kind is CopyKind.ZERO:
            _as_bytes(device).index_fill_(dim, send(targets, device.device), 0)
            return
        source = self._host_of(group) if kind is CopyKind.IN else device
        target = self._host_of(group) if kind is CopyKind.OUT else device
        sources = torch.tensor([c.source for c in run], device="cpu")
        source, target = _as_bytes(source), _as_bytes(target)
        moved = source.index_select(dim, send(sources, source.device)).to(target.device)
        if self._checksums is not None and kind is CopyKind.OUT:
            for copy, checksum in zip(run, _checksums_of(moved, dim), strict=True):
                self._checksums[group, copy.target] = checksum
        elif self._checksums is not None and kind is CopyKind.IN:
            for copy, checksum in zip(run, _checksums_of(moved, dim), strict=True):
                if self._checksums.get((group, copy.source)) != checksum:
                    raise CorruptUnits(f"host unit {copy.source} of group {group} does not match its checksum")
        target.index_copy_(dim, send(targets, target.device), moved)

    def _host_of(self, group: int) -> Tensor:
        if group not in self._host:
            spec = self.specs[group]
            shape = unit_shape(spec, self._num_host_units[group])
            self._host[group] = torch.zeros(shape, dtype=_dtype(spec), pin_memory=self._pin)
        return self._host[group]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU as memory the system zeroes when it is first touched: clearing gigabytes now would take a second. Mapped
    by ourselves, in small pages: NumPy asks for huge ones, and a first token, which touches one in every layer's plane,
    then waits for hundreds of megabytes to be cleared."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes can't be mapped: {error}") from error
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes).view(dtype).view(shape)


def _checksums_of(moved: Tensor, dim: int) -> list[int]:
    """One for each unit; units are counted along `dim`."""
    return [crc32(unit.contiguous().view(torch.uint8).numpy().data) for unit in moved.cpu().unbind(dim)]


def unit_shape(spec: CacheSpec, num_units: int) -> tuple[int, ...]:
    if spec.kind == "paged":
        return (len(spec.layers), spec.planes, num_units, spec.page_tokens, *spec.shape)
    return (len(spec.layers), num_units, *spec.shape)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Torch moves 8-bit floats about only as plain bytes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _dtype(spec: CacheSpec) -> torch.dtype:
    return getattr(torch, spec.dtype)
