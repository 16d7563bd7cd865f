"""Validates safetensors files before a library maps them, and lists the weight files of a model folder.

A truncated or inconsistent header is a `bad_safetensors` error that names the file. The model loader calls
`list_shards` and `check_safetensors`; `hub` calls `choose_shards` with the names in a listing.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from quire.types import QuireError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_INDEX_BYTES = 64 << 20
MAX_DIMS = 16

BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
}
_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.safetensors")


class TensorEntry(NamedTuple):
    """One tensor of a header."""

    dtype: str  # the format's name: "F32", "BF16", ...
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    end: int  # exclusive


def check_safetensors(path: str | os.PathLike[str]) -> dict[str, TensorEntry]:
    """Reads and checks the header. The tensors must fill the rest of the file without gap or overlap."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header_len = _header_len(path, file.read(8), size)
            header = _parse_header(path, file.read(header_len))
    except OSError as error:
        _fail(path, f"it cannot be read ({error.strerror})")
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        _fail(path, "its __metadata__ is not a map of strings")
    data_start = 8 + header_len
    entries = {name: _check_entry(path, name, entry, data_start) for name, entry in header.items()}
    _check_cover(path, entries, data_start, size)
    return entries


def _fail(path: Path, reason: str) -> NoReturn:
    reason = reason if len(reason) < 400 else reason[:400] + "…"
    raise QuireError("bad_safetensors", f"{path} is not a usable safetensors file: {reason}.", "Fetch it again.")


def _header_len(path: Path, head: bytes, size: int) -> int:
    if len(head) < 8:
        _fail(path, f"it has only {size} bytes")
    header_len = int.from_bytes(head, "little")
    if header_len > MAX_HEADER_BYTES:
        _fail(path, f"its header claims {header_len} bytes, more than the format allows")
    if 8 + header_len > size:
        _fail(path, f"its header claims {header_len} bytes, but the file has only {size}")
    return header_len


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            raise ValueError("a name appears twice")
        return entries

    try:
        header = json.loads(raw, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        _fail(path, f"its header is not valid JSON ({error})")
    if not isinstance(header, dict):
        _fail(path, "its header is not a JSON object")
    return header


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _check_entry(path: Path, name: str, entry: Any, data_start: int) -> TensorEntry:
    if not isinstance(entry, dict):
        _fail(path, f"the entry of tensor {name!r} is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        _fail(path, f"tensor {name!r} has the unknown type {dtype!r}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_count, shape)):
        _fail(path, f"tensor {name!r} has the shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        _fail(path, f"tensor {name!r} has the offsets {offsets!r}")
    start, end = offsets
    num_bits = math.prod(shape) * BITS[dtype]
    if num_bits % 8 or end - start != num_bits // 8:
        _fail(path, f"tensor {name!r} of {dtype} {shape} takes {num_bits / 8:g} bytes but lies at {start} to {end}")
    return TensorEntry(dtype, tuple(shape), data_start + start, data_start + end)


def _check_cover(path: Path, entries: dict[str, TensorEntry], data_start: int, size: int) -> None:
    position, previous = data_start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start < position:
            _fail(path, f"tensor {name!r} overlaps {previous}")
        if entry.start > position:
            _fail(path, f"{entry.start - position} bytes before tensor {name!r} belong to none")
        position, previous = entry.end, repr(name)
    if position > size:
        _fail(path, f"its tensors end at byte {position}, but the file has only {size} (a broken download?)")
    if position < size:
        _fail(path, f"{size - position} bytes after the last tensor belong to none")


# ---------------------------------------------------------------------------------------------------------------------
# Weight files of a folder


def list_shards(folder: str | os.PathLike[str]) -> list[Path]:
    """Returns the weight files of a model folder, in order, or an empty list. A missing shard is an error."""
    folder = Path(folder)
    if (folder / INDEX_NAME).is_file():
        names = read_index(folder / INDEX_NAME)
    else:
        names = choose_shards(path.name for path in folder.glob("*.safetensors"))
    for name in names:
        if not (folder / name).is_file():
            what = f"{folder} lacks its weight file {name}."
            raise QuireError("missing_shard", what, "Copy it in, or fetch the model again.")
    return [folder / name for name in names]


def read_index(path: Path) -> list[str]:
    """Returns the distinct shard names of an index file, sorted. A name that leaves the folder is an error."""
    if path.stat().st_size > MAX_INDEX_BYTES:
        _fail_index(path, "it is too large")
    try:
        index = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        _fail_index(path, f"it is not valid JSON ({error})")
    except OSError as error:
        _fail_index(path, f"it cannot be read ({error.strerror})")
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        _fail_index(path, "it has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or not name.endswith(".safetensors") or re.search(r"[/\\:\0]|\.\.", name):
            _fail_index(path, f"it names the file {name!r:.200}, which is not a plain .safetensors name")
    return sorted(set(weight_map.values()))


def _fail_index(path: Path, reason: str) -> NoReturn:
    raise QuireError("bad_safetensors", f"{path} is not a usable weight index: {reason}.", "Fetch it again.")


def choose_shards(names: Iterable[str]) -> list[str]:
    """Returns the weight files of a folder without an index: the single file, a numbered set, or all of them."""
    known = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    if SINGLE_NAME in known:
        return [SINGLE_NAME]
    for match in filter(None, map(_SHARD_NAME.fullmatch, known)):
        stem, count = match["stem"], int(match["count"])
        return [f"{stem}-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]
    weights = [name for name in known if not name.startswith("adapter_")]
    return [name for name in weights if not name.startswith("consolidated.")] or weights
