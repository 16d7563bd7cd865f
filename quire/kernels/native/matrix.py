"""Matrices packed into the native library's tiles, for matrix products and embedding lookups.

The scheme `layers.quant.blocks` packs them from a checkpoint's bytes or floats while a model loads; `Stack` and single
products read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.native.hook_structs import HookFailed
from quire.kernels.native.hooks import Hook
from quire.kernels.native.library import FORMS, LinearDesc, Matrix, Native, unit_columns

ROWS_AT_A_TIME = 1 << 22  # floats that are dequantized at a time for packing


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    native: Native
    form: str  # a key of FORMS
    shape: tuple[int, int]
    memory: Tensor  # [bytes] uint8
    desc: Matrix

    def rows(self, ids: Tensor) -> Tensor:
        """Embedding lookup: returns the rows `ids` [n] int64 as [n, columns] float32."""
        ids = ids.contiguous()
        out = torch.empty(len(ids), self.shape[1])
        native = self.native
        native.library.quire_rows(native.context, byref(self.desc), ids.data_ptr(), len(ids), out.data_ptr())
        return out


def matrix_bytes(native: Native, form: str, rows: int, columns: int) -> int:
    desc = Matrix(FORMS[form], native.lanes, rows, columns, None)
    return native.library.quire_matrix_bytes(byref(desc))


def _empty(native: Native, form: str, rows: int, columns: int) -> PackedMatrix:
    if columns % unit_columns(form):
        raise ValueError(f"{columns} columns are no whole blocks of {unit_columns(form)}")
    memory = torch.empty(matrix_bytes(native, form, rows, columns) + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 64  # aligns tiles to cache lines
    desc = Matrix(FORMS[form], native.lanes, rows, columns, memory.data_ptr() + start)
    return PackedMatrix(native, form, (rows, columns), memory, desc)


def pack_blocks(
    native: Native, form: str, rows: int, columns: int, data: Tensor, order: Tensor | None = None
) -> PackedMatrix:
    """Packs a GGUF tensor's bytes, [bytes] uint8, which are of the same form. `order` [rows] int64: the source row of
    each packed row."""
    packed = _empty(native, form, rows, columns)
    place = None if order is None else order.data_ptr()
    native.library.quire_pack(native.context, byref(packed.desc), data.data_ptr(), place, 0, packed.desc.data)
    return packed


def pack_floats(native: Native, form: str, rows: int, columns: int, read: Callable[[int, int], Tensor]) -> PackedMatrix:
    """Packs floats, quantized to the form; `read(first, count)` returns rows as [count, columns]."""
    packed = _empty(native, form, rows, columns)
    lanes, library = native.lanes, native.library
    step = max(1, ROWS_AT_A_TIME // columns // lanes) * lanes
    for first in range(0, rows, step):
        count = min(step, rows - first)
        part = read(first, count).to(torch.float32).contiguous()
        desc = Matrix(FORMS[form], lanes, count, columns, None)
        start = packed.desc.data + matrix_bytes(native, form, first, columns)
        library.quire_pack(native.context, byref(desc), part.data_ptr(), None, 1, start)
    return packed


class PackedLinear:
    """A linear layer of one or more matrices with the same input, whose outputs are concatenated, and a bias."""

    def __init__(self, parts: Sequence[PackedMatrix], bias: Tensor | None = None):
        self.native = parts[0].native
        self.parts = list(parts)
        self.in_features = parts[0].shape[1]
        self.out_features = sum(part.shape[0] for part in parts)
        self.bias = bias
        self._descs = (Matrix * len(parts))(*(part.desc for part in parts))
        self.desc = LinearDesc(self._descs, len(parts), None if bias is None else bias.data_ptr())

    def __call__(
        self,
        x: Tensor,
        *,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        silu_mul: bool = False,
        residual: Tensor | None = None,
        adapters: Hook | None = None,
    ) -> Tensor:
        """Norms x [tokens, in_features] float32, multiplies it and adds `residual`; returns [tokens, out_features].
        With `silu_mul` x is [tokens, 2 * in_features] and the product's input is silu(first half) * second half.
        `adapters` are called for the output as that of the head, without a residual."""
        assert adapters is None or residual is None
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        out = torch.empty(len(x), self.out_features)
        native = self.native
        try:
            native.library.quire_linear(
                native.context,
                byref(self.desc),
                x.data_ptr(),
                len(x),
                _address(norm_weight),
                eps,
                silu_mul,
                _address(residual),
                out.data_ptr(),
                None if adapters is None else byref(adapters.adapters()),
            )
        except HookFailed:
            if adapters is not None:
                adapters.raise_failure()
            raise
        return out


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
