"""Latent attention (MLA): queries, keys and values through low ranks, and a cache that keeps the latent alone.

Three forms of one computation. `absorbed` is what runs: queries are brought into the latent's space, attention reads
each cache entry once for all heads, and the result is brought back. `expanded` keeps the same cache but works out every
head's keys and values from it; `naive` caches those in full. They are the oracles, and run on the reference kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.kernels.angles import Angles
from quire.kernels.reference.latent import expanded_attention, turn
from quire.kernels.table import Ops
from quire.layers.attention import AttentionPlan
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.quant.scheme import Scheme
from quire.layers.weights import Part, Weight
from quire.types import CacheSpec

Form = Literal["absorbed", "expanded", "naive"]
NORM_EPS = 1e-6  # of the norms inside: not the config's


@dataclass(frozen=True, slots=True)
class LatentShape:
    width: int
    num_heads: int
    rank: int  # of keys and values: the latent's length
    q_rank: int | None  # None: queries come straight from the stream
    nope_dim: int  # of a head's query and key, the part that knows no position
    rope_dim: int
    value_dim: int
    scale: float
    interleaved: bool  # the checkpoint's rope turns neighbours, not halves
    bias: bool = False

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def activation_elements(self) -> int:
        """That a token has alive at one time."""
        return self.num_heads * (2 * self.head_dim + self.rope_dim + 2 * self.rank + 2 * self.value_dim)


def latent_spec(
    shape: LatentShape, form: Form, layers: tuple[int, ...], dtype: torch.dtype, page_tokens: int
) -> CacheSpec:
    if form == "naive":
        entry, planes = (shape.num_heads, max(shape.head_dim, shape.value_dim)), 2
    else:
        entry, planes = (1, shape.rank + shape.rope_dim), 1
    name = str(dtype).removeprefix("torch.")
    return CacheSpec("latent", "paged", layers, entry, name, planes, page_tokens)


class LatentAttention(nn.Module):
    up: Tensor  # [heads * (nope_dim + value_dim), rank]: what makes a latent every head's key and value

    def __init__(
        self,
        prefix: str,
        norm: RMSNorm,
        shape: LatentShape,
        cache_index: int,
        *,
        form: Form,
        dtype: torch.dtype,
        ops: Ops,
        scheme: Scheme,
    ):
        super().__init__()
        self.norm = norm
        self.shape = shape
        self.cache_index = cache_index
        self.form = form
        self.ops = ops
        rows = shape.num_heads * shape.head_dim
        first = ("q_a_proj", shape.q_rank) if shape.q_rank is not None else ("q_proj", rows)
        self.first_width = first[1]
        sources = [
            (f"{prefix}.{name}", out) for name, out in (first, ("kv_a_proj_with_mqa", shape.rank + shape.rope_dim))
        ]
        self.down = Linear(shape.width, sources, bias=shape.bias, dtype=dtype, scheme=scheme)
        self.q_norm, self.q_up = None, None
        if shape.q_rank is not None:
            self.q_norm = RMSNorm(f"{prefix}.q_a_layernorm", shape.q_rank, NORM_EPS, dtype, ops)
            self.q_up = Linear(shape.q_rank, [(f"{prefix}.q_b_proj", rows)], dtype=dtype, scheme=scheme)
        self.latent_norm = RMSNorm(f"{prefix}.kv_a_layernorm", shape.rank, NORM_EPS, dtype, ops)
        self.up = _up_weight(prefix, shape, dtype)
        out = [(f"{prefix}.o_proj", shape.width)]
        self.out = Linear(shape.num_heads * shape.value_dim, out, bias=shape.bias, dtype=dtype, scheme=scheme)

    def forward(self, stream: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        """stream [tokens, width] -> the stream with this block's share added, of the tokens the plan wants"""
        shape = self.shape
        down = self.down(stream, norm=self.norm)
        q, entry = down.split_with_sizes((self.first_width, shape.rank + shape.rope_dim), 1)
        if self.q_up is not None:
            q = self.q_up(q.contiguous(), norm=self.q_norm)
        q = q.reshape(len(q), shape.num_heads, shape.head_dim)
        if self.form == "naive":
            attended = self._attend_naive(q, entry, angles, plan)
        else:
            attended = self._attend(q, entry, angles, plan)
        stream = plan.pick(stream)
        return self.out(attended, residual=stream) if len(stream) else stream

    def _attend(self, q: Tensor, entry: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        """q [tokens, heads, head_dim], entry [tokens, rank + rope_dim] -> [n, heads * value_dim]"""
        shape, norm = self.shape, self.latent_norm
        cache = plan.planes[self.cache_index]
        q_rope = self.ops.latent_write(
            q, entry, norm.weight, norm.eps, angles, cache, plan.slots, shape.interleaved
        )  # [tokens, heads, rope_dim]
        q_nope, q_rope = plan.pick(q[..., : shape.nope_dim]), plan.pick(q_rope)
        if not len(q_rope):
            return q_rope
        key_up, value_up = self._up()
        if self.form == "expanded":
            whole = torch.cat((q_nope, q_rope), -1)
            return expanded_attention(whole, key_up, value_up, cache, plan.kernel, shape.scale)
        q_latent = self.ops.head_product(q_nope.transpose(0, 1), key_up)  # [heads, tokens, rank]
        seen = self.ops.latent_attention(q_latent, q_rope, cache, plan.kernel, shape.scale)  # [heads, tokens, rank]
        return self.ops.head_product(seen, value_up.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _attend_naive(self, q: Tensor, entry: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        shape = self.shape
        k_cache, v_cache = plan.planes[2 * self.cache_index], plan.planes[2 * self.cache_index + 1]
        latent = self.latent_norm(entry[:, : shape.rank].contiguous())
        key_up, value_up = self._up()
        q_nope, q_rope = q.split_with_sizes((shape.nope_dim, shape.rope_dim), -1)
        q_rope = turn(q_rope, angles, shape.interleaved)
        k_rope = turn(entry[:, None, shape.rank :], angles, shape.interleaved)
        k = torch.cat((torch.einsum("tr,hdr->thd", latent, key_up), k_rope.expand(-1, shape.num_heads, -1)), -1)
        v = torch.einsum("tr,hdr->thd", latent, value_up)
        for cache, x in ((k_cache, k), (v_cache, v)):
            padded = functional.pad(x, (0, cache.shape[-1] - x.shape[-1]))
            cache.view(-1, *cache.shape[2:]).index_copy_(0, plan.slots, padded)
        whole = plan.pick(torch.cat((q_nope, q_rope), -1))
        if not len(whole):
            return whole
        keys, values = k_cache[..., : shape.head_dim], v_cache[..., : shape.value_dim]
        return self.ops.paged_attention(whole, keys, values, plan.kernel, shape.scale)

    def _up(self) -> tuple[Tensor, Tensor]:
        """What makes keys, [heads, nope_dim, rank], and values, [heads, value_dim, rank]."""
        shape = self.shape
        heads = self.up.view(shape.num_heads, shape.nope_dim + shape.value_dim, shape.rank)
        return heads[:, : shape.nope_dim], heads[:, shape.nope_dim :]


def _up_weight(prefix: str, shape: LatentShape, dtype: torch.dtype) -> Weight:
    """As Hugging Face keeps it; or as GGUF files do, every head's keys (with columns for rows) and values apart."""
    heads, nope_dim, value_dim, rank = shape.num_heads, shape.nope_dim, shape.value_dim, shape.rank
    rows = nope_dim + value_dim
    weight = Weight.whole(f"{prefix}.kv_b_proj.weight", (heads * rows, rank), dtype)
    apart: list[Part] = []
    for head in range(heads):
        start, middle, stop = head * rows, head * rows + nope_dim, (head + 1) * rows
        key = Part(f"{prefix}.k_b_proj.weight", (heads, rank, nope_dim), start, middle, index=head, form=torch.t)
        apart += [key, Part(f"{prefix}.v_b_proj.weight", (heads, value_dim, rank), middle, stop, index=head)]
    weight.others = (tuple(apart),)
    return weight
