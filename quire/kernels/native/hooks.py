"""Hooks of the native library: a reduction after a block's last product, and adapters beside every product.

A hook is a C function and its context. `Stack` and `PackedLinear` take a `Hook`; code in the library makes one from two
addresses, and `PythonReduction` and `PythonAdapters` from a Python function. A hook that is not set costs one
comparison at each place. `src/hooks.h` says when a hook is called and what it may do.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, Structure, c_float, c_int32, c_int64, c_void_p, cast
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.kernels.native.hook_structs import AdaptersDesc, ReductionDesc

PRODUCTS = (
    "query",
    "key",
    "value",
    "out",
    "gate",
    "up",
    "down",
    "head",
    "router",
    "shared_gate",
    "shared_up",
    "shared_down",
    "shared_weight",
)


class ProductDesc(Structure):
    _fields_ = (
        ("layer", c_int64),
        ("expert", c_int64),
        ("x", c_void_p),
        ("num_rows", c_int64),
        ("columns", c_int64),
        ("out", c_void_p),
        ("width", c_int64),
        ("stride", c_int64),
        ("tokens", c_void_p),
        ("product", c_int32),
    )


# void* context, float* rows, number of rows, width, stage -> 0, or another number to end the step
ReductionCall = CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int64, c_int64, c_int64)
# void* context, ProductDesc* -> the same
AdaptersCall = CFUNCTYPE(c_int32, c_void_p, POINTER(ProductDesc))


@dataclass(slots=True)
class Hook:
    """A C function `call` with its `context`, both as addresses. The owner keeps alive what they point to."""

    call: int
    context: int | None = None
    failure: BaseException | None = None  # what the hook raised, if it is written in Python

    def reduction(self) -> ReductionDesc:
        return ReductionDesc(self.call, self.context)

    def adapters(self) -> AdaptersDesc:
        return AdaptersDesc(self.call, self.context)

    def raise_failure(self) -> None:
        """Raises what the hook raised during the call that has just ended, if anything."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure


class PythonReduction(Hook):
    """A reduction written in Python, for communicators that live there. It holds the interpreter lock for each call."""

    def __init__(self, function: Callable[[Tensor, int], None]):
        """`function(rows, stage)` replaces the values of rows [tokens, width] by their sum over ranks, in place.

        `stage` is 2 * layer for attention and 2 * layer + 1 for the feed-forward block.
        """

        def call(_: int | None, rows: int, num_rows: int, width: int, stage: int) -> int:
            try:
                function(_floats(rows, num_rows, width, width), stage)
            except BaseException as error:  # an exception can't cross C++; the caller of the step raises it again
                self.failure = error
                return 1
            return 0

        self._kept = ReductionCall(call)
        super().__init__(_address_of(self._kept))


@dataclass(frozen=True, slots=True)
class HookedProduct:
    """One product as an adapter sees it. All tensors are the library's memory and end with the call."""

    product: str  # one of PRODUCTS
    layer: int  # -1: the head
    expert: int  # -1: no routed expert
    x: Tensor  # [rows, columns] float32: the input, after norm or activation, before any rounding
    out: Tensor  # [rows, width] float32: the product with its bias, to be added to in place
    tokens: Tensor | None  # [rows] int64: each row's token in the step; None: in order


class PythonAdapters(Hook):
    """Adapters written in Python, called beside every product. They hold the interpreter lock for each call."""

    def __init__(self, function: Callable[[HookedProduct], None]):
        def call(_: int | None, described: Any) -> int:
            try:
                function(_view(described.contents))
            except BaseException as error:  # as in `PythonReduction`
                self.failure = error
                return 1
            return 0

        self._kept = AdaptersCall(call)
        super().__init__(_address_of(self._kept))


def _view(desc: ProductDesc) -> HookedProduct:
    rows = desc.num_rows
    tokens = None
    if desc.tokens is not None:
        tokens = torch.frombuffer((c_int64 * rows).from_address(desc.tokens), dtype=torch.int64)
    x = _floats(desc.x, rows, desc.columns, desc.columns)
    out = _floats(desc.out, rows, desc.width, desc.stride)
    return HookedProduct(PRODUCTS[desc.product], desc.layer, desc.expert, x, out, tokens)


def _floats(address: int, rows: int, width: int, stride: int) -> Tensor:
    """Returns the library's memory as [rows, width]; there is always at least one row."""
    size = (rows - 1) * stride + width
    flat = torch.frombuffer((c_float * size).from_address(address), dtype=torch.float32)
    return flat.as_strided((rows, width), (stride, 1))


def _address_of(function: object) -> int:
    address = cast(function, c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address
