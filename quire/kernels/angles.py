"""How far rope turns each pair of a head in one step: as tables, or as positions and frequencies to work them out from.

A model makes one per step through `Ops.plan_angles`; which of the two it holds is the business of the chosen kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Angles:
    positions: Tensor | None = None  # [tokens] int64
    frequencies: Tensor | None = None  # [head_dim / 2] float32, radians per position
    scale: float = 1.0  # of cos and sin, where they are worked out from frequencies
    cos: Tensor | None = None  # [tokens, 1, head_dim]
    sin: Tensor | None = None  # [tokens, 1, head_dim], the first half negated


def angle_tables(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> Angles:
    """Tables as `reference.rope` wants them. Both halves of a head turn by the same angle; negating it in the first
    half gives its sine the sign that the rotation needs there, and leaves its cosine alone."""
    angles = positions.float().unsqueeze(1) * frequencies  # [tokens, head_dim / 2]
    angles = torch.cat((-angles, angles), dim=1).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos.mul_(scale), sin.mul_(scale)
    return Angles(cos=cos.to(dtype), sin=sin.to(dtype))


def angles_from_positions(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> Angles:
    """For kernels that work them out where they need them: no table is written or read."""
    return Angles(positions=positions, frequencies=frequencies, scale=scale)
