"""Rotary embedding angles of one step: either cos/sin tables, or positions and frequencies.

A model builds one `Angles` per step through `Ops.plan_angles`; the chosen kernel decides which of the two forms it has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Angles:
    positions: Tensor | None = None  # [tokens] int64
    frequencies: Tensor | None = None  # [head_dim / 2] float32, radians per position
    scale: float = 1.0  # factor on cos and sin in kernels that compute them from frequencies
    cos: Tensor | None = None  # [tokens, 1, head_dim]
    sin: Tensor | None = None  # [tokens, 1, head_dim], the first half negated


def angle_tables(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> Angles:
    """Computes cos and sin tables in the layout of `reference.rope`.

    Both halves of a head rotate by the same angle. Negating the angle in the first half gives its sine the sign that
    the rotation needs and leaves its cosine unchanged."""
    angles = positions.float().unsqueeze(1) * frequencies  # [tokens, head_dim / 2]
    angles = torch.cat((-angles, angles), dim=1).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos.mul_(scale), sin.mul_(scale)
    return Angles(cos=cos.to(dtype), sin=sin.to(dtype))


def angles_from_positions(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> Angles:
    """Returns `Angles` for kernels that compute cos and sin themselves; no table is written or read."""
    return Angles(positions=positions, frequencies=frequencies, scale=scale)
