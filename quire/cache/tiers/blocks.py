"""The format of a stored block: the same whatever page size, number of ranks or device wrote it.

A block of a paged group is 16 tokens, one of a state group a whole snapshot. It is cut into parts of at most 2 MiB by
ranges of layers and, where one layer is larger, of heads; a block is complete when all its parts are there. A part is
one file:

    magic, 8 bytes | length of the header, 4 bytes | header, msgpack | body | CRC-32 of all before it, 4 bytes

The header says which model's weights, cache spec, prefix and part the body belongs to. A reader knows all of that
before it reads, so it compares the header with the one it expects, byte for byte: a damaged, cut, renamed or foreign
file is a miss.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from zlib import crc32

import msgspec

from quire.cache.chain import LINK_TOKENS
from quire.cache.memory import DTYPE_BYTES
from quire.types import CacheSpec

MAGIC = b"QuireKV\x01"  # the last byte is the format's version
MAX_PART = 2 << 20  # bytes of a body
MAX_HEADER = 4096
_LENGTH = struct.Struct("<I")


class CorruptBlock(Exception):
    """A file that is not the part of a block that was asked for."""


@dataclass(frozen=True, slots=True)
class BlockPart:
    """A range of layers and of heads, the first dimension of a spec's shape; both ends exclusive."""

    layers: tuple[int, int]
    heads: tuple[int, int]


class _Header(msgspec.Struct, array_like=True, frozen=True):
    weights: bytes  # digest of the model's weights
    kind: str
    group: str
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    planes: int
    tokens: int  # that a paged block covers; 0: a snapshot
    key: bytes  # of the prefix chain, which binds tokens, adapter and salt
    part_layers: tuple[int, int]
    part_heads: tuple[int, int]
    num_bytes: int


class BlockLayout:
    """How the blocks of one group are cut, named and framed."""

    def __init__(self, spec: CacheSpec, weights: bytes):
        self.spec = spec
        self._weights = weights
        self._tokens = LINK_TOKENS if spec.kind == "paged" else 0
        per_head = DTYPE_BYTES[spec.dtype] * spec.planes * self._tokens if self._tokens else DTYPE_BYTES[spec.dtype]
        for size in spec.shape[1:]:
            per_head *= size
        self._bytes_per_head = per_head
        self.parts = _cut(len(spec.layers), spec.shape[0], per_head)
        facts = (spec.kind, spec.group, spec.layers, spec.shape, spec.dtype, spec.planes, self._tokens)
        self._tag = blake2b(weights + msgspec.msgpack.encode(facts), digest_size=8).hexdigest()

    def num_bytes(self, part: BlockPart) -> int:
        """Return the bytes of a part's body."""
        return (part.layers[1] - part.layers[0]) * (part.heads[1] - part.heads[0]) * self._bytes_per_head

    @property
    def block_bytes(self) -> int:
        return sum(map(self.num_bytes, self.parts))

    def names(self, key: bytes) -> list[str]:
        """Return the file names of a block's parts."""
        return [f"{key.hex()}-{self._tag}-{index:03d}" for index in range(len(self.parts))]

    def encode(self, key: bytes, part: BlockPart, body: bytes) -> bytes:
        head = self._head(key, part)
        assert len(body) == self.num_bytes(part), "a part has another size than its layout says"
        return b"".join((head, body, _LENGTH.pack(crc32(body, crc32(head)))))

    def decode(self, key: bytes, part: BlockPart, data: bytes) -> memoryview:
        """Return the body of a part. Raises `CorruptBlock` if `data` is anything else."""
        head = self._head(key, part)
        if len(data) != self.file_bytes(part):
            raise CorruptBlock(f"it has {len(data)} bytes instead of {self.file_bytes(part)}")
        view = memoryview(data)
        if view[: len(head)] != head:
            raise CorruptBlock("its header is that of another block, model or format")
        if crc32(view[:-4]) != _LENGTH.unpack(view[-4:])[0]:
            raise CorruptBlock("its checksum is wrong")
        return view[len(head) : -4]

    def file_bytes(self, part: BlockPart) -> int:
        """Return the size of a part's file."""
        return len(self._head(b"\0" * 20, part)) + self.num_bytes(part) + 4

    def _head(self, key: bytes, part: BlockPart) -> bytes:
        spec = self.spec
        header = msgspec.msgpack.encode(
            _Header(
                self._weights,
                spec.kind,
                spec.group,
                spec.layers,
                spec.shape,
                spec.dtype,
                spec.planes,
                self._tokens,
                key,
                part.layers,
                part.heads,
                self.num_bytes(part),
            )
        )
        return MAGIC + _LENGTH.pack(len(header)) + header


def _cut(num_layers: int, num_heads: int, bytes_per_head: int) -> list[BlockPart]:
    """Return the parts of a block: as many layers each as fit, or ranges of one layer's heads."""
    per_layer = num_heads * bytes_per_head
    if per_layer <= MAX_PART:
        count = max(1, MAX_PART // per_layer)
        starts = range(0, num_layers, count)
        return [BlockPart((first, min(num_layers, first + count)), (0, num_heads)) for first in starts]
    count = max(1, MAX_PART // bytes_per_head)
    spans = [(first, min(num_heads, first + count)) for first in range(0, num_heads, count)]
    return [BlockPart((layer, layer + 1), span) for layer in range(num_layers) for span in spans]


def describe(data: bytes) -> dict[str, object]:
    """Return what the header of a part's file says. Raises `CorruptBlock` if the file is damaged.

    It needs no model: `quire cache` checks whole folders with it.
    """
    header = _read_header(data)
    return {"weights": header.weights.hex(), "group": header.group, "key": header.key.hex(), "bytes": header.num_bytes}


def describe_head(data: bytes) -> tuple[str, str]:
    """Return the digest of the weights and the group of a file that begins with `data`."""
    if data[: len(MAGIC)] != MAGIC or len(data) < len(MAGIC) + 4:
        raise CorruptBlock("it is no block of this version")
    (length,) = _LENGTH.unpack_from(data, len(MAGIC))
    try:
        header = msgspec.msgpack.decode(data[len(MAGIC) + 4 : len(MAGIC) + 4 + length], type=_Header)
    except msgspec.MsgspecError as error:
        raise CorruptBlock(f"its header can't be read: {error}") from None
    return header.weights.hex(), header.group


def name_of(data: bytes) -> str:
    """Return the name that a part's file has to have. Raises `CorruptBlock` if the file is damaged."""
    header = _read_header(data)
    try:
        spec = CacheSpec(header.group, header.kind, header.layers, header.shape, header.dtype, planes=header.planes)  # type: ignore[arg-type]
        layout = BlockLayout(spec, header.weights)
        index = layout.parts.index(BlockPart(header.part_layers, header.part_heads))
    except (KeyError, ValueError, AssertionError, ZeroDivisionError) as error:
        raise CorruptBlock(f"its header makes no sense: {error}") from None
    return layout.names(header.key)[index]


def _read_header(data: bytes) -> _Header:
    if len(data) < len(MAGIC) + 8 or data[: len(MAGIC) - 1] != MAGIC[:-1]:
        raise CorruptBlock("it is no block")
    if data[: len(MAGIC)] != MAGIC:
        raise CorruptBlock("it has another version of the format")
    (length,) = _LENGTH.unpack_from(data, len(MAGIC))
    start = len(MAGIC) + 4 + length
    if length > MAX_HEADER or start + 4 > len(data):
        raise CorruptBlock("its header is cut off")
    try:
        header = msgspec.msgpack.decode(data[len(MAGIC) + 4 : start], type=_Header)
    except msgspec.MsgspecError as error:
        raise CorruptBlock(f"its header can't be read: {error}") from None
    if len(data) != start + header.num_bytes + 4 or crc32(data[:-4]) != _LENGTH.unpack(data[-4:])[0]:
        raise CorruptBlock("its length or checksum is wrong")
    return header


def layouts_of(specs: Sequence[CacheSpec], weights: bytes) -> list[BlockLayout]:
    return [BlockLayout(spec, weights) for spec in specs]
