"""cuDNN's attention, which torch includes, for prompts of equal length without cached tokens.

It needs contiguous keys, so each layer's pages are copied first. It plans every new shape at its first use, which
stalls the step for tens of milliseconds; therefore it is used only if the configuration asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from quire.kernels.libraries.seam import PrefillKernel, PrefillRows

MIN_TOKENS = 2048  # minimum tokens of a step: below, launching takes longer than attending
MAX_TOKENS = 1 << 16  # maximum tokens whose keys and values are copied: 2 x 128 MiB with 8 heads of 128
MAX_HEAD_DIM = 128

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def open_cudnn(device: torch.device) -> Sequence[PrefillKernel]:
    """cuDNN's kernel, or an empty list if torch or the device does not support it."""
    if not torch.backends.cudnn.is_available() or torch.cuda.get_device_capability(device) < (8, 0):
        return []
    return [CudnnAttention()]


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of q [rows, heads, tokens, head_dim]; keys and values may have fewer heads."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


@dataclass(frozen=True, slots=True)
class _CudnnPlan:
    """Shape and pages of a step's prompts, shared by all layers."""

    num_rows: int
    num_tokens: int  # tokens of each row
    pages: Tensor  # [rows * pages per row] int32: pages to copy, in order
    scale: float


class CudnnAttention:
    """A `PrefillKernel` on cuDNN."""

    name = "cuDNN"

    def __init__(self, attend: Attend = cudnn_attention):
        self._attend = attend

    def fits(self, q: Tensor, k_cache: Tensor, rows: PrefillRows) -> bool:
        """Whether all prompts have one length, no cached tokens, and a total within the limits."""
        count = rows.counts[0]
        return (
            rows.window is None
            and all(other == count for other in rows.counts)
            and rows.len_bounds == rows.counts
            and MIN_TOKENS <= count * len(rows.counts) <= MAX_TOKENS
            and q.dtype in (torch.bfloat16, torch.float16)
            and q.shape[2] % 8 == 0
            and q.shape[2] <= MAX_HEAD_DIM
        )

    def plan(self, rows: PrefillRows, q: Tensor, k_cache: Tensor, scale: float) -> _CudnnPlan:
        per_row = -(-rows.counts[0] // rows.page_tokens)
        return _CudnnPlan(len(rows.counts), rows.counts[0], rows.page_table[:, :per_row].reshape(-1), scale)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, planned: _CudnnPlan) -> Tensor:
        rows, tokens = planned.num_rows, planned.num_tokens
        k, v = (
            cache.index_select(0, planned.pages).view(rows, -1, *cache.shape[2:])[:, :tokens].transpose(1, 2)
            for cache in (k_cache, v_cache)
        )  # [rows, kv_heads, tokens, head_dim]
        out = self._attend(q.unflatten(0, (rows, tokens)).transpose(1, 2), k, v, planned.scale)
        return out.transpose(1, 2).reshape(q.shape)
