"""Norms: of the residual stream, of a block's output, and of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.kernels.table import Ops
from quire.layers.head_layout import HeadOrder
from quire.layers.weights import Form, Part, Weight, set_forms


@dataclass(frozen=True, slots=True)
class Offset:
    """Checkpoints that keep a norm's weight less one: zero stands for one."""

    by: float

    def __call__(self, weight: Tensor) -> Tensor:
        return weight + self.by


class RMSNorm(nn.Module):
    weight: Tensor

    def __init__(self, name: str, width: int, eps: float, dtype: torch.dtype, ops: Ops, offset: float = 0.0):
        super().__init__()
        self.weight = _norm_weight(f"{name}.weight", width, dtype, offset)
        self.eps = eps
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add_to(self, stream: Tensor, x: Tensor, factor: float) -> Tensor:
        """The stream plus `factor` times the norm of x, both [tokens, width], in the stream's memory."""
        if self.ops.norm_add is not None:
            return self.ops.norm_add(x, self.weight, self.eps, stream, factor)
        return stream.add_(self(x), alpha=factor)


class LayerNorm(nn.Module):
    """Mean taken off, then scaled to unit variance. Older families, and those that kept to it."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        name: str,
        width: int,
        eps: float,
        dtype: torch.dtype,
        *,
        weight: bool = True,
        bias: bool = True,
        offset: float = 0.0,
    ):
        super().__init__()
        self.width = width
        self.weight = _norm_weight(f"{name}.weight", width, dtype, offset) if weight else None
        self.bias = Weight.whole(f"{name}.bias", (width,), dtype) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)


Norm = RMSNorm | LayerNorm


def fuse_norm(norm: Norm | None, x: Tensor) -> tuple[Tensor, RMSNorm | None]:
    """What a product is to be given: x and the norm it may take along, or x normed where it can't."""
    if norm is None or isinstance(norm, RMSNorm):
        return x, norm
    return norm(x), None


class QKNorm(nn.Module):
    """The weights that norm each query head and each key head; applied where rope is, in one kernel."""

    q_weight: Tensor
    k_weight: Tensor

    def __init__(
        self,
        prefix: str,
        head_dim: int,
        eps: float,
        dtype: torch.dtype,
        *,
        offset: float = 0.0,
        order: HeadOrder | None = None,
        names: tuple[str, str] = ("q_norm", "k_norm"),
    ):
        """`order`: that of the heads the weights are for; `names`: what the checkpoint calls them."""
        super().__init__()
        self.q_weight = _norm_weight(f"{prefix}.{names[0]}.weight", head_dim, dtype, offset, order)
        self.k_weight = _norm_weight(f"{prefix}.{names[1]}.weight", head_dim, dtype, offset, order)
        self.eps = eps


class TurnedQKNorm(QKNorm):
    """Norms of heads behind rope. How long a head is rope does not change, so that is measured where others have it,
    with weights of one. The checkpoint's come behind rope, to queries alone, those of keys as well: a score is a sum of
    products."""

    behind: Tensor  # [2, head_dim]: of queries, of keys

    def __init__(
        self,
        prefix: str,
        head_dim: int,
        eps: float,
        dtype: torch.dtype,
        *,
        order: HeadOrder | None = None,
        names: tuple[str, str] = ("q_norm", "k_norm"),
    ):
        super().__init__(prefix, head_dim, eps, dtype, names=names)
        set_forms(self, (torch.ones_like,))
        lines = (
            Part(f"{prefix}.{name}.weight", (head_dim,), row, row + 1, form=order) for row, name in enumerate(names)
        )
        self.behind = Weight((2, head_dim), dtype, tuple(lines))

    def weigh(self, q: Tensor) -> Tensor:
        """q [tokens, heads, head_dim], turned; changed in place"""
        return q.mul_(self.behind[0] * self.behind[1])


class WideQKNorm(nn.Module):
    """Queries normed over all their heads together, and keys over all theirs, before rope."""

    def __init__(
        self,
        prefix: str,
        q_width: int,
        k_width: int,
        eps: float,
        dtype: torch.dtype,
        ops: Ops,
        order: HeadOrder | None = None,
    ):
        """`order`: that of the heads the weights are for."""
        super().__init__()
        self.q_norm = RMSNorm(f"{prefix}.q_norm", q_width, eps, dtype, ops)
        self.k_norm = RMSNorm(f"{prefix}.k_norm", k_width, eps, dtype, ops)
        for norm in (self.q_norm, self.k_norm) if order is not None else ():
            set_forms(norm, (order,))
        self.widths = (q_width, k_width)

    def forward(self, qkv: Tensor) -> Tensor:
        """qkv [tokens, q_width + 2 k_width], changed in place"""
        q_width, k_width = self.widths
        for norm, start, width in ((self.q_norm, 0, q_width), (self.k_norm, q_width, k_width)):
            part = qkv[:, start : start + width]
            part.copy_(norm(part.contiguous()))
        return qkv


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """How a checkpoint keeps the layer norms of query heads and key heads."""

    q_name: str = "q_norm"
    k_name: str = "k_norm"
    kept: Literal["rows", "apart", "shared"] = "rows"  # of one tensor; a tensor for each head; one that all heads share
    bias: bool = False


class HeadLayerNorm(nn.Module):
    """Each query head and each key head normed with its mean taken off, by weights of its own, before rope."""

    weight: Tensor  # [query and key heads, head_dim]
    bias: Tensor | None  # likewise

    def __init__(
        self,
        prefix: str,
        norms: HeadNorms,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        dtype: torch.dtype,
        order: HeadOrder | None = None,
    ):
        """`order`: that of the heads the weights are for."""
        super().__init__()
        self.eps = eps
        shape = (num_heads + num_kv_heads, head_dim)

        def parts(kind: str, kept: str = norms.kept) -> tuple[Part, ...]:
            q_parts = _head_parts(f"{prefix}.{norms.q_name}", kind, kept, 0, num_heads, head_dim, order)
            k_name = f"{prefix}.{norms.k_name}"
            return q_parts + _head_parts(k_name, kind, kept, num_heads, num_kv_heads, head_dim, order)

        joined = (parts("weight", "rows"),) if norms.kept == "apart" else ()  # as GGUF files have them
        self.weight = Weight(shape, dtype, parts("weight"), joined)
        self.bias = Weight(shape, dtype, parts("bias")) if norms.bias else None

    def forward(self, qkv: Tensor) -> Tensor:
        """qkv [tokens, (heads + 2 kv_heads) * head_dim], changed in place"""
        num_heads, head_dim = self.weight.shape
        heads = qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
        normed = functional.layer_norm(heads.float(), (head_dim,), eps=self.eps).mul_(self.weight)
        heads.copy_(normed if self.bias is None else normed.add_(self.bias))
        return qkv


def _head_parts(
    name: str, kind: str, kept: str, start: int, num_heads: int, head_dim: int, order: HeadOrder | None
) -> tuple[Part, ...]:
    """The rows of `num_heads` heads, from row `start` on."""
    if kept == "apart":
        form = _HeadRows(1, head_dim, order)
        return tuple(
            Part(f"{name}.norms.{head}.{kind}", (head_dim,), start + head, start + head + 1, form=form)
            for head in range(num_heads)
        )
    shape = (num_heads, head_dim) if kept == "rows" else (head_dim,)
    form = _HeadRows(num_heads, head_dim, order)
    return (Part(f"{name}.{kind}", shape, start, start + num_heads, form=form),)


@dataclass(frozen=True, slots=True)
class _HeadRows:
    """One row for each head, in our order, of a tensor that has as many or one for all."""

    num_heads: int
    head_dim: int
    order: HeadOrder | None

    def __call__(self, weight: Tensor) -> Tensor:
        ordered = weight.flatten() if self.order is None else self.order(weight.flatten())
        return ordered.view(-1, self.head_dim).expand(self.num_heads, -1)


def _norm_weight(name: str, width: int, dtype: torch.dtype, offset: float, order: HeadOrder | None = None) -> Weight:
    """In float32 where something is added to it: next to one, a small type would round it away."""
    form: Form | None = Offset(offset) if offset else None
    if order is not None:
        form = _OrderedNorm(order, offset)
    dtype = torch.float32 if offset else dtype
    return Weight((width,), dtype, (Part(name, (width,), 0, width, form=form),))


@dataclass(frozen=True, slots=True)
class _OrderedNorm:
    order: HeadOrder
    offset: float

    def __call__(self, weight: Tensor) -> Tensor:
        return self.order(weight + self.offset)
