"""A checkpoint in any number of safetensors files. They stay mapped, tensors are read one at a time. What is packed
beside its scales looks like one tensor (`packed_tensors`), and is decoded as it is read, a few rows at a time.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from quire.files.safetensors import check_safetensors
from quire.layers.weights import PartSource
from quire.models.packed_tensors import Block, find_packed, is_useless
from quire.models.sources import NEEDLESS, READ_ELEMENTS, bad_weights
from quire.types import QuireError

CPU = torch.device("cpu")
FLOATS = ("F64", "F32", "F16", "BF16")


class SafetensorsCheckpoint:
    def __init__(self, shards: list[Path], where: str, fp8_block: Block | None = None):
        self.where = where
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._shard_of: dict[str, Path] = {}
        self._open: tuple[Path, safe_open] | None = None
        entries = {}
        for shard in shards:
            for name, entry in check_safetensors(shard).items():
                if name in entries:
                    raise bad_weights(f"{where} holds {name} twice")
                entries[name] = entry
                self._shard_of[name] = shard
        self._packed = find_packed(entries, fp8_block)
        scales = {packed.scales for packed in self._packed.values()}
        for name, entry in entries.items():
            if name in self._packed:
                self.shapes[name] = self._packed[name].shape
            elif name not in scales and not is_useless(name, self._packed):
                if entry.dtype not in FLOATS and not NEEDLESS.fullmatch(name):
                    what = f"{where} holds {name} as {entry.dtype}, which is not supported."
                    raise QuireError("unsupported_model", what, f"Supported types are {', '.join(FLOATS)}.")
                self.shapes[name] = entry.shape

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

    def source(self, name: str) -> PartSource:
        def read(first: int, count: int) -> Tensor:
            return self._slice(name, None, slice(first, first + count))

        def decode(first: int, count: int) -> Tensor:
            return self._decode(name, None, first, count, CPU)

        def decode_entries(first: int, count: int) -> Tensor:
            entries = range(first, first + count)
            return torch.stack([self._decode(name, entry, 0, shape[1], CPU) for entry in entries])

        shape = self.shapes[name]
        if name in self._packed:
            return PartSource(shape, decode if len(shape) == 2 else decode_entries)
        return PartSource(shape, read)

    def _decode(self, name: str, entry: int | None, first: int, count: int, device: torch.device) -> Tensor:
        """Rows of a packed matrix, or of an entry of several, in float32."""
        packed = self._packed[name]
        count = min(count, packed.shape[-2] - first)
        rows = self._slice(name, entry, slice(first, first + count)).to(device)
        of_rows = slice(first // packed.rows, (first + count - 1) // packed.rows + 1)
        if packed.is_scaled_whole:
            scales = self._file_of(packed.scales).get_tensor(packed.scales).reshape(-1, 1, 1)[entry or 0]
        else:
            scales = self._slice(packed.scales, entry, of_rows)
        return packed.decode(rows, scales.to(device), first % packed.rows)

    def _slice(self, name: str, entry: int | None, rows: slice) -> Tensor:
        found = self._file_of(name).get_slice(name)
        return found[rows] if entry is None else found[entry, rows]

    def _file_of(self, name: str) -> safe_open:
        shard = self._shard_of[name]
        if self._open is None or self._open[0] != shard:
            self._open = (shard, safe_open(shard, framework="pt"))
        return self._open[1]
