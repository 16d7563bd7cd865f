"""Inputs of the mixture-of-experts kernels: the routing rule and the expert weights.

The layer builds these once; the reference and the Triton kernels read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LARGEST_FP8 = 448.0


@dataclass(frozen=True, slots=True)
class Routing:
    """How router logits become experts and weights.

    In order: scores of all experts, plus a bias if there is one; the best groups of neighbouring experts; the top-k
    experts within those groups; their scores without the bias as weights, times the expert's own scale if it has one.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True  # whether a token's weights sum to `scale`
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_members: int = 1  # number of best experts whose scores are summed to rank a group
    exact: bool = False  # float32 logits in any model dtype, for routers whose scores differ only slightly
    num_shared: int = 0  # shared experts, numbered after the routed ones and appended to every token's choice
    shared_gated: bool = False  # whether the sigmoid of one extra logit weights shared experts; otherwise 1

    @property
    def num_sent(self) -> int:
        """Number of experts per token, shared ones included."""
        return self.top_k + self.num_shared

    @property
    def num_logits(self) -> int:
        return self.num_experts + self.shared_gated


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """Activation between an expert's two matrix products: (up + shift) * curve(gate), both clamped first.

    The curve is gate * sigmoid(alpha * gate), or tanh-approximated GELU."""

    alpha: float = 1.0
    shift: float = 0.0
    limit: float | None = None  # clamps gate to at most limit, and up to [-limit, limit]
    curve: Literal["sigmoid", "gelu_tanh"] = "sigmoid"

    @property
    def is_silu_mul(self) -> bool:
        return self == GatedActivation()


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of a layer's experts: both matrices in the compute dtype, or both in FP8 (e4m3) with per-row scales."""

    gate_up: Tensor  # [experts, 2 * inner, width], gate rows before up rows
    down: Tensor  # [experts, width, inner]
    gate_up_bias: Tensor | None = None  # [experts, 2 * inner]
    down_bias: Tensor | None = None  # [experts, width]
    activation: GatedActivation = GatedActivation()
    gate_up_scale: Tensor | None = None  # [experts, 2 * inner] float32
    down_scale: Tensor | None = None  # [experts, width] float32


def quantize_matrix(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes `matrix` [rows, columns] to FP8 and returns it with its per-row scales, [rows] float32.

    Scales are powers of two, so that formats of few bits such as MXFP4 convert exactly unless a row exceeds FP8's
    range. A row that contains NaN or infinity becomes all NaN."""
    matrix = matrix.float()
    most = matrix.abs().amax(1)
    exponents = torch.frexp(most.clamp(min=1e-30) / LARGEST_FP8).exponent
    scales = torch.ldexp(torch.ones_like(most), exponents) + 0.0 * most
    return (matrix / scales[:, None]).to(torch.float8_e4m3fn), scales


def plain_matrix(matrix: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns one expert's matrix, dequantized to `dtype` if it has scales."""
    return matrix if scales is None else (matrix.double() * scales[:, None]).to(dtype)
