"""Runs all layers of a dense model in one call of the native library, and turns a `Step` into its arguments.

`models.families.dense` builds the stack once, if its ops have a native library. On other devices the same layers run
one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from quire.kernels.table import Ops
from quire.layers.adapters import Adapter, AdapterPool, LowRank, Route
from quire.layers.attention import Attention
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP, PlainMLP
from quire.layers.moe import MoE, SharedExpert
from quire.layers.norm import LayerNorm, Norm, WideQKNorm
from quire.layers.rope import Rope
from quire.layers.step import PagedInputs, Step
from quire.types import CacheSpec

if TYPE_CHECKING:
    from quire.kernels.native.adapters import PackedAdapter
    from quire.kernels.native.hooks import Hook
    from quire.kernels.native.library import Native
    from quire.kernels.native.matrix import PackedLinear
    from quire.kernels.native.mixture import MixturePlan
    from quire.kernels.native.stack import LayerPlan, NormPlan, Stack


Block = GatedMLP | PlainMLP | MoE


def fits_stack(block: nn.Module) -> bool:
    """Whether a stack can run a layer with this feed-forward block, or with this mixture (with experts in blocks)."""
    if isinstance(block, MoE) and block.exchange is not None:
        return False  # rows travel between ranks in the middle of it
    if type(block) is not MoE:
        return isinstance(block, GatedMLP | PlainMLP)
    from quire.kernels.native.mixture import MixturePlan

    is_usual = block.shared is None or type(block.shared) is SharedExpert
    return is_usual and isinstance(block.experts.gate_up, list) and MixturePlan.fits(block.routing)


def splits_in_stack(layer: Any) -> bool:
    """Whether a stack can run this rank's share of a layer: it adds no bias to a sum over ranks, and its norms see the
    heads of this rank alone."""
    last = [layer.attention.out] if isinstance(layer.mlp, MoE) else [layer.attention.out, layer.mlp.down]
    return not isinstance(layer.attention.qkv_norm, WideQKNorm) and all(linear.bias_after is None for linear in last)


def plan_layer(attention: Attention, mlp: Block, group: int, rope: int) -> LayerPlan:
    """Returns one layer for the stack. `group`, `rope`: indices into the step's cache groups and the stack's ropes."""
    from quire.kernels.native.stack import LayerPlan

    q_norm, k_norm = None, None
    if attention.head_norm is not None:
        q_norm, k_norm = attention.head_norm.q_weight, attention.head_norm.k_weight
    elif isinstance(attention.qkv_norm, WideQKNorm):
        q_norm, k_norm = attention.qkv_norm.q_norm.weight, attention.qkv_norm.k_norm.weight
    up, down = None, None
    if not isinstance(mlp, MoE):
        up, down = (mlp.gate_up if isinstance(mlp, GatedMLP) else mlp.up).packed, mlp.down.packed
    return LayerPlan(
        before_attention=_plan_norm(attention.norm),
        after_attention=_plan_norm(attention.join.norm),
        before_mlp=_plan_norm(mlp.norm),
        after_mlp=_plan_norm(mlp.join.norm),
        qkv=attention.qkv.packed,  # type: ignore[arg-type]
        out=attention.out.packed,  # type: ignore[arg-type]
        up=up,  # type: ignore[arg-type]
        down=down,  # type: ignore[arg-type]
        mixture=_plan_mixture(mlp) if isinstance(mlp, MoE) else None,
        q_norm=q_norm,
        k_norm=k_norm,
        sinks=attention.sinks,
        group=group,
        cache_index=attention.cache_index,
        rope=rope,
    )


def _plan_mixture(block: MoE) -> MixturePlan:
    from quire.kernels.native.experts import PackedExperts
    from quire.kernels.native.mixture import MixturePlan

    experts, shared = block.experts.weights(), block.shared
    assert isinstance(experts, PackedExperts)
    plan = MixturePlan(
        experts, _pack_floats(block.router, block.router_bias, experts.native), block.routing, block.choice_bias
    )
    if not isinstance(shared, SharedExpert):
        return plan
    gate = None if shared.gate is None else _pack_floats(shared.gate.weight, shared.gate.bias, experts.native)
    up: Any = shared.gate_up.packed
    down: Any = shared.down.packed
    return replace(plan, shared_up=up, shared_down=down, shared_gate=gate)


def _pack_floats(weight: Tensor, bias: Tensor | None, native: Native) -> PackedLinear:
    """Packs a small matrix in float32; it is never quantized."""
    from quire.kernels.native.matrix import PackedLinear, pack_floats

    rows, columns = weight.shape
    matrix = pack_floats(native, "F32", rows, columns, lambda first, count: weight[first : first + count])
    return PackedLinear([matrix], bias)


def _plan_norm(norm: Norm | None) -> NormPlan | None:
    from quire.kernels.native.stack import NormPlan

    if norm is None:
        return None
    if isinstance(norm, LayerNorm):
        return NormPlan(torch.ones(norm.width) if norm.weight is None else norm.weight, norm.bias)
    return NormPlan(norm.weight)


def make_stack(
    ops: Ops,
    embedding: Embedding | None,
    layers: Sequence[LayerPlan],
    norm: Norm | None,
    ropes: Sequence[Rope],
    attention: Attention,
    *,
    activation: str,
    has_gate: bool,
    is_parallel: bool,
    takes_mean: bool,
    eps: float,
    reduction: Hook | None = None,
) -> Stack:
    """Returns the stack of these layers. `attention`: that of any layer, for the settings that all layers share.
    `takes_mean`, `eps`: of all norms. `embedding`, `norm`: None in a pipeline
    stage without them. `reduction`: sums each block's output over ranks; None: one rank."""
    from quire.kernels.native.stack import Stack, StackPlan

    assert ops.native is not None
    shape = attention.shape
    plan = StackPlan(
        embedding=None if embedding is None else embedding.weight[0],  # type: ignore[arg-type]
        width=shape.width,
        layers=layers,
        norm=_plan_norm(norm),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        inner_width=max([layer.down.in_features for layer in layers if layer.down is not None], default=0),
        frequencies=torch.stack([rope.frequencies for rope in ropes]).contiguous(),
        rope_scales=torch.tensor([rope.scale for rope in ropes]),
        activation=activation,
        has_gate=has_gate,
        takes_mean=takes_mean,
        is_parallel=is_parallel,
        is_wide=isinstance(attention.qkv_norm, WideQKNorm),
        eps=eps,
        attention_scale=attention.scale,
        softcap=shape.softcap,
        embedding_scale=1.0 if embedding is None else embedding.scale,
        residual_scale=attention.join.scale,
    )
    return Stack(ops.native, plan, reduction)


def run_stack(
    stack: Stack,
    step: Step,
    specs: Sequence[CacheSpec],
    caches: Mapping[str, Tensor],
    vectors: Tensor | None = None,
    adapters: Hook | None = None,
) -> Tensor:
    """Returns the hidden states of `step.wanted`, [n, width]; writes K and V of every token to `caches`. `vectors`
    [tokens, width]: the embeddings; None: the stack looks them up. `adapters`: called beside every product."""
    from quire.kernels.native.stack import GroupInputs

    groups = []
    for spec in specs:
        inputs = step.groups[spec.group]
        assert isinstance(inputs, PagedInputs)
        cache = caches[spec.group]
        groups.append(GroupInputs(inputs.page_table, inputs.slots, cache, spec.page_tokens, spec.window, spec.packing))
    wanted = None if step.samples is None else step.logits_index
    return stack.run(step.tokens, step.positions, step.query_starts, groups, wanted, adapters, vectors)


Products = Mapping[tuple[int, str], tuple[Linear, int, int]]


def list_products(layers: Sequence[Any]) -> Products:
    """Returns the linear layer of each of a stack's products, by (layer, product), and the product's rows in it."""
    found: dict[tuple[int, str], tuple[Linear, int, int]] = {}
    for index, layer in enumerate(layers):
        shape = layer.attention.shape
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        spans = {"query": (0, q), "key": (q, q + kv), "value": (q + kv, q + 2 * kv)}
        found |= {(index, name): (layer.attention.qkv, *span) for name, span in spans.items()}
        found[index, "out"] = (layer.attention.out, 0, layer.attention.out.out_features)
        mlp = layer.mlp
        if isinstance(mlp, GatedMLP):
            inner = mlp.gate_up.out_features // 2
            found[index, "gate"], found[index, "up"] = (mlp.gate_up, 0, inner), (mlp.gate_up, inner, 2 * inner)
        elif isinstance(mlp, PlainMLP):
            found[index, "up"] = (mlp.up, 0, mlp.up.out_features)
        if not isinstance(mlp, MoE):
            found[index, "down"] = (mlp.down, 0, mlp.down.out_features)
    return found


def pack_adapter(native: Native, adapter: Adapter, products: Products, num_layers: int) -> PackedAdapter:
    """Returns an adapter's updates of a stack's products, packed: in half precision beside quantized weights."""
    from quire.kernels.native.adapters import PackedAdapter, ProductUpdate

    found = []
    is_float = True
    for (layer, product), (linear, start, stop) in products.items():
        place = linear.adapters
        updates = () if place is None else adapter.updates.get(place.place, ())
        for update in updates:
            first, last = max(update.start, start), min(update.stop, stop)
            if isinstance(update, LowRank) and first < last:
                b = update.b[first - update.start : last - update.start]
                found.append(ProductUpdate(layer, product, first - start, update.a, b))
        is_float = is_float and all(part.form == "F32" for part in linear.packed.parts)  # type: ignore[union-attr]
    return PackedAdapter(native, "F32" if is_float else "F16", num_layers, found)


def make_adapter_hook(native: Native, pool: AdapterPool, route: Route) -> Hook:
    """Returns the hook that adds the adapters of a step beside the stack's products."""
    from quire.kernels.native.adapters import LoraHook

    return LoraHook(native, pool.packed, route.slots.astype(np.int32))
