"""The one table that picks which implementation of each op a device gets. Models ask it once, when they are built.

Everything below a model calls ops through the `Ops` it was given, so a faster twin is one changed row here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.kernels import reference, reference_attention


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation per op, with the signature and meaning of the reference of the same name."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    plan_attention: Callable[..., Any]  # what it returns is for the same row's `paged_attention` only
    paged_attention: Callable[..., Tensor]


REFERENCE = Ops(
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    silu_mul=reference.silu_mul,
    rope=reference.rope,
    write_kv=reference.write_kv,
    plan_attention=reference_attention.plan_attention,
    paged_attention=reference_attention.paged_attention,
)

_BY_DEVICE = {"cpu": REFERENCE}


def select_ops(device_type: str) -> Ops:
    """The ops for "cpu", "cuda", ...; a device without a row of its own runs the reference, which is plain torch."""
    return _BY_DEVICE.get(device_type, REFERENCE)
