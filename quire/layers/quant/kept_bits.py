"""The scheme of `--quant keep`: 4-bit weights of a checkpoint stay in their bits where others are decoded.

It serves devices without the native library, whose blocks stay as they are anyway. Activations keep the model's dtype.
Matrices that are not four bits, and experts, are decoded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.activations import Curve
from quire.kernels.four_bits import FORMATS, FourBits, join_rows, read_blocks
from quire.kernels.table import Ops
from quire.layers.quant.dense import Dense
from quire.layers.quant.scheme import apply_epilogue, apply_norm
from quire.layers.weights import PartSource, Weight
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.layers.linear import Linear
    from quire.layers.norm import RMSNorm

KINDS = ("INT4", "UINT4", *FORMATS)  # of checkpoint tensors whose values fit
BITS = 5.0  # of a weight with its scales, at most


class KeptBits:
    """Stores a linear layer's weight as `FourBits` if all of its tensors have four bits, and else as `Dense`."""

    def __init__(self, ops: Ops, types: Mapping[str, str], device: torch.device):
        """`types`: type of each checkpoint tensor."""
        self.ops = ops
        self._dense, self._types, self._device = Dense(ops), types, device

    def create(self, linear: Linear, sources: list[tuple[str, int]], has_bias: bool, dtype: torch.dtype) -> None:
        self._dense.create(linear, sources, has_bias, dtype)
        weight = linear.weight
        assert isinstance(weight, Weight)
        if all(self._types.get(f"{prefix}.weight") in KINDS for prefix, _ in sources):
            weight.packing = _KeptPacking(self._device)

    def finish(self, linear: Linear) -> None:
        if not isinstance(linear.weight, FourBits):
            self._dense.finish(linear)

    def apply(
        self, linear: Linear, x: Tensor, norm: RMSNorm | None, gate: Curve | None, residual: Tensor | None
    ) -> Tensor:
        weight = linear.weight
        if not isinstance(weight, FourBits):
            return self._dense.apply(linear, x, norm, gate, residual)
        out = self.ops.four_bit_linear(apply_norm(self.ops, x, norm), weight, linear.bias)
        return apply_epilogue(self.ops, out, gate, residual)


@dataclass(frozen=True, slots=True)
class _KeptPacking:
    """Keeps a weight in four bits on a device."""

    device: torch.device

    def num_bytes(self, weight: Weight) -> int:
        return int(math.prod(weight.shape) * BITS / 8)

    def pack(self, weight: Weight, sources: list[PartSource]) -> FourBits:
        joined = join_rows([_read(source) for source in sources])
        return FourBits(*(None if part is None else part.to(self.device) for part in _fields(joined)))  # type: ignore[arg-type]


def _fields(weight: FourBits) -> tuple[Tensor, Tensor, Tensor | None]:
    return weight.numbers, weight.scales, weight.least


def _read(source: PartSource) -> FourBits:
    if source.blocks is None or source.type_name not in FORMATS:
        what = "A matrix of four bits has groups of columns that are no whole blocks."
        raise QuireError("invalid_parameter", what, "Leave --quant keep out.", param="quant")
    found = read_blocks(source.type_name, source.blocks, len(source.blocks) // _row_bytes(source))
    if source.order is None:
        return found
    return FourBits(*(None if part is None else part[source.order] for part in _fields(found)))  # type: ignore[arg-type]


def _row_bytes(source: PartSource) -> int:
    return source.shape[-1] // 32 * FORMATS[source.type_name]
