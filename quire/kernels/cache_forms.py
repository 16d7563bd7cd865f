"""How a KV cache holds keys and values: as floats, or packed as entries of bytes.

An entry is one token's key and value of one KV head, with their scales, so that a page carries all that is needed to
read it. Both are rotated by a Hadamard matrix before they are rounded, which spreads a head's few large elements. Ops
that support packed caches get `PackedPlane`s where others get tensors; `CacheForm` in `native/src/kernels.h` is the
same layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.types import QuireError

MAX_LAYERS = 10_000  # a bound on layers where a model's number is not known
HEAD_UNIT = 32  # a head that is packed has a multiple of so many elements


@dataclass(frozen=True, slots=True)
class CacheForm:
    """A packed form. Numbers of 8 bits have a sign and a scale; numbers of 4 bits have a scale and a least value."""

    name: str
    number: int  # that of `CacheForm` in the native library
    key_bits: int
    value_bits: int

    def entry_bytes(self, head_dim: int) -> int:
        return side_bytes(self.key_bits, head_dim) + side_bytes(self.value_bits, head_dim)

    def head_dim(self, entry_bytes: int) -> int:
        """Returns the elements of a head whose entries have so many bytes."""
        scales = side_bytes(self.key_bits, 0) + side_bytes(self.value_bits, 0)
        return (entry_bytes - scales) * 8 // (self.key_bits + self.value_bits)


def side_bytes(bits: int, head_dim: int) -> int:
    """Returns the bytes of a key or a value in an entry: its numbers, its scale, and with 4 bits its least value."""
    return head_dim * bits // 8 + (2 if bits == 8 else 4)


CACHE_FORMS = {
    form.name: form for form in (CacheForm("int8", 1, 8, 8), CacheForm("k8v4", 2, 8, 4), CacheForm("q4", 3, 4, 4))
}


def parse_layers(text: str, num_layers: int | None) -> frozenset[int]:
    """Returns the layers that `text` names, such as "0,28-29". `num_layers`: of the model; None: not known."""
    found: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = part.partition("-")
        ends = [end for end in (first, last or first) if end.isascii() and end.isdigit()]
        if len(ends) < 2 or int(ends[0]) > int(ends[1]) or int(ends[1]) >= (num_layers or MAX_LAYERS):
            most = "" if num_layers is None else f" from 0 to {num_layers - 1}"
            what = f"kv_dtype_skip={text!r} has {part!r}, which is no layer or range of layers{most}."
            raise QuireError("invalid_parameter", what, "Write layers as in 0,28-29.", param="kv_dtype_skip")
        found.update(range(int(ends[0]), int(ends[1]) + 1))
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class PackedPlane:
    """One layer's keys or values in a packed cache, in place of a float tensor [pages, page_tokens, kv_heads,
    head_dim]."""

    entries: Tensor  # [pages, page_tokens, kv_heads, entry_bytes] uint8: keys and values
    form: CacheForm
    is_key: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape that the plane would have as floats."""
        pages, page_tokens, kv_heads, entry_bytes = self.entries.shape
        return pages, page_tokens, kv_heads, self.form.head_dim(entry_bytes)

    @property
    def dtype(self) -> torch.dtype:
        return self.entries.dtype

    @property
    def bits(self) -> int:
        return self.form.key_bits if self.is_key else self.form.value_bits

    @property
    def span(self) -> slice:
        """The bytes of an entry that are this plane's."""
        head_dim = self.shape[3]
        key_bytes = side_bytes(self.form.key_bits, head_dim)
        return slice(0, key_bytes) if self.is_key else slice(key_bytes, None)


def packed_planes(cache: Tensor, packing: str) -> tuple[PackedPlane, ...]:
    """Returns the keys and the values of each layer in turn. cache [layers, 1, pages, page_tokens, kv_heads, bytes]"""
    form = CACHE_FORMS[packing]
    return tuple(PackedPlane(layer[0], form, is_key) for layer in cache.unbind(0) for is_key in (True, False))
