"""Puts Hopper's latent attention for many heads into the ops table of a model that gains by it, if it is right here.

The loader calls `settle_latent` for models that keep latents, after `trial.settle_ops`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.table import REFERENCE, Ops
from quire.kernels.trial import compare
from quire.kernels.trial_hopper import runs_on_hopper, settle_row

NAME = "latent kernel for many heads"
LENS = (1, 64, 65, 300)  # entries of the rows that are tried


@dataclass(frozen=True, slots=True)
class LatentTrialShape:
    """What decides whether the kernel serves a model, and how it is compiled."""

    num_heads: int
    rank: int
    rope_dim: int
    page_tokens: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    max_len: int = 2048


def settle_latent(ops: Ops, shape: LatentTrialShape, device: torch.device, *, strict: bool) -> Ops:
    """The table as it is, or with that kernel; see `trial_hopper.settle_row`."""
    if not runs_on_hopper(ops, device):
        return ops
    from quire.kernels.triton.latent_work import gains

    if not gains(shape.num_heads, shape.rank, shape.rope_dim, shape.page_tokens, shape.dtype, shape.cache_dtype):
        return ops

    def exchange() -> Ops:
        from quire.kernels.triton import latent_many

        return replace(ops, latent_attention=latent_many.latent_attention)

    return settle_row(ops, NAME, exchange, lambda faster: try_latent(faster, shape, device), strict=strict)


def try_latent(ops: Ops, shape: LatentTrialShape, device: torch.device) -> None:
    """Decodes through a permanent page table, as captured steps have it, and a mixed step. Raises."""
    for counts in ([1] * len(LENS), [1, 20, 9, 1]):
        step = _Step.make(shape, device, counts)
        compare(step.run(ops, decode=max(counts) == 1), step.run(REFERENCE, decode=False), shape.dtype)


@dataclass(frozen=True, slots=True)
class _Step:
    shape: LatentTrialShape
    counts: list[int]
    q_latent: Tensor  # [heads, tokens, rank]
    q_rope: Tensor  # [tokens, heads, rope_dim]
    cache: Tensor  # [pages, page_tokens, 1, rank + rope_dim]
    table: Tensor  # [rows, pages of the longest row there may be]
    positions: Tensor

    @classmethod
    def make(cls, shape: LatentTrialShape, device: torch.device, counts: list[int]) -> _Step:
        page = shape.page_tokens
        need = [-(-length // page) for length in LENS]
        table = torch.zeros(len(LENS), max(max(need), -(-shape.max_len // page)), dtype=torch.int32)
        pages = torch.randperm(sum(need), dtype=torch.int32) + 1
        for row, (num, own) in enumerate(zip(need, pages.split(need), strict=True)):
            table[row, :num] = own
        positions = [length - count + i for length, count in zip(LENS, counts, strict=True) for i in range(count)]

        def normal(*size: int) -> Tensor:
            return torch.randn(size, device=device).to(shape.dtype)

        return cls(
            shape,
            counts,
            normal(shape.num_heads, sum(counts), shape.rank),
            normal(sum(counts), shape.num_heads, shape.rope_dim),
            normal(sum(need) + 1, page, 1, shape.rank + shape.rope_dim),
            table.to(device),
            torch.tensor(positions, device=device),
        )

    def run(self, ops: Ops, decode: bool) -> Tensor:
        """`decode`: rows are found in the table by their number."""
        by_number = {"row_index": torch.arange(len(LENS), device=self.table.device)} if decode else {}
        plan = ops.plan_attention(self.table, self.positions, self.counts, list(LENS), self.shape.page_tokens, None,
                                  self.shape.dtype, **by_number)  # fmt: skip
        return ops.latent_attention(self.q_latent, self.q_rope, self.cache, plan, self.shape.rank**-0.5)
