"""What a mixture of experts is to its kernels: how tokens are routed, and the weights they are routed to.

The layer builds these once; reference and Triton twins read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


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
    gate_up: Tensor  # [experts, 2 * inner, width], gates above ups
    down: Tensor  # [experts, width, inner]
    gate_up_bias: Tensor | None = None  # [experts, 2 * inner]
    down_bias: Tensor | None = None  # [experts, width]
    activation: GatedActivation = GatedActivation()
