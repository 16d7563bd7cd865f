"""Many small host arrays to the device in one copy, and large ones back. The runtime and the sampler pack what a step
needs with it; the cache's store moves units.

On CUDA the copy leaves from pinned memory and returns at once; torch's pinned allocator does not hand a buffer out
again before the copy that reads it is done, so nothing in flight is ever rewritten.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

Arrays = dict[str, np.ndarray]

ALIGN = 16  # bytes; Triton compiles a kernel anew for pointers that are aligned differently

_TORCH_TYPES: dict[type, torch.dtype] = {
    np.int32: torch.int32,
    np.int64: torch.int64,
    np.float32: torch.float32,
    np.float64: torch.float64,
}


def upload(parts: dict[str, Arrays], device: torch.device) -> dict[str, dict[str, Tensor]]:
    """The same arrays under the same names, on the device. On a CPU they are the arrays themselves: make them anew."""
    if device.type == "cpu":
        return {name: {key: torch.from_numpy(array) for key, array in part.items()} for name, part in parts.items()}
    arrays = [np.ascontiguousarray(array) for part in parts.values() for array in part.values()]
    starts = np.cumsum([0, *((array.nbytes + ALIGN - 1) // ALIGN * ALIGN for array in arrays)]).tolist()
    packed = torch.empty(starts[-1], dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    buffer = packed.numpy()
    for start, array in zip(starts, arrays, strict=False):
        buffer[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    packed = packed.to(device, non_blocking=True)
    views = (_view(packed, start, array) for start, array in zip(starts, arrays, strict=False))
    return {name: {key: next(views) for key in part} for name, part in parts.items()}


def send(host: Tensor, device: torch.device) -> Tensor:
    """One tensor that the caller does not touch again; on CUDA without waiting for the copy."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class Fetch:
    """One tensor on its way to the host; on CUDA to pinned memory of its own, and the host goes on at once. It leaves
    when its turn in the current stream comes: later work there may do with the tensor, and its memory, what it likes.
    On a CPU it is there already, and the caller does not touch it again."""

    def __init__(self, tensor: Tensor):
        self.num_bytes = tensor.nbytes
        self._copied: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def is_there(self) -> bool:
        return self._copied is None or self._copied.query()

    def wait(self) -> Tensor:
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        return self._host


class Landing:
    """A place on the device that arrays of the same names and shapes are sent to again and again, in one copy each:
    what a captured step reads. Copies take their turn in the stream, so a step that still reads it is not disturbed."""

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


def _view(packed: Tensor, start: int, array: np.ndarray) -> Tensor:
    return packed[start : start + array.nbytes].view(_TORCH_TYPES[array.dtype.type]).view(array.shape)
