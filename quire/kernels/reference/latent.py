"""Latent attention (MLA) in plain torch: the CPU path, and the oracle for `kernels.triton.latent`.

A token's cache entry is one latent vector, from which every head's key and value follow, and one small key that rope
turns, shared by all heads. Absorbed, the queries are brought into the latent's space instead, so that attention reads
entries as they lie; expanded, keys and values are worked out from them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.angles import Angles
from quire.kernels.reference.attention import ReferencePlan, gather_rows, paged_attention
from quire.kernels.reference.small_ops import rms_norm, rope


def latent_write(
    q: Tensor,
    entry: Tensor,
    norm_weight: Tensor,
    eps: float,
    angles: Angles,
    cache: Tensor,
    slots: Tensor,
    interleaved: bool,
) -> Tensor:
    """Norm the latent of each token's `entry` [tokens, rank + rope_dim], turn its key, put both at `slots` of the cache
    [pages, page_tokens, 1, rank + rope_dim]; returns the turned part of the queries `q` [tokens, heads, head_dim], the
    last of each head: [tokens, heads, rope_dim]. `interleaved`: rope turns neighbours, not halves, of what comes in.
    """
    rank = norm_weight.shape[0]
    rope_dim = entry.shape[1] - rank
    turned = turn(torch.cat((q[..., -rope_dim:], entry[:, None, rank:]), 1), angles, interleaved)
    latent = rms_norm(entry[:, :rank], norm_weight, eps)
    cache.view(-1, rank + rope_dim).index_copy_(0, slots, torch.cat((latent, turned[:, -1]), 1))
    return turned[:, :-1]


def turn(x: Tensor, angles: Angles, interleaved: bool) -> Tensor:
    """x [tokens, heads, rope_dim]; what comes in as neighbours goes out as halves: scores do not mind the order."""
    assert angles.cos is not None and angles.sin is not None
    if interleaved:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    return rope(x, angles.cos, angles.sin)


def latent_attention(q_latent: Tensor, q_rope: Tensor, cache: Tensor, plan: ReferencePlan, scale: float) -> Tensor:
    """Absorbed: q_latent [heads, tokens, rank] and q_rope [tokens, heads, rope_dim] over the cache; the mean latent
    that each head sees, [heads, tokens, rank]."""
    num_heads, num_tokens, rank = q_latent.shape
    q = torch.cat((q_latent.transpose(0, 1), q_rope), -1)
    out = paged_attention(q, cache, cache[..., :rank], plan, scale)
    return out.view(num_tokens, num_heads, rank).transpose(0, 1)


def expanded_attention(
    q: Tensor, key_weight: Tensor, value_weight: Tensor, cache: Tensor, plan: ReferencePlan, scale: float
) -> Tensor:
    """Not absorbed: q [tokens, heads, nope_dim + rope_dim]; key_weight [heads, nope_dim, rank] and value_weight [heads,
    value_dim, rank] work keys and values out of the cache's latents. Returns [tokens, heads * value_dim]."""
    rank = key_weight.shape[-1]
    out = q.new_empty(len(q), len(value_weight) * value_weight.shape[1])
    for tokens, entries, mask in gather_rows(cache, plan):
        latent, turned = entries.split((rank, entries.shape[-1] - rank), -1)  # [rows, keys, ...]
        k = torch.einsum("nkr,hdr->nhkd", latent, key_weight)
        k = torch.cat((k, turned.unsqueeze(1).expand(-1, k.shape[1], -1, -1)), -1)
        v = torch.einsum("nkr,hdr->nhkd", latent, value_weight)
        # [rows, heads, queries, keys]; tokens is [rows, queries]
        scores = torch.einsum("nqhd,nhkd->nhqk", q[tokens], k) * scale + mask
        out[tokens.flatten()] = torch.einsum("nhqk,nhkd->nqhd", scores.softmax(-1), v).reshape(tokens.numel(), -1)
    return out
