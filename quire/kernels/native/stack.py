"""A whole decoder in one native call: embedding, every layer, the final norm. `DenseModel` describes itself as a
`StackPlan` once its weights are loaded; a step then costs one call instead of ten per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, pointer
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.cache_forms import CACHE_FORMS
from quire.kernels.native.hook_structs import HookFailed
from quire.kernels.native.hooks import Hook
from quire.kernels.native.library import (
    ACTIVATIONS,
    GroupDesc,
    LayerDesc,
    LinearDesc,
    Matrix,
    MixtureDesc,
    Native,
    NormDesc,
    StackDesc,
    StepDesc,
)
from quire.kernels.native.matrix import PackedLinear, PackedMatrix
from quire.kernels.native.mixture import MixturePlan


@dataclass(frozen=True, slots=True)
class NormPlan:
    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerPlan:
    before_attention: NormPlan | None
    after_attention: NormPlan | None
    before_mlp: NormPlan | None
    after_mlp: NormPlan | None
    qkv: PackedLinear
    out: PackedLinear
    up: PackedLinear | None  # gate and up concatenated if the block is gated
    down: PackedLinear | None
    mixture: MixturePlan | None  # replaces `up` and `down`
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None  # [heads]
    group: int  # index of its cache group
    cache_index: int  # index of the layer in that group's cache
    rope: int  # index into the stack's ropes


@dataclass(frozen=True, slots=True)
class StackPlan:
    """Description of a dense decoder, with the fields of `DenseConfig`."""

    embedding: PackedMatrix | None  # None: every step brings its vectors
    width: int
    layers: Sequence[LayerPlan]
    norm: NormPlan | None  # None: a later pipeline stage has it
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_width: int  # width of the widest feed-forward block without experts
    frequencies: Tensor  # [ropes, head_dim / 2]
    rope_scales: Tensor  # [ropes]
    activation: str  # a key of ACTIVATIONS
    has_gate: bool
    takes_mean: bool  # layer norm instead of RMS norm
    is_parallel: bool  # attention and feed-forward read the same input
    is_wide: bool  # QK norm over all heads at once instead of per head
    eps: float
    attention_scale: float
    softcap: float | None
    embedding_scale: float
    residual_scale: float


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """One paged cache group in one step."""

    page_table: Tensor  # [rows, max_pages] int32
    slots: Tensor  # [tokens] int64
    cache: Tensor  # [layers, 2, pages, page_tokens, kv_heads, head_dim]; packed: see `packed_planes`
    page_tokens: int
    window: int | None
    packing: str = ""  # a key of CACHE_FORMS; "": floats


class Stack:
    def __init__(self, native: Native, plan: StackPlan, reduction: Hook | None = None):
        """`reduction`: sums each block's output over ranks before it comes to the residual stream; None: one rank."""
        self.native = native
        self._reduction = reduction
        self._plan = plan  # keeps the memory alive that the descriptors point to
        self._width = plan.width
        self._mixtures = [None if layer.mixture is None else layer.mixture.describe() for layer in plan.layers]
        layers = (_describe(*pair) for pair in zip(plan.layers, self._mixtures, strict=True))
        self._layers = (LayerDesc * len(plan.layers))(*layers)
        self._desc = StackDesc(
            Matrix() if plan.embedding is None else plan.embedding.desc,
            self._layers,
            len(plan.layers),
            _norm(plan.norm),
            plan.frequencies.data_ptr(),
            plan.rope_scales.data_ptr(),
            len(plan.rope_scales),
            self._width,
            plan.num_heads,
            plan.num_kv_heads,
            plan.head_dim,
            plan.inner_width,
            ACTIVATIONS[plan.activation],
            plan.has_gate,
            plan.takes_mean,
            plan.is_parallel,
            plan.is_wide,
            plan.eps,
            plan.attention_scale,
            plan.softcap or 0.0,
            plan.embedding_scale,
            plan.residual_scale,
            None if reduction is None else pointer(reduction.reduction()),
        )

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        query_starts: Tensor,
        groups: Sequence[GroupInputs],
        wanted: Tensor | None = None,
        adapters: Hook | None = None,
        vectors: Tensor | None = None,
    ) -> Tensor:
        """Runs the decoder. `tokens` and `positions` are [tokens] int64, `query_starts` [rows + 1] int32. Returns the
        normed hidden states of the `wanted` tokens (ascending; None: all), [n, width], and writes the keys and values
        of all tokens to the groups' caches. `adapters` are called beside every product of the step. `vectors` [tokens,
        width] float32: the embeddings of the tokens; None: the stack looks them up."""
        descs = (GroupDesc * len(groups))(*(_group(group) for group in groups))
        step = StepDesc(
            tokens.data_ptr(),
            positions.data_ptr(),
            query_starts.data_ptr(),
            len(tokens),
            len(query_starts) - 1,
            descs,
            _address(wanted),
            -1 if wanted is None else len(wanted),
            None if adapters is None else pointer(adapters.adapters()),
            _address(vectors),
        )
        out = torch.empty(len(tokens) if wanted is None else len(wanted), self._width)
        try:
            self.native.library.quire_stack(self.native.context, byref(self._desc), byref(step), out.data_ptr())
        except HookFailed:
            for hook in (self._reduction, adapters):
                if hook is not None:
                    hook.raise_failure()
            raise
        return out


def _describe(layer: LayerPlan, mixture: MixtureDesc | None) -> LayerDesc:
    up, down = (LinearDesc() if linear is None else linear.desc for linear in (layer.up, layer.down))
    return LayerDesc(
        _norm(layer.before_attention),
        _norm(layer.after_attention),
        _norm(layer.before_mlp),
        _norm(layer.after_mlp),
        layer.qkv.desc,
        layer.out.desc,
        up,
        down,
        _address(layer.q_norm),
        _address(layer.k_norm),
        _address(layer.sinks),
        None if mixture is None else pointer(mixture),
        layer.group,
        layer.cache_index,
        layer.rope,
    )


def _norm(norm: NormPlan | None) -> NormDesc:
    return NormDesc() if norm is None else NormDesc(norm.weight.data_ptr(), _address(norm.bias))


def _group(inputs: GroupInputs) -> GroupDesc:
    cache = inputs.cache
    return GroupDesc(
        inputs.page_table.data_ptr(),
        inputs.page_table.stride(0),
        inputs.slots.data_ptr(),
        cache.data_ptr(),
        cache.stride(1),
        inputs.page_tokens,
        inputs.window or 0,
        CACHE_FORMS[inputs.packing].number if inputs.packing else 0,
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
