"""A model's weights as they really are kept, given to the same model of plain tensors: what is lost by keeping them so
is lost on both sides, and what still differs is the kernels' doing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quire.layers.linear import Linear
from quire.layers.quant import Fp16Packed

PACKED = ("weight", "gate_up", "down")  # attributes that hold a list of matrices where they would hold a tensor


def decode_into(exact: nn.Module, kept: nn.Module) -> set[str]:
    """Give `exact` what the packed matrices of `kept` stand for. Returns the forms of those."""
    forms = set()
    for ours, theirs in zip(kept.modules(), exact.modules(), strict=True):
        if isinstance(ours, Linear) and isinstance(ours.scheme, Fp16Packed):
            rows, _ = torch.ops.quantized.linear_unpack_fp16(ours.packed)
            _put(theirs, "weight", rows)
            forms.add("F16")
        for name in PACKED:
            matrices: Any = getattr(ours, name, None)
            if isinstance(matrices, list):
                _put(theirs, name, torch.cat([matrix.rows(torch.arange(matrix.shape[0])) for matrix in matrices]))
                forms.update(matrix.form for matrix in matrices)
    return forms


def held_bytes(model: nn.Module) -> int:
    """Of weights as they are kept: packed matrices, each once whoever has it, and tensors."""
    held = {tensor.data_ptr(): tensor.nbytes for tensor in model.parameters()}
    for module in model.modules():
        for name in PACKED:
            matrices: Any = getattr(module, name, None)
            for matrix in matrices if isinstance(matrices, list) else []:
                held[matrix.memory.data_ptr()] = matrix.memory.nbytes - 64  # of which some go where tiles begin
    return sum(held.values())


def _put(module: nn.Module, name: str, rows: torch.Tensor) -> None:
    assert rows.shape == getattr(module, name).shape
    setattr(module, name, nn.Parameter(rows, requires_grad=False))
