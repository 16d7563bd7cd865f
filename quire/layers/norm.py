"""Norms of the residual stream, of a block's output, and of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.layers.build import Build
from quire.layers.head_layout import HeadOrder
from quire.layers.weights import Form, Part, Weight, set_forms


@dataclass(frozen=True, slots=True)
class Offset:
    """A form for checkpoints that store a norm's weight minus `by`."""

    by: float

    def __call__(self, weight: Tensor) -> Tensor:
        return weight + self.by


class RMSNorm(nn.Module):
    """Scales a vector to unit root mean square, then by a weight. Products may fuse it."""

    weight: Tensor

    def __init__(self, name: str, width: int, eps: float, build: Build, offset: float = 0.0):
        super().__init__()
        self.weight = _norm_weight(f"{name}.weight", width, build.dtype, offset)
        self.eps = eps
        self.ops = build.ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add_to(self, stream: Tensor, x: Tensor, factor: float) -> Tensor:
        """Returns stream + factor * norm(x), in the memory of `stream`; both [tokens, width]."""
        if self.ops.norm_add is not None:
            return self.ops.norm_add(x, self.weight, self.eps, stream, factor)
        return stream.add_(self(x), alpha=factor)


class LayerNorm(nn.Module):
    """Subtracts the mean and scales to unit variance, then by a weight and plus a bias."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        name: str,
        width: int,
        eps: float,
        build: Build,
        *,
        weight: bool = True,
        bias: bool = True,
        offset: float = 0.0,
    ):
        super().__init__()
        self.width = width
        self.weight = _norm_weight(f"{name}.weight", width, build.dtype, offset) if weight else None
        self.bias = Weight.whole(f"{name}.bias", (width,), build.dtype) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)


Norm = RMSNorm | LayerNorm


def fuse_norm(norm: Norm | None, x: Tensor) -> tuple[Tensor, RMSNorm | None]:
    """Returns the arguments of the product after a norm: x with an RMSNorm it can fuse, or x already normed."""
    if norm is None or isinstance(norm, RMSNorm):
        return x, norm
    return norm(x), None


class QKNorm(nn.Module):
    """The weights of the norms of each query head and each key head. The rope kernel applies them."""

    q_weight: Tensor
    k_weight: Tensor

    def __init__(
        self,
        prefix: str,
        head_dim: int,
        eps: float,
        build: Build,
        *,
        offset: float = 0.0,
        order: HeadOrder | None = None,
        names: tuple[str, str] = ("q_norm", "k_norm"),
    ):
        """`order`: order of the heads' elements. `names`: names of the two norms in the checkpoint."""
        super().__init__()
        self.q_weight = _norm_weight(f"{prefix}.{names[0]}.weight", head_dim, build.dtype, offset, order)
        self.k_weight = _norm_weight(f"{prefix}.{names[1]}.weight", head_dim, build.dtype, offset, order)
        self.eps = eps


class PostRopeQKNorm(QKNorm):
    """Head norms that the model applies after rope.

    Rope keeps the length of a head, so the rope kernel norms before rope with weights of one. The checkpoint's weights
    are applied after rope. A score is a sum of products, so the weights of keys are applied to the queries as well.
    """

    post_rope_weights: Tensor  # [2, head_dim]: weights of queries and of keys

    def __init__(
        self,
        prefix: str,
        head_dim: int,
        eps: float,
        build: Build,
        *,
        order: HeadOrder | None = None,
        names: tuple[str, str] = ("q_norm", "k_norm"),
    ):
        super().__init__(prefix, head_dim, eps, build, names=names)
        set_forms(self, (torch.ones_like,))
        lines = (
            Part(f"{prefix}.{name}.weight", (head_dim,), row, row + 1, form=order) for row, name in enumerate(names)
        )
        self.post_rope_weights = Weight((2, head_dim), build.dtype, tuple(lines))

    def apply_weights(self, q: Tensor) -> Tensor:
        """Multiplies queries after rope by both weights, in place. q [tokens, heads, head_dim]"""
        return q.mul_(self.post_rope_weights[0] * self.post_rope_weights[1])


class WideQKNorm(nn.Module):
    """Norms queries over all heads together, and keys likewise, before rope."""

    def __init__(
        self,
        prefix: str,
        q_width: int,
        k_width: int,
        head_dim: int,
        eps: float,
        build: Build,
        order: HeadOrder | None = None,
    ):
        """`q_width`, `k_width`: those of all ranks together. `order`: order of the heads' elements."""
        super().__init__()
        self.q_norm = RMSNorm(f"{prefix}.q_norm", q_width, eps, build)
        self.k_norm = RMSNorm(f"{prefix}.k_norm", k_width, eps, build)
        for norm in (self.q_norm, self.k_norm) if order is not None else ():
            set_forms(norm, (order,))
        self.communicator, self.whole_widths = build.communicator, (q_width, k_width)
        self.share = build.heads(q_width // head_dim, k_width // head_dim)
        q_span, k_span = self.share.elements(head_dim)
        for norm, width, span in ((self.q_norm, q_width, q_span), (self.k_norm, k_width, k_span)):
            assert isinstance(norm.weight, Weight)
            norm.weight = build.cut_rows(norm.weight, [(width, span)])
        self.widths = (q_span[1] - q_span[0], k_span[1] - k_span[0])

    def forward(self, qkv: Tensor) -> Tensor:
        """Norms queries and keys in place. qkv [tokens, q_width + 2 k_width]"""
        q_width, k_width = self.widths
        parts = (self.q_norm, qkv[:, :q_width]), (self.k_norm, qkv[:, q_width : q_width + k_width])
        if self.communicator.size == 1:
            for norm, part in parts:
                part.copy_(norm(part.contiguous()))
            return qkv
        squares = torch.stack([part.float().square().sum(1) for _, part in parts], 1)  # [tokens, 2]
        if not self.share.is_first:  # an earlier rank counts these keys
            squares[:, 1] = 0
        widths = torch.tensor(self.whole_widths, dtype=torch.float32, device=qkv.device)
        means = self.communicator.all_reduce(squares) / widths
        for place, (norm, part) in enumerate(parts):
            part.mul_((means[:, place, None] + norm.eps).rsqrt()).mul_(norm.weight)
        return qkv


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The layout of the layer norms of query heads and key heads in a checkpoint."""

    q_name: str = "q_norm"
    k_name: str = "k_norm"
    # one tensor with a row per head; a tensor per head; one tensor for all heads
    kept: Literal["rows", "apart", "shared"] = "rows"
    bias: bool = False


class HeadLayerNorm(nn.Module):
    """Layer norms of each query head and each key head, with weights per head, before rope."""

    weight: Tensor  # [query and key heads, head_dim]
    bias: Tensor | None  # [query and key heads, head_dim]

    def __init__(
        self,
        prefix: str,
        norms: HeadNorms,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        build: Build,
        order: HeadOrder | None = None,
    ):
        """`order`: order of the heads' elements."""
        super().__init__()
        self.eps = eps
        shape = (num_heads + num_kv_heads, head_dim)

        def parts(kind: str, kept: str = norms.kept) -> tuple[Part, ...]:
            q_parts = _head_parts(f"{prefix}.{norms.q_name}", kind, kept, 0, num_heads, head_dim, order)
            k_name = f"{prefix}.{norms.k_name}"
            return q_parts + _head_parts(k_name, kind, kept, num_heads, num_kv_heads, head_dim, order)

        joined = (parts("weight", "rows"),) if norms.kept == "apart" else ()  # the layout of GGUF files
        share = build.heads(num_heads, num_kv_heads)
        rows = [(num_heads, share.heads), (num_kv_heads, share.kv_heads)]
        self.weight = build.cut_rows(Weight(shape, build.dtype, parts("weight"), joined), rows)
        self.bias = build.cut_rows(Weight(shape, build.dtype, parts("bias")), rows) if norms.bias else None

    def forward(self, qkv: Tensor) -> Tensor:
        """Norms queries and keys in place. qkv [tokens, (heads + 2 kv_heads) * head_dim]"""
        num_heads, head_dim = self.weight.shape
        heads = qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
        normed = functional.layer_norm(heads.float(), (head_dim,), eps=self.eps).mul_(self.weight)
        heads.copy_(normed if self.bias is None else normed.add_(self.bias))
        return qkv


def _head_parts(
    name: str, kind: str, kept: str, start: int, num_heads: int, head_dim: int, order: HeadOrder | None
) -> tuple[Part, ...]:
    """Returns the parts of `num_heads` heads, from row `start` on."""
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
    """A form that reorders the elements of head norms and repeats a norm that all heads share."""

    num_heads: int
    head_dim: int
    order: HeadOrder | None

    def __call__(self, weight: Tensor) -> Tensor:
        ordered = weight.flatten() if self.order is None else self.order(weight.flatten())
        return ordered.view(-1, self.head_dim).expand(self.num_heads, -1)


def _norm_weight(name: str, width: int, dtype: torch.dtype, offset: float, order: HeadOrder | None = None) -> Weight:
    """Returns a norm's weight, in float32 if an offset is added: a smaller type would round the stored value away."""
    form: Form | None = Offset(offset) if offset else None
    if order is not None:
        form = _OrderedNorm(order, offset)
    dtype = torch.float32 if offset else dtype
    return Weight((width,), dtype, (Part(name, (width,), 0, width, form=form),))


@dataclass(frozen=True, slots=True)
class _OrderedNorm:
    """A form that adds an offset and reorders."""

    order: HeadOrder
    offset: float

    def __call__(self, weight: Tensor) -> Tensor:
        return self.order(weight + self.offset)
