"""Attention with an output gate, as in Qwen3-Next and Qwen3.5.

The query projection also computes a gate for every element of the attention output. One fused projection returns gates,
queries, keys and values in this order; the rest is the path of `layers.attention`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from quire.kernels.angles import Angles
from quire.layers.attention import AttentionPlan, AttentionShape, gated
from quire.layers.build import Build
from quire.layers.linear import Linear
from quire.layers.norm import QKNorm, RMSNorm
from quire.layers.weights import Reorder, set_forms


class GatedAttention(nn.Module):
    """One attention block whose output is multiplied by the sigmoid of its gates."""

    def __init__(
        self,
        prefix: str,
        norm: RMSNorm,
        shape: AttentionShape,
        cache_index: int,
        *,
        bias: bool,
        build: Build,
        norm_offset: float = 1.0,
    ):
        """`shape`: that of all ranks together."""
        super().__init__()
        assert shape.order is not None
        share = build.heads(shape.num_heads, shape.num_kv_heads)
        self.norm = norm
        self.shape = replace(shape, num_heads=share.num_heads, num_kv_heads=share.num_kv_heads)  # of this rank
        self.cache_index = cache_index
        self.scale = shape.head_dim**-0.5
        self.ops = build.ops
        heads, head_dim = shape.num_heads * shape.head_dim, shape.head_dim
        kv_rows = shape.num_kv_heads * head_dim
        sources = [(f"{prefix}.q_proj", 2 * heads), (f"{prefix}.k_proj", kv_rows), (f"{prefix}.v_proj", kv_rows)]
        q_span, kv_span = share.elements(head_dim)
        split = build.split_outputs([(heads, q_span)] * 2 + [(kv_rows, kv_span)] * 2)
        self.project = Linear(shape.width, sources, bias=bias, build=build, split=split)
        order = replace(shape.order, angle_scale=1.0)  # `qk_norm` undoes rope's scale, as in `layers.attention`

        def gates_first(rows: Tensor) -> Tensor:
            """Reorders the rows of the checkpoint, where each head's queries precede its gates."""
            q, gate = rows.unflatten(0, (-1, 2 * head_dim)).split(head_dim, dim=1)
            return torch.cat((gate.flatten(0, 1), order(q.flatten(0, 1))))

        set_forms(self.project, (Reorder(gates_first), order.form, None))
        out = [(f"{prefix}.o_proj", shape.width)]
        self.out = Linear(heads, out, bias=bias, build=build, split=build.split_inputs(q_span))
        self.qk_norm = QKNorm(prefix, head_dim, norm.eps, build, offset=norm_offset, order=shape.order)

    def forward(self, stream: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        """Returns the residual stream plus this block's output, for the wanted tokens. stream [tokens, width]"""
        k_cache, v_cache = plan.planes[2 * self.cache_index], plan.planes[2 * self.cache_index + 1]
        heads = self.shape.num_heads * self.shape.head_dim
        gate, qkv = self.project(stream, norm=self.norm).tensor_split((heads,), dim=1)
        heads_norm = self.qk_norm
        q = self.ops.qk_norm_rope_write(
            qkv,
            heads_norm.q_weight,
            heads_norm.k_weight,
            heads_norm.eps,
            angles,
            k_cache,
            v_cache,
            plan.slots,
            self.shape.num_heads,
        )
        if plan.wanted is not None:
            q, gate, stream = plan.pick(q), plan.pick(gate), plan.pick(stream)
            if not len(stream):
                return stream
        out = self.ops.paged_attention(q, k_cache, v_cache, plan.kernel, self.scale)
        return self.out(self.ops.elementwise(gated, out, gate), residual=stream)
