"""Small ops in plain torch: the CPU path, and the oracle for faster implementations.

`kernels.table` gives these to the layers. Each is written for few torch calls rather than a clear formula, because a
CPU runs them in thirty layers for every token and each call costs microseconds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.activations import CURVES, Curve
from quire.kernels.angles import Angles
from quire.kernels.cache_forms import PackedPlane
from quire.kernels.reference.packed_cache import write_packed


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scales the last dimension to unit root mean square, then by `weight`."""
    if x.dtype != weight.dtype:  # some norm weights are float32; torch would cast the same way, with a warning
        return functional.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
    return functional.rms_norm(x, weight.shape, weight, eps)


def gate_mul(gate_up: Tensor, curve: Curve = "silu") -> Tensor:
    """Returns curve(gate) * up, where the last dimension holds gate and up concatenated."""
    gate, up = gate_up.chunk(2, dim=-1)
    return CURVES[curve](gate).mul_(up)


def elementwise(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Applies an elementwise `function`. Layers use it for computations that have no op of their own, so that the
    deterministic mode can replace it."""
    return function(*tensors)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates element i of each head with element i + head_dim / 2.

    x is [tokens, heads, head_dim], queries and keys concatenated; cos and sin are [tokens, 1, head_dim] with the first
    half of sin negated, so that one roll pairs every element with its partner.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor | PackedPlane, v_cache: Tensor | PackedPlane, slots: Tensor) -> None:
    """Writes each token's key and value, [tokens, kv_heads, head_dim], to its slot of the paged cache, in place."""
    if isinstance(k_cache, PackedPlane):
        write_packed(k, v, k_cache, slots)
        return
    assert isinstance(v_cache, Tensor)
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slots, v)


def qk_norm_rope_write(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    angles: Angles,
    k_cache: Tensor | PackedPlane,
    v_cache: Tensor | PackedPlane,
    slots: Tensor,
    num_heads: int,
) -> Tensor:
    """Norms queries and keys (unless the weights are None), applies rope to them, and writes keys and values to the KV
    cache. Returns the queries [tokens, heads, head_dim].

    qkv is [tokens, (heads + 2 kv_heads) * head_dim], the norm weights are [head_dim]; `angles` must hold tables.
    """
    kv_heads, head_dim = k_cache.shape[2:]
    qk, v = qkv.view(len(qkv), -1, head_dim).split_with_sizes((num_heads + kv_heads, kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        qk = functional.rms_norm(qk, (head_dim,), None, eps)
        qk[:, :num_heads].mul_(q_weight)
        qk[:, num_heads:].mul_(k_weight)
    assert angles.cos is not None and angles.sin is not None
    q, k = rope(qk, angles.cos, angles.sin).split_with_sizes((num_heads, kv_heads), dim=1)
    write_kv(k, v, k_cache, v_cache, slots)
    return q
