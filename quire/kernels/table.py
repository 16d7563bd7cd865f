"""The one table that picks which implementation of each op a device gets. Models ask it once, when they are built.

Everything below a model calls ops through the `Ops` it was given, so a faster twin is one changed row here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.kernels import reference, reference_attention
from quire.kernels.angles import Angles, angle_tables, angles_from_positions


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation per op, with the signature and meaning of the reference of the same name."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    plan_angles: Callable[..., Angles]
    qk_norm_rope_write: Callable[..., Tensor]
    plan_attention: Callable[..., Any]  # what it returns is for the same row's `paged_attention` only
    paged_attention: Callable[..., Tensor]


REFERENCE = Ops(
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    silu_mul=reference.silu_mul,
    plan_angles=angle_tables,
    qk_norm_rope_write=reference.qk_norm_rope_write,
    plan_attention=reference_attention.plan_attention,
    paged_attention=reference_attention.paged_attention,
)


def select_ops(device_type: str) -> Ops:
    """The ops for "cpu", "cuda", ...; a device without a row of its own runs the reference, which is plain torch."""
    return _triton_ops() if device_type == "cuda" else REFERENCE


def _triton_ops() -> Ops:
    """Imported only where there is a device for it; without Triton the reference runs there too, and says so."""
    try:
        from quire.kernels.triton import attention, norm, rope
    except ImportError as error:
        warnings.warn(f"Triton can't be used ({error}); plain torch kernels run instead, much slower.", stacklevel=3)
        return REFERENCE

    return Ops(
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        silu_mul=norm.silu_mul,
        plan_angles=angles_from_positions,
        qk_norm_rope_write=rope.qk_norm_rope_write,
        plan_attention=attention.plan_attention,
        paged_attention=attention.paged_attention,
    )


def select_choice(device_type: str) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """One kernel from logits to tokens for greedy and temperature sampling; None where there is none."""
    if device_type != "cuda":
        return None
    try:
        from quire.kernels.triton.sample import sample_rows
    except ImportError:
        return None
    return lambda logits, key, positions, scale, mask: sample_rows(logits, key, positions, scale, mask=mask)
