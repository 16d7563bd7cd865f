"""Grouped-query attention over a paged cache: one merged projection, rope, cache write, attention, output.

A model makes one `AttentionPlan` per cache group at the start of a step; every layer of the group then works from it,
so that what depends only on the step is done once and not once per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire.kernels.angles import Angles
from quire.kernels.table import Ops
from quire.layers.linear import Linear
from quire.layers.norm import QKNorm, RMSNorm
from quire.layers.quant.scheme import Scheme
from quire.layers.step import PagedInputs, Step
from quire.types import CacheSpec


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of one group share in one step."""

    planes: tuple[Tensor, ...]  # key and value cache of each layer in turn: [pages, page_tokens, kv_heads, head_dim]
    slots: Tensor  # [tokens] int64
    kernel: Any  # what the chosen kernel wants to know of the step
    wanted: Tensor | None = None  # [n] int64: the tokens that attend; None: all. Keys and values are left of every one


def plan_attention(step: Step, spec: CacheSpec, cache: Tensor, ops: Ops) -> AttentionPlan:
    """`cache` is the group's whole memory, [layers, 2, pages, page_tokens, kv_heads, head_dim]."""
    inputs = step.groups[spec.group]
    assert isinstance(inputs, PagedInputs)
    # Positions and pages are gathered before the embedding, so whoever comes after it may read them early.
    permanent = {} if inputs.row_index is None else {"row_index": inputs.row_index, "early": True}
    kernel = ops.plan_attention(
        inputs.page_table, step.positions, step.counts, step.len_bounds, spec.page_tokens, spec.window, cache.dtype,
        **permanent,
    )  # fmt: skip
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
    return AttentionPlan(plan.planes, plan.slots, kernel, index)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Attention(nn.Module):
    def __init__(self, prefix: str, norm: RMSNorm, shape: AttentionShape, cache_index: int, *, qkv_bias: bool,
                 out_bias: bool, qk_norm_eps: float | None, dtype: torch.dtype, ops: Ops, scheme: Scheme):  # fmt: skip
        """`cache_index`: this layer's place within its cache group; `qk_norm_eps` None: no such norm."""
        super().__init__()
        self.norm = norm
        self.shape = shape
        self.cache_index = cache_index
        self.scale = shape.head_dim**-0.5
        self.ops = ops
        heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        kv_rows = kv_heads * head_dim
        qkv = [(f"{prefix}.q_proj", heads * head_dim), (f"{prefix}.k_proj", kv_rows), (f"{prefix}.v_proj", kv_rows)]
        self.qkv = Linear(shape.width, qkv, bias=qkv_bias, dtype=dtype, scheme=scheme)
        out = [(f"{prefix}.o_proj", shape.width)]
        self.out = Linear(heads * head_dim, out, bias=out_bias, dtype=dtype, scheme=scheme)
        self.qk_norm = None
        if qk_norm_eps is not None:
            self.qk_norm = QKNorm(prefix, head_dim, qk_norm_eps, dtype)

    def forward(self, stream: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        """stream [tokens, width] -> the stream with this block's share added, of the tokens the plan wants"""
        k_cache, v_cache = plan.planes[2 * self.cache_index], plan.planes[2 * self.cache_index + 1]
        norm = self.qk_norm
        q_weight, k_weight, eps = (norm.q_weight, norm.k_weight, norm.eps) if norm is not None else (None, None, 0.0)
        qkv = self.qkv(stream, norm=self.norm)
        q = self.ops.qk_norm_rope_write(
            qkv, q_weight, k_weight, eps, angles, k_cache, v_cache, plan.slots, self.shape.num_heads
        )
        if plan.wanted is not None:
            q, stream = q[plan.wanted], stream[plan.wanted]
            if not len(stream):
                return stream
        return self.out(self.ops.paged_attention(q, k_cache, v_cache, plan.kernel, self.scale), residual=stream)
