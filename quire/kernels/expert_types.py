"""What a mixture of experts is to its kernels: how tokens are routed, and the weights they are routed to.

The layer builds these once; reference and Triton twins read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LARGEST_FP8 = 448.0


@dataclass(frozen=True, slots=True)
class Routing:
    """From router logits to experts. In order: scores of all experts, plus a bias where there is one; the best groups
    of neighbouring experts; the best experts within them; their scores, without the bias, as weights, each times its
    expert's own scale where there are such."""

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True  # a token's weights add up to `scale`
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_members: int = 1  # a group is as good as the sum of so many of its best
    exact: bool = False  # logits in float32, whatever the model computes in: its scores decide by small differences
    num_shared: int = 0  # experts behind the others that every token is sent to, after those it chose,
    shared_gated: bool = False  # with the sigmoid of one more logit as weight; else with 1

    @property
    def num_sent(self) -> int:
        """Experts a token is sent to."""
        return self.top_k + self.num_shared

    @property
    def num_logits(self) -> int:
        return self.num_experts + self.shared_gated


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """What stands between an expert's two products: (up + shift) * curve(gate), both clamped first. The curve is
    gate * sigmoid(alpha * gate), or GELU in its form with a hyperbolic tangent."""

    alpha: float = 1.0
    shift: float = 0.0
    limit: float | None = None  # gate at most this, up within plus and minus this
    curve: Literal["sigmoid", "gelu_tanh"] = "sigmoid"

    @property
    def is_silu_mul(self) -> bool:
        return self == GatedActivation()


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Both matrices in the type they are computed with, or both in FP8 (e4m3) with a scale for each output."""

    gate_up: Tensor  # [experts, 2 * inner, width], gates above ups
    down: Tensor  # [experts, width, inner]
    gate_up_bias: Tensor | None = None  # [experts, 2 * inner]
    down_bias: Tensor | None = None  # [experts, width]
    activation: GatedActivation = GatedActivation()
    gate_up_scale: Tensor | None = None  # [experts, 2 * inner] float32
    down_scale: Tensor | None = None  # [experts, width] float32


def quantize_matrix(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] in FP8, and what each row is to be multiplied with, [rows] float32. Scales are powers of two, so
    that numbers of few bits, as MXFP4 has, stay what they were unless a row has them further apart than FP8 can. Of a
    row with NaN or infinity nothing is left but NaN."""
    matrix = matrix.float()
    most = matrix.abs().amax(1)
    exponents = torch.frexp(most.clamp(min=1e-30) / LARGEST_FP8).exponent
    scales = torch.ldexp(torch.ones_like(most), exponents) + 0.0 * most
    return (matrix / scales[:, None]).to(torch.float8_e4m3fn), scales


def plain_matrix(matrix: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What one expert's matrix stands for."""
    return matrix if scales is None else (matrix.double() * scales[:, None]).to(dtype)
