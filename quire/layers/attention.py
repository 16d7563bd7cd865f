"""Grouped-query attention over a paged cache: one merged projection, rope, cache write, attention, output.

A model makes one `AttentionPlan` per cache group at the start of a step; every layer of the group then works from it,
so that what depends only on the step is done once and not once per layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.angles import Angles
from quire.kernels.table import Ops
from quire.layers.head_layout import ByHead, HeadOrder
from quire.layers.linear import Linear
from quire.layers.norm import HeadLayerNorm, Norm, QKNorm, TurnedQKNorm, WideQKNorm, fuse_norm
from quire.layers.quant.scheme import Scheme
from quire.layers.residual_join import Join
from quire.layers.step import PagedInputs, Step
from quire.layers.weights import Form, Weight, set_forms
from quire.types import CacheSpec


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of one group share in one step."""

    planes: tuple[Tensor, ...]  # key and value cache of each layer in turn: [pages, page_tokens, kv_heads, head_dim]
    slots: Tensor  # [tokens] int64
    kernel: Any  # what the chosen kernel wants to know of the step
    wanted: Tensor | None = None  # [n] int64: the tokens that attend; None: all. Keys and values are left of every one
    sharpness: Tensor | None = None  # [tokens, 1] float32: what queries are multiplied with; None: nothing

    def pick(self, x: Tensor) -> Tensor:
        """Of x [tokens, ...], those that attend."""
        return x if self.wanted is None else x[self.wanted]


def plan_attention(step: Step, spec: CacheSpec, cache: Tensor, ops: Ops) -> AttentionPlan:
    """`cache` is the group's whole memory, [layers, 2, pages, page_tokens, kv_heads, head_dim]."""
    inputs = step.groups[spec.group]
    assert isinstance(inputs, PagedInputs)
    # Positions and pages are gathered before the embedding, so whoever comes after it may read them early.
    captured: dict[str, Any] = {} if inputs.row_index is None else {"row_index": inputs.row_index, "early": True}
    if inputs.work is not None:
        captured["work"] = inputs.work
    kernel = ops.plan_attention(
        inputs.page_table,
        step.positions,
        step.counts,
        step.len_bounds,
        spec.page_tokens,
        spec.window,
        cache.dtype,
        **captured,
    )
    return AttentionPlan(cache.flatten(0, 1).unbind(0), inputs.slots, kernel)


def plan_last_attention(plan: AttentionPlan, step: Step, spec: CacheSpec, cache: Tensor, ops: Ops) -> AttentionPlan:
    """For a model's last layer: nobody reads what it makes of tokens that are not sampled. A prompt of thousands of
    tokens costs that layer one query and no feed-forward block."""
    inputs = step.groups[spec.group]
    if step.samples is None:
        return plan
    assert isinstance(inputs, PagedInputs)
    index, bounds = step.logits_index, step.samples.len_bounds
    pages = inputs.page_table.index_select(0, step.samples.rows)
    kernel = None
    if bounds:
        kernel = ops.plan_attention(
            pages, step.positions[index], [1] * len(bounds), bounds, spec.page_tokens, spec.window, cache.dtype
        )
    return replace(plan, kernel=kernel, wanted=index)


@dataclass(frozen=True, slots=True)
class Sharpening:
    """Queries grow with their positions: a softmax over many keys would be flat. Nothing changes within the first
    `length` positions."""

    by: float
    length: int

    def at(self, positions: Tensor) -> Tensor:
        """positions [tokens] -> what their queries are multiplied with, [tokens, 1] float32"""
        times = positions.clamp(min=0) // self.length  # below 0: rows that only pad the step
        return (1 + self.by * torch.log1p(times.float())).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None  # of scores; None: head_dim ** -0.5
    softcap: float | None = None  # scores are bent to stay within plus and minus this
    order: HeadOrder | None = None  # what brings the checkpoint's heads into our order; None: they are in it
    sinks: bool = False  # each head also gives a score of its own to nothing at all
    clip: float | None = None  # queries, keys and values, normed but not yet turned, stay within plus and minus this

    @property
    def activation_elements(self) -> int:
        """That a token has alive at one time."""
        return (4 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """What a checkpoint calls a layer's projections."""

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # or one name, of all three below each other,
    out: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")  # of query heads and of key heads, where such are normed
    block: str = "self_attn"  # that all of them are in
    by_head: bool = False  # of which the one has them key head by key head: its queries, its key, its value
    gate: str | None = None  # what makes a gate for every element of what the heads see; None: there is none


class Attention(nn.Module):
    sinks: Tensor | None  # [heads]

    def __init__(
        self,
        prefix: str,
        norm: Norm | None,
        shape: AttentionShape,
        cache_index: int,
        *,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm: QKNorm | HeadLayerNorm | WideQKNorm | None,
        dtype: torch.dtype,
        ops: Ops,
        scheme: Scheme,
        names: AttentionNames | None = None,
        join: Join | None = None,
    ):
        """`cache_index`: this layer's place within its cache group; `join`: how the output comes to the stream."""
        super().__init__()
        names = names or AttentionNames()
        self.norm = norm
        self.shape = shape
        self.cache_index = cache_index
        self.scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
        self.ops = ops
        q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        rows = [q_rows, kv_rows, kv_rows] if len(names.qkv) == 3 else [q_rows + 2 * kv_rows]
        sources = [(f"{prefix}.{name}", count) for name, count in zip(names.qkv, rows, strict=True)]
        gates = [] if names.gate is None else [(f"{prefix}.{names.gate}", q_rows)]
        self.num_gates = sum(count for _, count in gates)  # for one token; they stand before its queries
        self.qkv = Linear(shape.width, [*gates, *sources], bias=qkv_bias, dtype=dtype, scheme=scheme)
        set_forms(self.qkv, (*(None for _ in gates), *_qkv_forms(names, shape, is_normed=qk_norm is not None)))
        out = [(f"{prefix}.{names.out}", shape.width)]
        self.out = Linear(q_rows, out, bias=out_bias, dtype=dtype, scheme=scheme)
        self.head_norm = qk_norm if isinstance(qk_norm, QKNorm) else None
        self.qkv_norm = None if isinstance(qk_norm, QKNorm) else qk_norm  # what no kernel of rope takes along
        self.sinks = Weight.whole(f"{prefix}.sinks", (shape.num_heads,), dtype) if shape.sinks else None
        self.join = join or Join()

    def forward(self, stream: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        """stream [tokens, width] -> the stream with this block's share added, of the tokens the plan wants"""
        attended = self.attend(stream, angles, plan)
        stream = plan.pick(stream)
        return self.join(self.out, attended, stream) if len(stream) else stream

    def attend(self, stream: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        """stream [tokens, width] -> what the heads of the tokens that the plan wants see, [n, heads * head_dim]"""
        k_cache, v_cache = plan.planes[2 * self.cache_index], plan.planes[2 * self.cache_index + 1]
        heads = self.head_norm
        q_weight, k_weight, eps = (
            (heads.q_weight, heads.k_weight, heads.eps) if heads is not None else (None, None, 0.0)
        )
        x, norm = fuse_norm(self.norm, stream)
        qkv, gate = self.qkv(x, norm=norm), None
        if self.num_gates:
            gate, qkv = qkv.tensor_split((self.num_gates,), dim=1)
        if self.qkv_norm is not None:
            qkv = self.qkv_norm(qkv)
        if self.shape.clip is not None:
            qkv = qkv.clamp_(-self.shape.clip, self.shape.clip)
        q = self.ops.qk_norm_rope_write(
            qkv, q_weight, k_weight, eps, angles, k_cache, v_cache, plan.slots, self.shape.num_heads
        )
        if isinstance(heads, TurnedQKNorm):
            q = heads.weigh(q)
        if plan.sharpness is not None:
            q = q.flatten(1).mul_(plan.sharpness).view_as(q)
        q = plan.pick(q)
        if not len(q):
            return q
        seen = self.ops.paged_attention(q, k_cache, v_cache, plan.kernel, self.scale, self.shape.softcap, self.sinks)
        return seen if gate is None else self.ops.elementwise(gated, seen, plan.pick(gate))


def _qkv_forms(names: AttentionNames, shape: AttentionShape, is_normed: bool) -> tuple[Form | None, ...]:
    order = shape.order
    if order is not None and is_normed:
        # A norm on the way measures heads as they are and would undo what was done to them before: its own weights
        # undo rope's scale instead.
        order = replace(order, angle_scale=1.0)
    if len(names.qkv) == 3:
        form = None if order is None else order.form
        return form, form, None
    merged = None if order is None else replace(order, num_heads=shape.num_heads + shape.num_kv_heads)
    if names.by_head:
        return (ByHead(shape.num_kv_heads, shape.head_dim, merged).form,)
    return (None if merged is None else merged.form,)


def gated(seen: Tensor, gate: Tensor) -> Tensor:
    return seen * gate.sigmoid()
