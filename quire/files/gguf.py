"""Reads the GGUF container (versions 2 and 3, little-endian) through a memory map, as untrusted input.

Every count, length, type and offset is checked against the file's size before use. A truncated or malicious file is a
`bad_gguf` error, never a crash or an unbounded allocation. The model loader and the tokenizer builder call `open_gguf`
and interpret the metadata.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from quire.files.ggml_types import GGMLType
from quire.files.gguf_parts import FETCH_AGAIN, first_part, list_parts
from quire.types import QuireError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
# Limits far above any real model, for malicious files whose size would allow more.
MAX_HEADER_BYTES = 1 << 30
MAX_STRING_BYTES = 1 << 26
MAX_ARRAY_ITEMS = 1 << 23  # all arrays of a file together
MAX_DIMS = 4

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {  # value type in the file -> binary format
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<B"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_TENSOR_TYPES = {int(member): member for member in GGMLType}
_MIN_METADATA_BYTES = 8 + 4 + 1  # key length, value type, smallest value
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # name length, number of dimensions, type, offset


@dataclass(frozen=True, slots=True, eq=False)
class GGUFTensor:
    """One tensor of an open file."""

    name: str
    shape: tuple[int, ...]  # torch order: the last dimension is contiguous
    type: GGMLType
    data: np.ndarray  # [bytes] uint8, a read-only view of the mapped file

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class GGUFFile:
    """An open file. The tensors' bytes are views of its memory map, which stays open as long as one of them exists."""

    path: Path  # of the first part, if it is split
    version: int
    metadata: dict[str, Any]  # bool, int, float, str, or a list of one of these
    tensors: dict[str, GGUFTensor]


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Maps the file; reads and checks its metadata and tensor table. The first part of a split file opens all parts."""
    try:
        found = os.stat(path)
    except OSError:
        return _GGUFReader(Path(path)).read()  # raises the right error
    return _open_once(Path(path), found.st_ino, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=1)
def _open_once(path: Path, *version: int) -> GGUFFile:
    """Reads a file once, although tokenizer and loader both open it: a vocabulary takes a third of a second."""
    file = _GGUFReader(path).read()
    return replace(file, tensors=_join_parts(file))


def _join_parts(first: GGUFFile) -> dict[str, GGUFTensor]:
    """Returns the tensors of all parts of a split file; those of `first` if it is whole."""
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return first.tensors
    paths = [first.path.with_name(name) for name in list_parts(first.path.name)]
    if len(paths) != count:
        what = f"{first.path} is one of {count} parts by its metadata and one of {len(paths)} by its name."
        raise QuireError("bad_gguf", what, FETCH_AGAIN)
    first_part(first.path)  # all parts exist
    tensors: dict[str, GGUFTensor] = {}
    for number, path in enumerate(paths):
        part = first if path == first.path else _GGUFReader(path).read()
        _check_place(part.metadata, path, number, count)
        twice = tensors.keys() & part.tensors.keys()
        if twice:
            raise QuireError("bad_gguf", f"{path} repeats the tensor {min(twice)} of an earlier part.", FETCH_AGAIN)
        tensors |= part.tensors
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        what = f"The {count} parts of {first.path} have {len(tensors)} tensors, and its metadata says {total}."
        raise QuireError("bad_gguf", what, FETCH_AGAIN)
    return tensors


def _check_place(metadata: dict[str, Any], path: Path, number: int, count: int) -> None:
    found = metadata.get("split.no"), metadata.get("split.count")
    if found != (number, count):
        place = f"part {found[0] + 1} of {found[1]}" if isinstance(found[0], int) else "not a part"
        what = f"{path} is {place} by its metadata and part {number + 1} of {count} by its name."
        raise QuireError("bad_gguf", what, FETCH_AGAIN)


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    """One entry of the tensor table, before the check of its offset."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int  # from the start of the data section

    @property
    def num_bytes(self) -> int:
        return self.type.num_bytes(math.prod(self.shape))

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


class _GGUFReader:
    """A cursor over the mapped header. `_take` checks that bytes exist before it moves the cursor."""

    def __init__(self, path: Path):
        self.path = path
        self.map = _map_file(path, self._fail)
        self.size = len(self.map)
        self.position = 0
        self.items_left = MAX_ARRAY_ITEMS

    def _fail(self, reason: str) -> NoReturn:
        reason = reason if len(reason) < 400 else reason[:400] + "…"  # a name in the file may have megabytes
        raise QuireError("bad_gguf", f"{self.path} is not a usable GGUF file: {reason}.", "Fetch or convert it again.")

    # -- sections of the file, in order

    def read(self) -> GGUFFile:
        version, num_tensors, num_metadata = self._read_head()
        metadata = self._read_metadata(num_metadata)
        infos = self._read_tensor_table(num_tensors)
        data_start = self._data_start(metadata, infos)
        return GGUFFile(self.path, version, metadata, self._place_tensors(infos, data_start))

    def _read_head(self) -> tuple[int, int, int]:
        if self.map[:4] != MAGIC:
            self._fail(f"it begins with {self.map[:4]!r}, not with {MAGIC!r}")
        self.position = 4
        version = self._number(_U32, "the version")
        if version not in (2, 3):
            if version & 0xFFFF == 0:
                self._fail("it is big-endian, and only little-endian files are read")
            self._fail(f"its version is {version}, and only 2 and 3 are read")
        num_tensors = self._number(_U64, "the tensor count")
        num_metadata = self._number(_U64, "the metadata count")
        self._check_count("metadata entries", num_metadata, _MIN_METADATA_BYTES)
        self._check_count("tensors", num_tensors, _MIN_TENSOR_BYTES)
        return version, num_tensors, num_metadata

    def _read_metadata(self, num_metadata: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(num_metadata):
            key = self._string(f"the key of metadata entry {index}")
            if key in metadata:
                self._fail(f"metadata key {key!r} appears twice")
            value_type = self._number(_U32, f"the type of {key!r}")
            metadata[key] = self._value(value_type, key)
        return metadata

    def _value(self, value_type: int, key: str) -> Any:
        if value_type == _STRING:
            return self._string(f"the value of {key!r}")
        if value_type == _ARRAY:
            return self._array(key)
        packed = _NUMBERS.get(value_type)
        if packed is None:
            self._fail(f"{key!r} has the unknown value type {value_type}")
        number = self._number(packed, f"the value of {key!r}")
        if value_type != _BOOL:
            return number
        if number > 1:
            self._fail(f"{key!r} is a bool with the value {number}")
        return bool(number)

    def _array(self, key: str) -> list[Any]:
        item_type = self._number(_U32, f"the item type of {key!r}")
        num_items = self._number(_U64, f"the length of {key!r}")
        if item_type == _ARRAY:
            self._fail(f"{key!r} is an array of arrays, which no model uses")
        packed = _NUMBERS.get(item_type)
        if packed is None and item_type != _STRING:
            self._fail(f"the items of {key!r} have the unknown value type {item_type}")
        self._check_count(f"items in {key!r}", num_items, packed.size if packed else 8)
        if num_items > self.items_left:
            self._fail(f"its arrays hold more than {MAX_ARRAY_ITEMS} items ({key!r} alone claims {num_items})")
        self.items_left -= num_items
        if packed is None:
            return self._string_array(key, num_items)
        start = self._take(num_items * packed.size, f"the items of {key!r}")
        items = np.frombuffer(self.map, np.dtype(packed.format), num_items, start)
        if item_type == _BOOL:
            if num_items and items.max() > 1:
                self._fail(f"{key!r} is an array of bools with the value {items.max()}")
            items = items.astype(bool)
        values: list[Any] = items.tolist()
        return values

    def _string_array(self, key: str, num_items: int) -> list[str]:
        # A vocabulary has hundreds of thousands of strings, so the loop uses locals and one comparison per string.
        items: list[str] = []
        buffer, unpack, position = self.map, _U64.unpack_from, self.position
        limit = min(self.size, MAX_HEADER_BYTES)
        try:
            for _ in range(num_items):
                start = position + 8
                position = start + unpack(buffer, position)[0]
                if position > limit:
                    self._fail(f"item {len(items)} of {key!r} runs past the end of the {self._end_word(position)}")
                items.append(buffer[start:position].decode())
        except struct.error:
            self._fail(f"it ends inside {key!r}, after {len(items)} of {num_items} items")
        except UnicodeDecodeError:
            self._fail(f"item {len(items)} of {key!r} is not UTF-8 text")
        self.position = position
        return items

    def _read_tensor_table(self, num_tensors: int) -> list[_TensorInfo]:
        self._check_count("tensors", num_tensors, _MIN_TENSOR_BYTES)  # again, for the bytes left after the metadata
        infos: list[_TensorInfo] = []
        names: set[str] = set()
        for index in range(num_tensors):
            info = self._tensor_info(index)
            if info.name in names:
                self._fail(f"tensor {info.name!r} appears twice")
            names.add(info.name)
            infos.append(info)
        return infos

    def _tensor_info(self, index: int) -> _TensorInfo:
        name = self._string(f"the name of tensor {index}")
        num_dims = self._number(_U32, f"the dimensions of {name!r}")
        if num_dims > MAX_DIMS:
            self._fail(f"tensor {name!r} claims {num_dims} dimensions, more than {MAX_DIMS}")
        dims = [self._number(_U64, f"the shape of {name!r}") for _ in range(num_dims)]
        type_number = self._number(_U32, f"the type of {name!r}")
        ggml_type = _TENSOR_TYPES.get(type_number)
        if ggml_type is None:
            self._fail(f"tensor {name!r} has the unknown type {type_number}")
        if 0 in dims:
            self._fail(f"tensor {name!r} has an empty dimension in {dims}")
        if (dims[0] if dims else 1) % ggml_type.block_size:
            self._fail(f"a row of tensor {name!r} {dims} is no multiple of {ggml_type.name}'s {ggml_type.block_size}")
        offset = self._number(_U64, f"the offset of {name!r}")
        return _TensorInfo(name, tuple(reversed(dims)), ggml_type, offset)

    def _data_start(self, metadata: dict[str, Any], infos: list[_TensorInfo]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            self._fail(f"its alignment is {alignment!r}, not a power of two")
        for info in infos:
            if info.offset % alignment:
                self._fail(f"tensor {info.name!r} begins at {info.offset}, no multiple of the alignment {alignment}")
        return (self.position + alignment - 1) // alignment * alignment

    def _place_tensors(self, infos: list[_TensorInfo], data_start: int) -> dict[str, GGUFTensor]:
        previous: _TensorInfo | None = None
        for info in sorted(infos, key=lambda info: info.offset):
            if data_start + info.end > self.size:
                self._fail(f"tensor {info.name!r} ends at byte {data_start + info.end} of a file of {self.size}")
            if previous is not None and info.offset < previous.end:
                self._fail(f"tensors {previous.name!r} and {info.name!r} overlap")
            previous = info
        file_bytes = np.frombuffer(self.map, np.uint8)
        tensors = {}
        for info in infos:  # in the order of the file
            data = file_bytes[data_start + info.offset : data_start + info.end]
            tensors[info.name] = GGUFTensor(info.name, info.shape, info.type, data)
        return tensors

    # -- single values

    def _take(self, num_bytes: int, what: str) -> int:
        """Checks that `num_bytes` exist, moves past them and returns their start."""
        start = self.position
        if start + num_bytes > min(self.size, MAX_HEADER_BYTES):
            self._fail(f"{what} runs past the end of the {self._end_word(start + num_bytes)}")
        self.position = start + num_bytes
        return start

    def _number(self, packed: struct.Struct, what: str) -> Any:
        return packed.unpack_from(self.map, self._take(packed.size, what))[0]

    def _string(self, what: str) -> str:
        length = self._number(_U64, f"the length of {what}")
        if length > MAX_STRING_BYTES:
            self._fail(f"{what} claims {length} bytes")
        start = self._take(length, what)
        try:
            return self.map[start : self.position].decode()
        except UnicodeDecodeError:
            self._fail(f"{what} is not UTF-8 text")

    def _check_count(self, what: str, count: int, min_bytes: int) -> None:
        bytes_left = self.size - self.position
        if count * min_bytes > bytes_left:
            self._fail(f"it claims {count} {what}, which cannot fit into the {bytes_left} bytes left")

    def _end_word(self, wanted: int) -> str:
        return "file" if wanted > self.size else f"header (limited to {MAX_HEADER_BYTES} bytes)"


def _map_file(path: Path, fail: Callable[[str], NoReturn]) -> mmap.mmap:
    try:
        # Non-blocking, so that opening a pipe by mistake is an error and does not wait.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        fail(f"it cannot be opened ({error.strerror})")
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            fail("it is not a plain file")
        if status.st_size < 24:
            fail(f"it has {status.st_size} bytes, less than the smallest header")
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        fail(f"it cannot be mapped ({error})")
    finally:
        os.close(descriptor)
