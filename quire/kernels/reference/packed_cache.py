"""Packed KV caches in plain torch: rotation, rounding to entries and reading them back.

The oracle for the kernels, which write the same bytes; and what runs where there are none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cache_forms import PackedPlane


def rotate(x: Tensor) -> Tensor:
    """Multiplies the last dimension by the Hadamard matrix of the largest power of two that divides it, block by block.

    The matrix is symmetric and orthogonal, so rotating twice changes nothing, and products of rotated vectors are those
    of the vectors."""
    size = x.shape[-1] & -x.shape[-1]
    half, turned = 1, x
    while half < size:
        a, b = turned.unflatten(-1, (-1, 2, half)).unbind(-2)
        turned = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    return turned * size**-0.5


def write_packed(k: Tensor, v: Tensor, plane: PackedPlane, slots: Tensor) -> None:
    """Writes each token's key and value, [tokens, kv_heads, head_dim], to its slot as an entry."""
    form = plane.form
    entries = torch.cat((_pack(rotate(k.float()), form.key_bits), _pack(rotate(v.float()), form.value_bits)), -1)
    plane.entries.view(-1, *entries.shape[1:]).index_copy_(0, slots, entries)


def read_packed(plane: PackedPlane, entries: Tensor) -> Tensor:
    """Returns the keys or values in entries [..., entry_bytes], still rotated, [..., head_dim] float32."""
    head_dim, side = plane.shape[3], entries[..., plane.span]
    if plane.bits == 8:
        scale = side[..., head_dim:].contiguous().view(torch.bfloat16).float()
        return side[..., :head_dim].view(torch.int8).float() * scale
    tail = side[..., head_dim // 2 :].contiguous().view(torch.bfloat16).float()
    blocks = side[..., : head_dim // 2].unflatten(-1, (-1, 16))  # 32 columns each
    numbers = torch.cat((blocks & 15, blocks >> 4), -1).flatten(-2).float()
    return numbers * tail[..., :1] + tail[..., 1:]


def _pack(x: Tensor, bits: int) -> Tensor:
    """Rounds vectors [..., head_dim] to bytes [..., side_bytes]."""
    if bits == 8:
        scale = (x.abs().amax(-1, keepdim=True) * (1 / 127)).bfloat16()
        numbers = (x * _inverse(scale)).round().clamp(-127, 127).to(torch.int8)
        return torch.cat((numbers.view(torch.uint8), scale.view(torch.uint8)), -1)
    low, high = x.aminmax(dim=-1, keepdim=True)
    bad = (x * 0).sum(-1, keepdim=True)  # NaN if an element is NaN or infinite
    least = (low + bad).bfloat16()
    scale = ((high - least.float()) * (1 / 15)).bfloat16()
    numbers = ((x - least.float()) * _inverse(scale)).round().clamp(0, 15).nan_to_num(0).to(torch.uint8)
    first, second = numbers.unflatten(-1, (-1, 2, 16)).unbind(-2)
    tail = torch.cat((scale, least), -1)
    return torch.cat(((first | second << 4).flatten(-2), tail.view(torch.uint8)), -1)


def _inverse(scale: Tensor) -> Tensor:
    scale = scale.float()
    return torch.where((scale > 0) & scale.isfinite(), 1 / scale, 0)
