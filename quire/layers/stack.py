"""From a dense model's layers to one native call that runs them all, and from a `Step` to that call's arguments.

`models.dense` asks for it once, where its ops have a native library; the layers themselves stay what they are, and run
one by one everywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from quire.kernels.table import Ops
from quire.layers.attention import Attention
from quire.layers.embedding import Embedding
from quire.layers.mlp import GatedMLP
from quire.layers.norm import Norm
from quire.layers.rope import Rope
from quire.layers.step import PagedInputs, Step
from quire.types import CacheSpec

if TYPE_CHECKING:
    from quire.kernels.native.stack import LayerPlan, Stack


def plan_layer(attention: Attention, mlp: GatedMLP, group: int) -> LayerPlan:
    from quire.kernels.native.stack import LayerPlan

    norm = attention.head_norm
    return LayerPlan(
        attention_norm=_weight(attention.norm),
        qkv=attention.qkv.packed,  # type: ignore[arg-type]
        out=attention.out.packed,  # type: ignore[arg-type]
        q_norm=None if norm is None else norm.q_weight,
        k_norm=None if norm is None else norm.k_weight,
        mlp_norm=_weight(mlp.norm),
        gate_up=mlp.gate_up.packed,  # type: ignore[arg-type]
        down=mlp.down.packed,  # type: ignore[arg-type]
        group=group,
        cache_index=attention.cache_index,
    )


def _weight(norm: Norm | None) -> Tensor:
    assert norm is not None and norm.weight is not None, "only plain layers run natively"
    return norm.weight


def make_stack(ops: Ops, embedding: Embedding, layers: Sequence[LayerPlan], norm: Norm, rope: Rope,
               attention: Attention) -> Stack:  # fmt: skip
    """`attention`: any layer's, for the shape they all share."""
    from quire.kernels.native.stack import Stack, StackPlan

    assert ops.native is not None
    shape = attention.shape
    plan = StackPlan(
        embedding=embedding.weight[0],  # type: ignore[arg-type]
        layers=layers,
        norm=_weight(norm),
        eps=norm.eps,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        inner_width=layers[0].down.in_features,
        frequencies=rope.frequencies,
        rope_scale=rope.scale,
        attention_scale=attention.scale,
    )
    return Stack(ops.native, plan)


def run_stack(stack: Stack, step: Step, specs: Sequence[CacheSpec], caches: Mapping[str, Tensor]) -> Tensor:
    """The hidden states `step.wanted`, [n, width]; keys and values of every token are left in `caches`."""
    from quire.kernels.native.stack import GroupInputs

    groups = []
    for spec in specs:
        inputs = step.groups[spec.group]
        assert isinstance(inputs, PagedInputs)
        groups.append(GroupInputs(inputs.page_table, inputs.slots, caches[spec.group], spec.page_tokens, spec.window))
    wanted = None if step.samples is None else step.logits_index
    return stack.run(step.tokens, step.positions, step.query_starts, groups, wanted)
