"""Ops that gradients flow through: nothing is changed in place and nothing is written to a cache.

They are the `TRAIN` row of `kernels.table`. A step of whole sequences gives every layer its keys and values directly,
in a `FreshPlane` where other tables have the plane of a cache. Written for clarity; the dense families are compared
with transformers' gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.activations import Curve
from quire.kernels.angles import Angles
from quire.kernels.reference import small_ops


@dataclass(slots=True)
class FreshPlane:
    """Keys or values of one layer in this step alone. The layer's rope fills it and its attention reads it."""

    kv_heads: int
    head_dim: int
    values: Tensor | None = None  # [tokens, kv_heads, head_dim]


def fresh_planes(cache: Tensor) -> tuple[FreshPlane, ...]:
    """Returns a plane for the keys and one for the values of each layer. cache [layers, 2, 0, 0, kv_heads, head_dim]"""
    return tuple(FreshPlane(*cache.shape[-2:]) for _ in range(2 * len(cache)))


@dataclass(frozen=True, slots=True)
class SequencesPlan:
    """The masks of a step whose rows are whole sequences."""

    counts: list[int]  # tokens of each row
    masks: list[Tensor]  # [count, count] bool of each row: the keys that each query sees


def plan_attention(
    page_table: Tensor,
    positions: Tensor,
    counts: list[int],
    len_bounds: list[int],
    page_tokens: int,
    window: int | None,
    dtype: torch.dtype,
) -> SequencesPlan:
    """As the reference's `plan_attention`, of rows that start at position 0: there is no cache to look back into."""
    if len_bounds != counts:
        raise ValueError("a row of a training step is a whole sequence, from its first token on")
    masks = []
    for count in counts:
        index = torch.arange(count, device=positions.device)
        back = index[:, None] - index
        masks.append(back >= 0 if window is None else (back >= 0) & (back < window))
    return SequencesPlan(counts, masks)


def qk_norm_rope_write(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    angles: Angles,
    k_plane: FreshPlane,
    v_plane: FreshPlane,
    slots: Tensor,
    num_heads: int,
) -> Tensor:
    """As the reference's `qk_norm_rope_write`; keys and values go to this step's planes."""
    kv_heads, head_dim = k_plane.kv_heads, k_plane.head_dim
    q, k, v = qkv.view(len(qkv), -1, head_dim).split((num_heads, kv_heads, kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        q = functional.rms_norm(q, (head_dim,), None, eps) * q_weight
        k = functional.rms_norm(k, (head_dim,), None, eps) * k_weight
    assert angles.cos is not None and angles.sin is not None
    k_plane.values, v_plane.values = small_ops.rope(k, angles.cos, angles.sin), v
    return small_ops.rope(q, angles.cos, angles.sin)


def paged_attention(
    q: Tensor,
    k_plane: FreshPlane,
    v_plane: FreshPlane,
    plan: SequencesPlan,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As the reference's `paged_attention`, over the keys of the same step."""
    assert k_plane.values is not None and v_plane.values is not None
    group = q.shape[1] // k_plane.kv_heads
    rows = zip(*(x.split(plan.counts) for x in (q, k_plane.values, v_plane.values)), plan.masks, strict=True)
    out = []
    for queries, keys, values, mask in rows:  # [count, heads, head_dim]
        keys, values = (x.transpose(0, 1).repeat_interleave(group, dim=0) for x in (keys, values))
        scores = queries.transpose(0, 1) @ keys.transpose(1, 2) * scale  # [heads, count, count]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            extra = sinks.view(-1, 1, 1).expand(-1, len(queries), 1)
            weights = torch.cat((scores, extra), dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out.append((weights @ values).transpose(0, 1).flatten(1))
    return torch.cat(out)


def gate_mul(gate_up: Tensor, curve: Curve = "silu") -> Tensor:
    """As the reference's `gate_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _CURVES[curve](gate) * up


def norm_add(x: Tensor, weight: Tensor, eps: float, stream: Tensor, factor: float) -> Tensor:
    """Returns stream + factor * norm(x)."""
    return stream + factor * small_ops.rms_norm(x, weight, eps)


class DifferentiableLinear:
    """Implements `FusedLinear` out of place. It runs every product, because the plain path adds in place."""

    def wins(self, num_rows: int, weight: Tensor, gate: Curve | None) -> bool:
        return True

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        eps: float,
        gate: Curve | None,
        residual: Tensor | None,
    ) -> Tensor:
        x = x if norm_weight is None else small_ops.rms_norm(x, norm_weight, eps)
        out = functional.linear(x, weight, bias)
        out = out if gate is None else gate_mul(out, gate)
        return out if residual is None else residual + out


_CURVES: dict[Curve, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
