"""Work list of latent attention, shared by all layers of a step: tokens, splits, and buffers for partial results.

`latent` and `many_heads` prepare it when a step's first layer attends and keep it on the plan. Nothing depends on the
current lengths of rows, so a captured step stays valid as they grow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.triton.attention.paged import TritonPlan, upload_ints
from quire.kernels.triton.attention.prefill import first_tokens, list_tiles

# `latent.hopper` computes 64 heads even if there are fewer. With 32 heads it reads 3.3 TB/s where `latent` reads 2.3 to
# 2.6, and prefills as quickly; with 16, `latent` reads 3.65 and fills its lanes with tokens in prefill.
MANY_HEADS = 32
MAX_LANES = 64  # heads times tokens of a program
MIN_SPAN = 128  # entries below which a row is not split further


@dataclass(slots=True)
class LatentWork:
    """Lists and buffers of latent attention for one step."""

    num_decodes: int = 0
    num_splits: int = 1
    token_index: Tensor | None = None
    row_index: Tensor | None = None
    num_tiles: int = 0
    tiles: Tensor | None = None
    partial: Tensor | None = None  # [decode rows * head blocks, splits, heads, rank] float32
    best: Tensor | None = None  # [decode rows * head blocks, splits, heads] float32
    total: Tensor | None = None
    counters: Tensor | None = None


def prepare(
    plan: TritonPlan,
    num_heads: int,
    heads: int,
    rank: int,
    device: torch.device,
    choose_splits: Callable[[int, int], int],
) -> LatentWork:
    """List the step's work for programs of `heads` heads. `choose_splits` takes the number of programs and the maximum
    number of a row's entries."""
    if plan.work is not None:
        raise NotImplementedError("Mixed steps over a latent cache can't be captured.")
    work = LatentWork()
    counts = plan.counts
    decodes = [row for row, count in enumerate(counts) if count == 1]
    prefills = [row for row, count in enumerate(counts) if count > 1]
    head_blocks = -(-num_heads // heads)
    if decodes:
        work.num_decodes = len(decodes)
        # The table's width, not the rows' lengths, which grow between replays of a captured step.
        work.num_splits = choose_splits(len(decodes) * head_blocks, plan.page_table.shape[1] * plan.page_tokens)
        if work.num_splits > 1:
            shape = (len(decodes) * head_blocks, work.num_splits, heads)
            work.partial = torch.empty(*shape, rank, dtype=torch.float32, device=device)
            work.best, work.total = torch.empty(2, *shape, dtype=torch.float32, device=device)
            work.counters = torch.zeros(shape[0], dtype=torch.int32, device=device)
    if not prefills:
        work.row_index = plan.row_index
        return work
    tiles = list_tiles(prefills, counts, plan.len_bounds, MAX_LANES // heads)
    firsts = first_tokens(counts)
    parts = [[field for tile in tiles for field in tile], [firsts[row] for row in decodes], decodes]
    work.tiles, token_index, row_index = upload_ints(parts, device)
    work.num_tiles = len(tiles)
    if decodes:
        work.token_index, work.row_index = token_index, row_index
    return work


def prefers_hopper(
    num_heads: int, rank: int, rope_dim: int, page: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> bool:
    """Whether `latent.hopper` supports the model's shape and is faster for it."""
    return (
        num_heads >= MANY_HEADS
        and (rank, rope_dim) == (512, 64)
        and page >= 8
        and page & page - 1 == 0
        and dtype == cache_dtype
        and dtype in (torch.bfloat16, torch.float16)
    )
