"""Deterministic latent attention (MLA) for CPUs: per-head products in tiles, and the attention of
`deterministic.dense` over cache entries, absorbed in all steps.

Values are as wide as keys, although the rope part of the result is unused: torch's kernel with fixed key blocks needs
equal widths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.angles import Angles
from quire.kernels.deterministic.dense import TilePlan, in_tiles, paged_attention, rms_norm


def head_product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies x [heads, tokens, in] by weight [heads, in, out] in tiles."""
    tiles = in_tiles(
        lambda tile: torch.bmm(tile.transpose(0, 1).contiguous(), weight).transpose(0, 1), x.transpose(0, 1)
    )
    return tiles.transpose(0, 1)


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
    """The reference's `latent_write` with the rotation in single steps."""
    assert angles.cos is not None and angles.sin is not None
    rank = norm_weight.shape[0]
    rope_dim = entry.shape[1] - rank
    x = torch.cat((q[..., -rope_dim:], entry[:, None, rank:]), 1)
    if interleaved:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    turned = (x * angles.cos).add_(x.roll(rope_dim // 2, -1).mul_(angles.sin))
    latent = rms_norm(entry[:, :rank].contiguous(), norm_weight, eps)
    cache.view(-1, rank + rope_dim).index_copy_(0, slots, torch.cat((latent, turned[:, -1]), 1))
    return turned[:, :-1]


def latent_attention(q_latent: Tensor, q_rope: Tensor, cache: Tensor, plan: TilePlan, scale: float) -> Tensor:
    """The reference's `latent_attention`, in query tiles."""
    num_heads, num_tokens, rank = q_latent.shape
    q = torch.cat((q_latent.transpose(0, 1), q_rope), -1)
    out = paged_attention(q, cache, cache, plan, scale)
    return out.view(num_tokens, num_heads, -1)[..., :rank].transpose(0, 1)
