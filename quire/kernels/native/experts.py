"""A mixture of experts over packed matrices: what `Ops.run_experts` does where a layer's experts are kept in blocks.

One call: each expert is two products over the tokens that chose it; a token alone reads its own experts' blocks and no
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor

from quire.kernels.expert_types import GatedActivation
from quire.kernels.native.library import ACTIVATIONS, ExpertsDesc, LinearDesc
from quire.kernels.native.matrix import PackedLinear

CURVES = {"sigmoid": "silu", "gelu_tanh": "gelu_new"}  # an expert's names for them, and those of ACTIVATIONS


class PackedExperts:
    """`gate_up`: of each expert, gates above ups."""

    def __init__(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], activation: GatedActivation):
        self.gate_up, self.down = gate_up, down  # keep the memory that the descriptions point to
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
    """As `reference_experts.run_experts`."""
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
