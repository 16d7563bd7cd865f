"""LoRA adapters for the native stack: their matrices packed like weights, and the hook that applies them.

`layers.stack` packs an adapter when it is loaded, and makes a hook for each step that uses one. The structs are those
of `src/adapters/lora.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire.kernels.native.hooks import PRODUCTS, Hook
from quire.kernels.native.library import Matrix, Native
from quire.kernels.native.matrix import PackedMatrix, pack_floats


class LoraEntry(Structure):
    _fields_ = (("a", Matrix), ("b", Matrix), ("first", c_int64))


class LoraSlot(Structure):
    _fields_ = (("starts", c_void_p), ("entries", c_void_p))


class LoraDesc(Structure):
    _fields_ = (("context", c_void_p), ("slots", c_void_p), ("token_slots", c_void_p))


@dataclass(frozen=True, slots=True)
class ProductUpdate:
    """An update of one product: rows from `first` on get (x A^T) B^T."""

    layer: int
    product: str  # one of PRODUCTS
    first: int
    a: Tensor  # [rank, columns]
    b: Tensor  # [rows, rank]


class PackedAdapter:
    """The updates of one adapter, in the order of layers and products."""

    def __init__(self, native: Native, form: str, num_layers: int, updates: Sequence[ProductUpdate]):
        """`form`: F32 or F16. Products that share an A share its memory."""
        self._matrices: list[PackedMatrix] = []  # keeps the memory alive
        packed: dict[int, PackedMatrix] = {}

        def pack(matrix: Tensor) -> PackedMatrix:
            rows, columns = matrix.shape
            found = pack_floats(native, form, rows, columns, lambda first, count: matrix[first : first + count])
            self._matrices.append(found)
            return found

        def place(update: ProductUpdate) -> int:
            return update.layer * len(PRODUCTS) + PRODUCTS.index(update.product)

        ordered = sorted(updates, key=place)
        self._entries = (LoraEntry * max(len(ordered), 1))()
        for index, update in enumerate(ordered):
            a = packed.get(id(update.a))
            if a is None:
                a = packed[id(update.a)] = pack(update.a)
            self._entries[index] = LoraEntry(a.desc, pack(update.b).desc, update.first)
        counts = np.bincount([place(update) for update in ordered], minlength=num_layers * len(PRODUCTS))
        self._starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)

    def slot(self) -> LoraSlot:
        return LoraSlot(self._starts.ctypes.data, ctypes.addressof(self._entries))


class LoraHook(Hook):
    """Applies the adapters of one step. `token_slots` [tokens] int32; `slots`: what each slot holds."""

    def __init__(self, native: Native, slots: Sequence[PackedAdapter | None], token_slots: np.ndarray):
        self._kept = slots, token_slots
        held = [LoraSlot() if slot is None else slot.slot() for slot in slots]
        self._slots = (LoraSlot * len(held))(*held)
        self._desc = LoraDesc(native.context, ctypes.addressof(self._slots), token_slots.ctypes.data)
        call = ctypes.cast(native.library.quire_lora, c_void_p).value
        assert call is not None
        Hook.__init__(self, call, ctypes.addressof(self._desc))
