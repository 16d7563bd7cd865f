"""Multi-head latent attention (MLA) in plain torch: the CPU path, and the oracle for `kernels.triton.latent`.

A token's cache entry is one latent vector, from which the keys and values of all heads are projected, and one small
rope key shared by all heads. The absorbed form projects queries into the latent space, so that attention reads the
entries directly; the expanded form projects entries to keys and values.
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
    """Norms the latent of each token's `entry` [tokens, rank + rope_dim], applies rope to its key and writes both at
    `slots` of the cache [pages, page_tokens, 1, rank + rope_dim].

    Returns the rotated rope part of the queries `q` [tokens, heads, head_dim], which is the end of each head: [tokens,
    heads, rope_dim]. `interleaved`: rope pairs are neighbours in the input instead of halves.
    """
    rank = norm_weight.shape[0]
    rope_dim = entry.shape[1] - rank
    rotated = rotate(torch.cat((q[..., -rope_dim:], entry[:, None, rank:]), 1), angles, interleaved)
    latent = rms_norm(entry[:, :rank], norm_weight, eps)
    cache.view(-1, rank + rope_dim).index_copy_(0, slots, torch.cat((latent, rotated[:, -1]), 1))
    return rotated[:, :-1]


def rotate(x: Tensor, angles: Angles, interleaved: bool) -> Tensor:
    """Applies rope to x [tokens, heads, rope_dim]. Interleaved pairs are returned as halves; queries and keys are
    permuted alike, so scores do not change."""
    assert angles.cos is not None and angles.sin is not None
    if interleaved:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    return rope(x, angles.cos, angles.sin)


def latent_attention(q_latent: Tensor, q_rope: Tensor, cache: Tensor, plan: ReferencePlan, scale: float) -> Tensor:
    """Absorbed attention of q_latent [heads, tokens, rank] and q_rope [tokens, heads, rope_dim] over the cache. Returns
    each head's weighted mean of the latents, [heads, tokens, rank]."""
    num_heads, num_tokens, rank = q_latent.shape
    q = torch.cat((q_latent.transpose(0, 1), q_rope), -1)
    out = paged_attention(q, cache, cache[..., :rank], plan, scale)
    return out.view(num_tokens, num_heads, rank).transpose(0, 1)


def expanded_attention(
    q: Tensor, key_weight: Tensor, value_weight: Tensor, cache: Tensor, plan: ReferencePlan, scale: float
) -> Tensor:
    """Attention that is not absorbed: q [tokens, heads, nope_dim + rope_dim]; key_weight [heads, nope_dim, rank] and
    value_weight [heads, value_dim, rank] project the cached latents to keys and values. Returns [tokens, heads *
    value_dim]."""
    rank = key_weight.shape[-1]
    out = q.new_empty(len(q), len(value_weight) * value_weight.shape[1])
    for tokens, entries, mask in gather_rows(cache, plan):
        latent, rotated = entries.split((rank, entries.shape[-1] - rank), -1)  # [rows, keys, ...]
        k = torch.einsum("nkr,hdr->nhkd", latent, key_weight)
        k = torch.cat((k, rotated.unsqueeze(1).expand(-1, k.shape[1], -1, -1)), -1)
        v = torch.einsum("nkr,hdr->nhkd", latent, value_weight)
        # [rows, heads, queries, keys]; tokens is [rows, queries]
        scores = torch.einsum("nqhd,nhkd->nhqk", q[tokens], k) * scale + mask
        out[tokens.flatten()] = torch.einsum("nhqk,nhkd->nqhd", scores.softmax(-1), v).reshape(tokens.numel(), -1)
    return out
