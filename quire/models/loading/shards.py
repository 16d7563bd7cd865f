"""A checkpoint in one or more safetensors files. Files stay memory-mapped, and tensors are read one at a time. A packed
tensor and its scales appear as one tensor (`packed`), which is decoded a few rows at a time as it is read.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from quire.files.safetensors import check_safetensors
from quire.layers.weights import PartSource
from quire.models.loading.sources import IGNORED_TENSORS, READ_ELEMENTS
from quire.models.packed import Quantization, StoredTensors, find_floats
from quire.models.weight_errors import bad_weights
from quire.types import QuireError

CPU = torch.device("cpu")
FLOATS = ("F64", "F32", "F16", "BF16")
# Scales of activations and caches, which Quire does not quantize by the file's scales.
IGNORED_SCALES = (
    "activation_scale",
    "input_scale",
    "input_scale_ub",
    "input_global_scale",
    "input_zero_point",
    "output_scale",
    "q_scale",
    "k_scale",
    "v_scale",
)


class SafetensorsCheckpoint:
    """Tensors of all shards by name; packed tensors are decoded as they are read."""

    def __init__(self, shards: list[Path], where: str, quantized: Quantization | None = None):
        self.where = where
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.types: dict[str, str] = {}  # GGUF's type name, or the kind of a packed tensor
        self._shard_of: dict[str, Path] = {}
        self._open: tuple[Path, safe_open] | None = None
        entries = {}
        for shard in shards:
            for name, entry in check_safetensors(shard).items():
                if name in entries:
                    raise bad_weights(f"{where} holds {name} twice")
                entries[name] = entry
                self._shard_of[name] = shard
        find = find_floats(has_fp8=False) if quantized is None else quantized.find
        self._packed = find(entries, self._tensor)
        used = {name for packed in self._packed.values() for name in packed.uses}
        for name, packed in self._packed.items():
            self.shapes[name], self.types[name] = packed.shape, packed.kind
        for name, entry in entries.items():
            if name in used or (self._packed and name.rpartition(".")[2] in IGNORED_SCALES):
                continue
            if name in self._packed:
                raise bad_weights(f"{where} holds {name} both packed and unpacked")
            if entry.dtype not in FLOATS and not IGNORED_TENSORS.fullmatch(name):
                what = f"{where} holds {name} as {entry.dtype}, which is not supported."
                raise QuireError("unsupported_model", what, f"Supported types are {', '.join(FLOATS)}.")
            self.shapes[name], self.types[name] = entry.shape, entry.dtype

    def read(self, name: str, target: Tensor, index: int | None = None) -> None:
        packed = self._packed.get(name)
        if packed is None:
            file = self._file_of(name)
            target.copy_(file.get_tensor(name) if index is None else file.get_slice(name)[index])
        elif index is not None and len(packed.shape) == 2:
            target.copy_(self._decode(name, None, index, 1, target.device)[0])
        elif index is None and len(packed.shape) == 3:
            for entry in range(packed.shape[0]):
                self.read(name, target[entry], entry)
        else:
            num_rows, num_columns = packed.shape[-2:]
            step = max(1, READ_ELEMENTS // num_columns)
            for first in range(0, num_rows, step):
                target[first : first + step].copy_(self._decode(name, index, first, step, target.device))

    def source(self, name: str, index: int | None = None) -> PartSource:
        shape, packed = self.shapes[name], self._packed.get(name)
        if packed is None:
            found = self._file_of(name).get_slice(name)
            if index is None:
                return PartSource(shape, lambda first, count: found[first : first + count])
            return PartSource(shape[1:], lambda first, count: found[index, first : first + count])
        if len(shape) == 3 and index is None:
            return PartSource(shape, lambda first, count: self._entries(name, range(first, first + count)))
        type_name, blocks = packed.blocks(StoredTensors(self._file_of, index, CPU)) or (packed.kind, None)
        return PartSource(
            shape[-2:], lambda first, count: self._decode(name, index, first, count, CPU), type_name, blocks
        )

    def _entries(self, name: str, entries: range) -> Tensor:
        rows = self.shapes[name][1]
        return torch.stack([self._decode(name, entry, 0, rows, CPU) for entry in entries])

    def _decode(self, name: str, entry: int | None, first: int, count: int, device: torch.device) -> Tensor:
        """Returns rows of a packed matrix, or of one entry of a stack of them, in float32."""
        packed = self._packed[name]
        return packed.decode(StoredTensors(self._file_of, entry, device), first, min(count, packed.shape[-2] - first))

    def _tensor(self, name: str) -> Tensor:
        return self._file_of(name).get_tensor(name)

    def _file_of(self, name: str) -> safe_open:
        shard = self._shard_of[name]
        if self._open is None or self._open[0] != shard:
            self._open = (shard, safe_open(shard, framework="pt"))
        return self._open[1]
