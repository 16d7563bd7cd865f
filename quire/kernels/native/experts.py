"""Mixture of experts over packed matrices: `Ops.run_experts` for experts in quantized blocks.

One call computes two products per expert over the tokens routed to it; a single token reads only its experts' blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor

from quire.kernels.expert_types import GatedActivation
from quire.kernels.native.library import ACTIVATIONS, ExpertsDesc, LinearDesc
from quire.kernels.native.matrix import PackedLinear

CURVES = {"sigmoid": "silu", "gelu_tanh": "gelu_new"}  # GatedActivation.curve -> key of ACTIVATIONS


class PackedExperts:
    """Packed matrices of all experts of a layer, one per expert; in `gate_up` gate rows precede up rows."""

    def __init__(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], activation: GatedActivation):
        self.gate_up, self.down = gate_up, down  # keep the memory alive that the descriptors point to
        self.native = gate_up[0].native
        ups, downs = ((LinearDesc * len(some))(*(linear.desc for linear in some)) for some in (gate_up, down))
        self.desc = ExpertsDesc(
            ups,
            downs,
            len(gate_up),
            gate_up[0].in_features,
            down[0].in_features,
            ACTIVATIONS[CURVES[activation.curve]],
            activation.alpha,
            activation.shift,
            activation.limit or 0.0,
        )


def run_packed_experts(
    x: Tensor, experts: PackedExperts, chosen: Tensor, weights: Tensor, residual: Tensor | None = None
) -> Tensor:
    """Computes `reference.experts.run_experts` over packed experts."""
    x, chosen, weights = x.contiguous(), chosen.contiguous(), weights.contiguous()
    residual = None if residual is None else residual.contiguous()
    out = torch.empty_like(x)
    native = experts.native
    native.library.quire_experts(
        native.context,
        byref(experts.desc),
        x.data_ptr(),
        len(x),
        chosen.data_ptr(),
        weights.data_ptr(),
        chosen.shape[1],
        None if residual is None else residual.data_ptr(),
        out.data_ptr(),
    )
    return out
