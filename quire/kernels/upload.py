"""Copies between host and device: many small arrays to the device in one transfer, and large tensors back.

The runtime and the sampler pack a step's inputs with `upload`; the cache store moves units with `send` and `HostCopy`.
On CUDA copies start from pinned memory and return at once. Torch's pinned allocator does not reuse a buffer before the
copy that reads it is done, so no copy in flight sees changed data.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

Arrays = dict[str, np.ndarray]

ALIGN = 16  # bytes; Triton recompiles a kernel for pointers with another alignment

_TORCH_TYPES: dict[type, torch.dtype] = {
    np.int32: torch.int32,
    np.int64: torch.int64,
    np.float32: torch.float32,
    np.float64: torch.float64,
}


def upload(parts: dict[str, Arrays], device: torch.device) -> dict[str, dict[str, Tensor]]:
    """Returns device tensors with the contents of these arrays, under the same names.

    On a CPU the tensors share memory with the arrays, so the caller must not reuse the arrays."""
    if device.type == "cpu":
        return {name: {key: torch.from_numpy(array) for key, array in part.items()} for name, part in parts.items()}
    if device.type == "mps":
        parts = {name: {key: _narrow(array) for key, array in part.items()} for name, part in parts.items()}
    arrays = [np.ascontiguousarray(array) for part in parts.values() for array in part.values()]
    starts = np.cumsum([0, *((array.nbytes + ALIGN - 1) // ALIGN * ALIGN for array in arrays)]).tolist()
    packed = torch.empty(starts[-1], dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    buffer = packed.numpy()
    for start, array in zip(starts, arrays, strict=False):
        buffer[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    packed = packed.to(device, non_blocking=device.type == "cuda")
    views = (_view(packed, start, array) for start, array in zip(starts, arrays, strict=False))
    return {name: {key: next(views) for key in part} for name, part in parts.items()}


def send(host: Tensor, device: torch.device) -> Tensor:
    """Copies one tensor to the device; on CUDA without waiting. The caller must not change `host` afterwards."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class HostCopy:
    """An asynchronous copy of one tensor to the host.

    On CUDA the copy goes to pinned memory of its own and is ordered in the current stream, so later work in that stream
    may overwrite the tensor. On a CPU nothing is copied and the caller must not change the tensor afterwards."""

    def __init__(self, tensor: Tensor):
        self.num_bytes = tensor.nbytes
        self._copied: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        elif tensor.device.type == "mps":
            self._host = tensor.cpu()

    def is_done(self) -> bool:
        return self._copied is None or self._copied.query()

    def wait(self) -> Tensor:
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        return self._host


class UploadBuffer:
    """A fixed device buffer that receives arrays of the same names and shapes repeatedly, in one copy each time.

    Captured CUDA graphs read their inputs from it. Copies are ordered in the stream, so a step that still reads the
    buffer sees the old contents."""

    def __init__(self, arrays: Arrays, device: torch.device):
        sizes = [-(-array.nbytes // ALIGN) * ALIGN for array in arrays.values()]
        self._starts = np.cumsum([0, *sizes]).tolist()
        self._packed = torch.zeros(self._starts[-1], dtype=torch.uint8, device=device)
        places = zip(self._starts, arrays.items(), strict=False)
        self.views = {name: _view(self._packed, start, array) for start, (name, array) in places}
        self.send(arrays)

    def send(self, arrays: Arrays) -> None:
        pin = self._packed.is_cuda
        host = torch.empty(self._starts[-1], dtype=torch.uint8, device="cpu", pin_memory=pin)
        buffer = host.numpy()
        for start, array in zip(self._starts, arrays.values(), strict=False):
            buffer[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        self._packed.copy_(host, non_blocking=True)


def _narrow(array: np.ndarray) -> np.ndarray:
    """Returns float64 as float32, for devices that do not have it."""
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _view(packed: Tensor, start: int, array: np.ndarray) -> Tensor:
    return packed[start : start + array.nbytes].view(_TORCH_TYPES[array.dtype.type]).view(array.shape)
