"""FP8 and FP4 tensors and their scales, described almost fully by their tensors.

FP8: `X` with `X_scale_inv` or `X_scale`; one scale per matrix, per row, per group of a row's columns, or per block of
rows and columns as config.json says (DeepSeek V3, Kimi K2, MiniMax M2, and FP8 checkpoints of Qwen, Mistral, Red Hat
and NVIDIA). MXFP4: `X_blocks` and `X_scales` (gpt-oss), or `X_packed` and `X_scale`. NVFP4: bytes in `X` or `X_packed`,
FP8 scales per sixteen columns and one scale for all of them. Scales of activations and caches are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.files.safetensors import TensorEntry
from quire.kernels.formats.packed_ints import (
    BLOCK,
    dequantize_fp4,
    dequantize_fp8,
    dequantize_mxfp4,
    mxfp4_as_blocks,
    power_of_two,
)
from quire.models.packed.base import (
    FLOATS,
    Entries,
    Finder,
    Packed,
    StoredTensors,
    check_entry,
    check_filled,
)
from quire.models.weight_errors import bad_weights

MXFP4_BYTES = 16  # bytes of a block of 32 elements
FP8 = "F8_E4M3"
POWERS = ("F8_E8M0", "U8")  # scale dtypes that are exponents
FP8_SCALES = (*FLOATS, *POWERS)
NVFP4_GROUP = 16

Block = tuple[int, int]  # rows and columns that share a scale
ALL = 1 << 62


def find_floats(block: Block | None = None, has_fp8: bool = True) -> Finder:
    """Returns the finder of FP8 and FP4 tensors. `block`: block size of FP8 scales from config.json; None: their shape
    determines it.
    """

    def find(entries: Entries, _: Callable[[str], Tensor]) -> dict[str, Packed]:
        found: dict[str, Packed] = {}
        for name, entry in entries.items():
            if name.endswith("_blocks") and (packed := _stacked_mxfp4(name, entries)) is not None:
                found[name] = packed
            elif has_fp8 and entry.dtype == FP8 and len(entry.shape) in (2, 3) and not name.endswith("_scale"):
                found[name] = _fp8(name, entry, entries, block)
            elif has_fp8 and entry.dtype == "U8" and len(entry.shape) == 2:
                whole = name.removesuffix("_packed")
                if (four := _fp4(name, whole, entry, entries)) is not None:
                    found[whole] = four
        return found

    return find


# ---------------------------------------------------------------------------------------------------------------------
# Eight bits


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """FP8 elements with a scale per block of rows and columns."""

    shape: tuple[int, ...]
    uses: tuple[str, str]  # the tensor and its scales
    block: Block
    kind: str = "FP8"

    def decode(self, stored: StoredTensors, first: int, count: int) -> Tensor:
        rows = stored.rows(self.uses[0], first, count)
        return dequantize_fp8(rows, self._scales(stored, first, count), first % self.block[0], block=self.block)

    def _scales(self, stored: StoredTensors, first: int, count: int) -> Tensor:
        rows = self.block[0]
        if rows == ALL:  # one scale per matrix, whatever the dimensions of the scale tensor
            return stored.whole(self.uses[1]).reshape(-1, 1, 1)[stored.entry or 0]
        start = first // rows
        scales = stored.rows(self.uses[1], start, (first + count - 1) // rows + 1 - start)
        scales = scales.view(len(scales), -1)
        return power_of_two(scales) if scales.dtype == torch.uint8 else scales

    def blocks(self, stored: StoredTensors) -> None:
        return None


def _fp8(name: str, entry: TensorEntry, entries: Entries, block: Block | None) -> Fp8Matrix:
    named = next((f"{name}{end}" for end in ("_scale_inv", "_scale") if f"{name}{end}" in entries), None)
    if named is None:
        raise bad_weights(f"{name} is in FP8, but there is neither {name}_scale_inv nor _scale")
    scales = entries[named]
    check_filled(name, entry)
    *outer, rows, columns = entry.shape
    wanted = () if block is None else (*outer, -(-rows // block[0]), -(-columns // block[1]))
    found = block if block is not None and scales.shape == wanted else _block_of(entry.shape, scales.shape)
    if found is None or scales.dtype not in FP8_SCALES:
        size = "one scale for each matrix or row" if block is None else f"scales for blocks of {block[0]} x {block[1]}"
        what = f"{named} is {scales.dtype} {list(scales.shape)}, where {list(entry.shape)} with {size}"
        raise bad_weights(f"{what} needs {' or '.join(FP8_SCALES)}{f' {list(wanted)}' if wanted else ''}")
    kind = "MXFP8" if scales.dtype in POWERS and found == (1, BLOCK) else "FP8"
    return Fp8Matrix(entry.shape, (name, named), (min(found[0], ALL), min(found[1], ALL)), kind)


def _block_of(shape: tuple[int, ...], scales: tuple[int, ...]) -> Block | None:
    """Returns the block size that scales of this shape imply; None if they do not fit."""
    *outer, rows, columns = shape
    while scales and scales[-1] == 1 and len(scales) > len(outer):  # trailing dimensions of size 1 are optional
        scales = scales[:-1]
    if scales == tuple(outer):
        return ALL, ALL
    if scales == (*outer, rows):
        return 1, ALL
    if scales[:-1] == (*outer, rows) and scales[-1] and columns % scales[-1] == 0:
        return 1, columns // scales[-1]
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Four bits


@dataclass(frozen=True, slots=True)
class Fp4Matrix:
    """Two FP4 elements per byte, a scale per group of columns, and in NVFP4 one more scale for the whole matrix."""

    shape: tuple[int, ...]
    uses: tuple[str, ...]  # the data, its scales and, in NVFP4, the scale of the whole matrix
    kind: str  # NVFP4 or MXFP4
    divides: bool = False  # the scale of the whole matrix is a divisor

    def decode(self, stored: StoredTensors, first: int, count: int) -> Tensor:
        data, scales = (stored.rows(name, first, count) for name in self.uses[:2])
        if self.kind == "MXFP4":
            return dequantize_fp4(data, power_of_two(scales.view(torch.uint8)))
        overall = stored.whole(self.uses[2]).float().reshape(1, 1)
        return dequantize_fp4(data, scales.float() / overall if self.divides else scales.float() * overall)

    def blocks(self, stored: StoredTensors) -> tuple[str, Tensor] | None:
        if self.kind != "MXFP4":
            return None
        data, scales = (stored.rows(name, 0, self.shape[0]) for name in self.uses[:2])
        return "MXFP4", mxfp4_as_blocks(data, scales)


def _fp4(name: str, whole: str, entry: TensorEntry, entries: Entries) -> Fp4Matrix | None:
    """Describes an FP4 matrix; None if the tensor is not one."""
    scales = entries.get(f"{whole}_scale")
    check_filled(name, entry)
    rows, columns = entry.shape[0], 2 * entry.shape[1]
    overall = next((f"{whole}{end}" for end in ("_global_scale", "_scale_2") if f"{whole}{end}" in entries), None)
    if scales is None or (overall is None and name == whole):
        return None
    group = BLOCK if overall is None else NVFP4_GROUP
    if columns % group:
        raise bad_weights(f"{name} is U8 {list(entry.shape)}, whose {columns} columns do not make groups of {group}")
    if overall is None:
        check_entry(entries, f"{whole}_scale", POWERS, (rows, columns // group))
        return Fp4Matrix((rows, columns), (name, f"{whole}_scale"), "MXFP4")
    check_entry(entries, f"{whole}_scale", (FP8,), (rows, columns // group))
    check_entry(entries, overall, FLOATS, (), (1,))
    uses = (name, f"{whole}_scale", overall)
    return Fp4Matrix((rows, columns), uses, "NVFP4", divides=overall.endswith("_global_scale"))


@dataclass(frozen=True, slots=True)
class Mxfp4Stack:
    """A stack of gpt-oss' MXFP4 matrices, [entries, rows, blocks, bytes of a block], read one entry at a time."""

    shape: tuple[int, ...]
    uses: tuple[str, str]
    kind: str = "MXFP4"

    def decode(self, stored: StoredTensors, first: int, count: int) -> Tensor:
        data, scales = (stored.rows(name, first, count) for name in self.uses)
        return dequantize_mxfp4(data, scales)

    def blocks(self, stored: StoredTensors) -> tuple[str, Tensor]:
        data, scales = (stored.rows(name, 0, self.shape[-2]) for name in self.uses)
        return "MXFP4", mxfp4_as_blocks(data.flatten(1), scales)


def _stacked_mxfp4(name: str, entries: Entries) -> Mxfp4Stack | None:
    scales = name.removesuffix("_blocks") + "_scales"
    data, of_scales = entries[name], entries.get(scales)
    if of_scales is None or not data.dtype == of_scales.dtype == "U8":
        return None
    if data.shape != (*of_scales.shape, MXFP4_BYTES):
        return None
    check_filled(name, data)
    *outer, num_blocks, num_bytes = data.shape
    return Mxfp4Stack((*outer, 2 * num_blocks * num_bytes), (name, scales))
