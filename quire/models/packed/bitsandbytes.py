"""bitsandbytes: four-bit indices into a table of sixteen values (NF4, FP4) with a scale per run of elements, where
scales may be eight-bit table indices themselves; or eight bits with a scale per row (LLM.int8).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.formats.packed_ints import Grouped, dequantize_table
from quire.models.packed.base import (
    Entries,
    Finder,
    GroupedMatrix,
    Packed,
    StoredTensors,
    check_entry,
    grouped_kind,
    unsupported,
)
from quire.models.weight_errors import bad_weights

STATE = ".quant_state.bitsandbytes__"
MAX_STATE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class TableMatrix:
    """A four-bit matrix whose elements are indices into a table of values."""

    shape: tuple[int, ...]
    weight: str
    kind: str  # NF4, FP4
    run: int  # elements that share a scale; runs cross row boundaries
    run_of_scales: int  # scales that share a second-level scale; 0: scales are floats
    offset: float  # added to decoded scales
    uses: tuple[str, ...]

    def decode(self, stored: StoredTensors, first: int, count: int) -> Tensor:
        columns, run = self.shape[1], self.run
        start, stop = first * columns, (first + count) * columns
        first_run, last_run = start // run, -(-stop // run)
        data = stored.rows(self.weight, first_run * run // 2, (last_run - first_run) * run // 2).flatten()
        data = functional.pad(data, (0, (last_run - first_run) * run // 2 - len(data)))  # the last run may be short
        table = stored.whole(f"{self.weight}.quant_map")
        numbers = dequantize_table(data, table, self._scales(stored, first_run, last_run))
        return numbers[start - first_run * run : stop - first_run * run].view(count, columns)

    def _scales(self, stored: StoredTensors, first: int, last: int) -> Tensor:
        scales = stored.whole(f"{self.weight}.absmax").flatten()[first:last]
        if not self.run_of_scales:
            return scales.float()
        table = stored.whole(f"{self.weight}.nested_quant_map").float()
        of_scales = stored.whole(f"{self.weight}.nested_absmax").float()
        share = torch.arange(first, last, device=stored.device) // self.run_of_scales
        return table[scales.int()] * of_scales[share] + self.offset

    def blocks(self, stored: StoredTensors) -> None:
        return None


def find_bitsandbytes(config: Mapping[str, Any]) -> Finder:
    def find(entries: Entries, read: Callable[[str], Tensor]) -> dict[str, Packed]:
        found: dict[str, Packed] = {}
        for name, entry in entries.items():
            weight, is_state, kind = name.partition(STATE)
            if is_state:
                found[weight] = _table(weight, kind, name, entries, read)
            elif name.endswith(".weight") and entry.dtype == "I8":
                found[name] = _rows(name, entries, read)
        return found

    return find


def _table(weight: str, kind: str, state: str, entries: Entries, read: Callable[[str], Tensor]) -> TableMatrix:
    declared = _read_state(state, entries, read)
    nested = f"{weight}.nested_absmax" in entries
    shape, run, run_of_scales, offset = _read_sizes(declared, nested) or ((0, 0), 0, 0, 0.0)
    if not run:
        raise bad_weights(f"{state} lacks a valid shape or block size of {weight}")
    rows, columns = shape
    num_scales = -(-rows * columns // run)
    check_entry(entries, weight, ("U8",), (-(-rows * columns // 2), 1))
    check_entry(entries, f"{weight}.quant_map", ("F32",), (16,))
    check_entry(entries, f"{weight}.absmax", ("U8",) if nested else ("F32",), (num_scales,))
    ends = ["quant_map", "absmax"]
    if nested:
        check_entry(entries, f"{weight}.nested_quant_map", ("F32",), (256,))
        check_entry(entries, f"{weight}.nested_absmax", ("F32",), (-(-num_scales // run_of_scales),))
        ends += ["nested_quant_map", "nested_absmax"]
    uses = (weight, state, *(f"{weight}.{end}" for end in ends))
    return TableMatrix((rows, columns), weight, kind.upper(), run, run_of_scales, offset, uses)


def _read_sizes(declared: Mapping[str, Any], nested: bool) -> tuple[tuple[int, int], int, int, float] | None:
    """Returns the shape, elements per scale, scales per second-level scale, and the scales' offset; None if they are
    invalid.
    """
    shape: Any = declared.get("shape")
    run: Any = declared.get("blocksize")
    shared, offset = declared.get("nested_blocksize", 256), declared.get("nested_offset", 0.0)
    if not isinstance(shape, list) or len(shape) != 2 or not isinstance(offset, int | float):
        return None
    if not all(type(size) is int and size > 0 for size in (*shape, run, shared)) or run % 2:
        return None
    return (shape[0], shape[1]), run, shared if nested else 0, float(offset)


def _read_state(name: str, entries: Entries, read: Callable[[str], Tensor]) -> dict[str, Any]:
    entry = check_entry(entries, name, ("U8",))
    declared = None
    if len(entry.shape) == 1 and entry.shape[0] <= MAX_STATE_BYTES:
        try:
            declared = json.loads(bytes(read(name).tolist()))
        except (ValueError, RecursionError):
            declared = None
    if not isinstance(declared, dict):
        raise bad_weights(f"{name} is not a JSON object")
    return declared


def _rows(name: str, entries: Entries, read: Callable[[str], Tensor]) -> GroupedMatrix:
    shape = check_entry(entries, name, ("I8",)).shape
    if len(shape) != 2:
        raise bad_weights(f"{name} is I8 {list(shape)}, which is not a matrix")
    rows, columns = shape
    scales, form = (f"{name.removesuffix('.weight')}.{end}" for end in ("SCB", "weight_format"))
    check_entry(entries, scales, ("F32",), (rows,))
    if form in entries and bool(read(form).any()):
        raise unsupported(f"{name} has a GPU-specific layout ({form} is not 0), which is not supported")

    def take(stored: StoredTensors, first: int, count: int) -> Grouped:
        numbers = stored.rows(name, first, count).view(torch.uint8) ^ 128
        return Grouped(numbers, stored.rows(scales, first, count).unsqueeze(1) / 127, 128, columns)

    uses = tuple(used for used in (name, scales, form) if used in entries)
    kind = grouped_kind("LLM.int8", 8, columns, columns, has_zeros=False)
    return GroupedMatrix((rows, columns), uses, kind, take)
