"""Grouped-query attention over a paged KV cache: fused QKV projection, rope, cache write, attention, output projection.

A model makes one `AttentionPlan` per cache group at the start of a step. All layers of the group share it, so that work
that depends only on the step is done once per step, not once per layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.angles import Angles
from quire.kernels.cache_forms import packed_planes
from quire.kernels.table import Ops
from quire.layers.build import Build
from quire.layers.head_layout import ByHead, HeadOrder
from quire.layers.linear import Linear
from quire.layers.norm import HeadLayerNorm, Norm, PostRopeQKNorm, QKNorm, WideQKNorm, fuse_norm
from quire.layers.residual_join import ResidualJoin
from quire.layers.step import PagedInputs, Step
from quire.layers.weights import Form, Weight, set_forms
from quire.types import CacheSpec


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The inputs that all layers of one cache group share in one step."""

    planes: tuple[Any, ...]  # K and V cache of each layer in turn: [pages, page_tokens, kv_heads, head_dim] each
    slots: Tensor  # [tokens] int64
    kernel: Any  # the selected attention kernel's own plan of the step
    # [n] int64: tokens whose attention output is computed; None: all. K and V of every token are written to the cache.
    wanted: Tensor | None = None
    query_scale: Tensor | None = None  # [tokens, 1] float32: factor of the queries; None: 1

    def pick(self, x: Tensor) -> Tensor:
        """Returns the rows of x [tokens, ...] whose attention output is computed."""
        return x if self.wanted is None else x[self.wanted]


def plan_attention(step: Step, spec: CacheSpec, cache: Tensor, ops: Ops) -> AttentionPlan:
    """Returns the plan of one group. cache [layers, 2, pages, page_tokens, kv_heads, head_dim], or packed"""
    inputs = step.groups[spec.group]
    assert isinstance(inputs, PagedInputs)
    # Positions and pages are gathered before the embedding runs, so kernels launched after it may read them early.
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
    planes = packed_planes(cache, spec.packing) if spec.packing else ops.planes(cache)
    return AttentionPlan(planes, inputs.slots, kernel)


def plan_sampled_attention(plan: AttentionPlan, step: Step, spec: CacheSpec, cache: Tensor, ops: Ops) -> AttentionPlan:
    """Returns the plan of a model's last layer, which computes attention output only for tokens that are sampled.

    The other tokens' outputs have no reader: a prompt of thousands of tokens costs this layer one query and one token
    of its feed-forward block.
    """
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
class QueryScaling:
    """Scales queries by their position, because a softmax over many keys would be too flat.

    The factor is 1 within the first `length` positions.
    """

    by: float
    length: int

    def at(self, positions: Tensor) -> Tensor:
        """Returns the factors of the queries. positions [tokens] -> [tokens, 1] float32"""
        times = positions.clamp(min=0) // self.length  # rows that pad a captured step have positions below 0
        return (1 + self.by * torch.log1p(times.float())).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes and options of an attention block."""

    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None  # of scores; None: head_dim ** -0.5
    softcap: float | None = None  # bound of the scores, by tanh
    order: HeadOrder | None = None  # reorders the checkpoint's heads while loading; None: as they are
    sinks: bool = False  # attention sinks: one learned logit per head, without a value
    clip: float | None = None  # bound of queries, keys and values, after their norm and before rope

    @property
    def activation_elements(self) -> int:
        """Elements of activations alive at one time, per token."""
        return (4 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """The names of a layer's projections in a checkpoint."""

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # or one name, of a fused QKV tensor
    out: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")  # norms of query heads and of key heads, if the model has them
    block: str = "self_attn"  # prefix of all these names
    by_head: bool = False  # the fused QKV tensor is ordered by key head: its queries, its key, its value
    gate: str | None = None  # projection whose sigmoid gates each element of the attention output; None: no gate


class Attention(nn.Module):
    """One attention block: norm, fused QKV projection, rope and cache write, attention, output projection."""

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
        build: Build,
        names: AttentionNames | None = None,
        join: ResidualJoin | None = None,
    ):
        """`shape`: that of all ranks together. `cache_index`: index of this layer in its cache group. `join`: adds the
        output to the residual stream."""
        super().__init__()
        share = build.heads(shape.num_heads, shape.num_kv_heads)
        names = names or AttentionNames()
        self.norm = norm
        self.shape = replace(shape, num_heads=share.num_heads, num_kv_heads=share.num_kv_heads)  # of this rank
        self.cache_index = cache_index
        self.scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
        self.ops = build.ops
        q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        rows = [q_rows, kv_rows, kv_rows] if len(names.qkv) == 3 else [q_rows + 2 * kv_rows]
        sources = [(f"{prefix}.{name}", count) for name, count in zip(names.qkv, rows, strict=True)]
        gates = [] if names.gate is None else [(f"{prefix}.{names.gate}", q_rows)]
        q_span, kv_span = share.elements(shape.head_dim)
        self.num_gates = len(gates) * (q_span[1] - q_span[0])  # gate elements per token, which precede its queries
        spans = [(q_rows, q_span)] * (len(gates) + 1) + [(kv_rows, kv_span)] * 2
        split = build.split_outputs(spans)
        self.qkv = Linear(shape.width, [*gates, *sources], bias=qkv_bias, build=build, split=split)
        set_forms(self.qkv, (*(None for _ in gates), *_qkv_forms(names, shape, is_normed=qk_norm is not None)))
        out = [(f"{prefix}.{names.out}", shape.width)]
        self.out = Linear(q_rows, out, bias=out_bias, build=build, split=build.split_inputs(q_span))
        self.head_norm = qk_norm if isinstance(qk_norm, QKNorm) else None
        self.qkv_norm = None if isinstance(qk_norm, QKNorm) else qk_norm  # norms that the rope kernel does not fuse
        self.sinks = None
        if shape.sinks:
            sinks = Weight.whole(f"{prefix}.sinks", (shape.num_heads,), build.dtype)
            self.sinks = build.cut_rows(sinks, [(shape.num_heads, share.heads)])
        self.join = join or ResidualJoin()

    def forward(self, stream: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        """Returns the residual stream plus this block's output, for the wanted tokens. stream [tokens, width]"""
        attended = self.attend(stream, angles, plan)
        stream = plan.pick(stream)
        return self.join(self.out, attended, stream) if len(stream) else stream

    def attend(self, stream: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        """Returns the attention output before the output projection, for the wanted tokens.

        stream [tokens, width] -> [n, heads * head_dim]
        """
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
        if isinstance(heads, PostRopeQKNorm):
            q = heads.apply_weights(q)
        if plan.query_scale is not None:
            q = q.flatten(1).mul_(plan.query_scale).view_as(q)
        q = plan.pick(q)
        if not len(q):
            return q
        seen = self.ops.paged_attention(q, k_cache, v_cache, plan.kernel, self.scale, self.shape.softcap, self.sinks)
        return seen if gate is None else self.ops.elementwise(gated, seen, plan.pick(gate))


def _qkv_forms(names: AttentionNames, shape: AttentionShape, is_normed: bool) -> tuple[Form | None, ...]:
    order = shape.order
    if order is not None and is_normed:
        # A norm of the heads would cancel a scale in the projection's weights, so the norm's weights undo rope's scale.
        order = replace(order, angle_scale=1.0)
    if len(names.qkv) == 3:
        form = None if order is None else order.form
        return form, form, None
    merged = None if order is None else replace(order, num_heads=shape.num_heads + shape.num_kv_heads)
    if names.by_head:
        return (ByHead(shape.num_kv_heads, shape.head_dim, merged).form,)
    return (None if merged is None else merged.form,)


def gated(seen: Tensor, gate: Tensor) -> Tensor:
    """Returns the attention output times the sigmoid of its gate."""
    return seen * gate.sigmoid()
