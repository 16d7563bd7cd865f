"""A whole dense decoder in one call: embedding, every layer, the last norm. `DenseModel` describes itself as a
`StackPlan` once its weights are real; a step then costs one call instead of ten per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.native.library import GroupDesc, LayerDesc, Native, StackDesc, StepDesc
from quire.kernels.native.matrix import PackedLinear, PackedMatrix


@dataclass(frozen=True, slots=True)
class LayerPlan:
    attention_norm: Tensor
    qkv: PackedLinear
    out: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    group: int  # which of the groups of a step
    cache_index: int  # its place in that group


@dataclass(frozen=True, slots=True)
class StackPlan:
    embedding: PackedMatrix
    layers: Sequence[LayerPlan]
    norm: Tensor
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_width: int
    frequencies: Tensor  # [head_dim / 2]
    rope_scale: float
    attention_scale: float


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """One paged group in one step."""

    page_table: Tensor  # [rows, max_pages] int32
    slots: Tensor  # [tokens] int64
    cache: Tensor  # [layers, 2, pages, page_tokens, kv_heads, head_dim]
    page_tokens: int
    window: int | None


class Stack:
    def __init__(self, native: Native, plan: StackPlan):
        self.native = native
        self._plan = plan  # keeps the memory that the descriptions point to
        self._width = plan.embedding.shape[1]
        self._layers = (LayerDesc * len(plan.layers))(*(_describe(layer) for layer in plan.layers))
        self._desc = StackDesc(
            plan.embedding.desc, self._layers, len(plan.layers), plan.norm.data_ptr(), plan.frequencies.data_ptr(),
            self._width, plan.num_heads, plan.num_kv_heads, plan.head_dim, plan.inner_width, plan.eps, plan.rope_scale,
            plan.attention_scale,
        )  # fmt: skip

    def run(self, tokens: Tensor, positions: Tensor, query_starts: Tensor, groups: Sequence[GroupInputs],
            wanted: Tensor | None = None) -> Tensor:  # fmt: skip
        """tokens, positions [tokens] int64, query_starts [rows + 1] int32 -> normed hidden states of those `wanted`
        (ascending; None: all), [n, width]. Keys and values of all tokens are left in the groups' caches."""
        descs = (GroupDesc * len(groups))(*(_group(group) for group in groups))
        step = StepDesc(
            tokens.data_ptr(), positions.data_ptr(), query_starts.data_ptr(), len(tokens), len(query_starts) - 1,
            descs, _place(wanted), -1 if wanted is None else len(wanted),
        )  # fmt: skip
        out = torch.empty(len(tokens) if wanted is None else len(wanted), self._width)
        self.native.library.quire_stack(self.native.context, byref(self._desc), byref(step), out.data_ptr())
        return out


def _describe(layer: LayerPlan) -> LayerDesc:
    return LayerDesc(
        layer.attention_norm.data_ptr(), layer.qkv.desc, layer.out.desc, _place(layer.q_norm), _place(layer.k_norm),
        layer.mlp_norm.data_ptr(), layer.gate_up.desc, layer.down.desc, layer.group, layer.cache_index,
    )  # fmt: skip


def _group(inputs: GroupInputs) -> GroupDesc:
    cache = inputs.cache
    return GroupDesc(
        inputs.page_table.data_ptr(), inputs.page_table.stride(0), inputs.slots.data_ptr(), cache.data_ptr(),
        cache.stride(1), inputs.page_tokens, inputs.window or 0,
    )  # fmt: skip


def _place(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
