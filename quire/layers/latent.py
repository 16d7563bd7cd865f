"""Multi-head latent attention (MLA): low-rank queries, keys and values, and a KV cache of the latents only.

There are three forms of the same computation. `absorbed` is the one in use: queries are projected into the latent
space, attention reads each cache entry once for all heads, and the result is projected back. `expanded` has the same
cache but computes every head's keys and values from it; `naive` caches those in full. The latter two are oracles for
tests, on the reference kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.kernels.angles import Angles
from quire.kernels.reference.latent import expanded_attention, rotate
from quire.layers.attention import AttentionPlan
from quire.layers.build import Build
from quire.layers.kv_specs import refuse_packing
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.weights import Part, Weight
from quire.types import CacheSpec

Form = Literal["absorbed", "expanded", "naive"]
NORM_EPS = 1e-6  # epsilon of the latents' norms; the config's value is for the other norms


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The sizes of a latent attention layer."""

    width: int
    num_heads: int
    rank: int  # length of the latent of keys and values
    q_rank: int | None  # length of the latent of queries; None: queries are projected from the residual stream
    nope_dim: int  # elements of a head's query and key without rope
    rope_dim: int  # elements of a head's query with rope; all heads share the key's
    value_dim: int
    scale: float  # of scores
    interleaved: bool  # the checkpoint's rope rotates neighbours, not halves
    bias: bool = False

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def activation_elements(self) -> int:
        """Elements of activations alive at one time, per token."""
        return self.num_heads * (2 * self.head_dim + self.rope_dim + 2 * self.rank + 2 * self.value_dim)


def latent_spec(shape: LatentShape, form: Form, layers: tuple[int, ...], build: Build) -> CacheSpec:
    """Returns the cache spec of these layers: one latent per token, or every head's K and V in the naive form."""
    refuse_packing(build, "latent attention, whose cache is small already")
    if form == "naive":
        num_heads = build.heads(shape.num_heads, shape.num_heads).num_heads
        entry, planes = (num_heads, max(shape.head_dim, shape.value_dim)), 2
    else:
        entry, planes = (1, shape.rank + shape.rope_dim), 1
    name = str(build.cache_dtype).removeprefix("torch.")
    return CacheSpec("latent", "paged", layers, entry, name, planes, build.page_tokens)


class LatentAttention(nn.Module):
    """One latent attention block: norm, down projections, up projections, attention, output projection."""

    up: Tensor  # [heads * (nope_dim + value_dim), rank]: projects a latent to every head's key and value

    def __init__(
        self,
        prefix: str,
        norm: RMSNorm,
        shape: LatentShape,
        cache_index: int,
        *,
        form: Form,
        build: Build,
    ):
        """`shape`: that of all ranks together."""
        super().__init__()
        share = build.heads(shape.num_heads, shape.num_heads)
        self.norm = norm
        self.shape = replace(shape, num_heads=share.num_heads)  # of this rank
        self.cache_index = cache_index
        self.form = form
        self.ops = build.ops
        rows, (q_span, _) = shape.num_heads * shape.head_dim, share.elements(shape.head_dim)
        first, first_span = ("q_proj", rows), q_span
        if shape.q_rank is not None:
            first, first_span = ("q_a_proj", shape.q_rank), (0, shape.q_rank)
        self.first_width = first_span[1] - first_span[0]
        latent_width = shape.rank + shape.rope_dim
        sources = [(f"{prefix}.{name}", out) for name, out in (first, ("kv_a_proj_with_mqa", latent_width))]
        split = build.split_outputs([(first[1], first_span), (latent_width, (0, latent_width))])
        self.down = Linear(shape.width, sources, bias=shape.bias, build=build, split=split)
        self.q_norm, self.q_up = None, None
        if shape.q_rank is not None:
            self.q_norm = RMSNorm(f"{prefix}.q_a_layernorm", shape.q_rank, NORM_EPS, build)
            split = build.split_outputs([(rows, q_span)])
            self.q_up = Linear(shape.q_rank, [(f"{prefix}.q_b_proj", rows)], build=build, split=split)
        self.latent_norm = RMSNorm(f"{prefix}.kv_a_layernorm", shape.rank, NORM_EPS, build)
        up, (up_span, _) = _up_weight(prefix, shape, build.dtype), share.elements(shape.nope_dim + shape.value_dim)
        self.up = build.cut_rows(up, [(up.shape[0], up_span)])
        out = [(f"{prefix}.o_proj", shape.width)]
        value_split = build.split_inputs(share.elements(shape.value_dim)[0])
        self.out = Linear(shape.num_heads * shape.value_dim, out, bias=shape.bias, build=build, split=value_split)

    def forward(self, stream: Tensor, angles: Angles, plan: AttentionPlan) -> Tensor:
        """Returns the residual stream plus this block's output, for the wanted tokens. stream [tokens, width]"""
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
        """Computes the absorbed or the expanded form.

        q [tokens, heads, head_dim], entry [tokens, rank + rope_dim] -> [n, heads * value_dim]
        """
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
        q_rope = rotate(q_rope, angles, shape.interleaved)
        k_rope = rotate(entry[:, None, shape.rank :], angles, shape.interleaved)
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
        """Returns the up projections of keys, [heads, nope_dim, rank], and of values, [heads, value_dim, rank]."""
        shape = self.shape
        heads = self.up.view(shape.num_heads, shape.nope_dim + shape.value_dim, shape.rank)
        return heads[:, : shape.nope_dim], heads[:, shape.nope_dim :]


def _up_weight(prefix: str, shape: LatentShape, dtype: torch.dtype) -> Weight:
    """Returns the up projection. GGUF files have one tensor of keys per head, transposed, and one of values."""
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
