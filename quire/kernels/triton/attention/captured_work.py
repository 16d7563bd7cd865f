"""Attention work lists at fixed addresses, for captured mixed steps; buffers are sized for the largest step.

A captured step launches its kernels with the same grid and addresses at every replay; only the contents of these lists
change. `runtime.mixed_graphs` creates one `CapturedWork` per graph and cache group, sizes it by the first run, and
fills it before each replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.triton.attention import prefill, prefill_hopper
from quire.kernels.triton.attention.paged import AttentionWork, TritonPlan, plan_decodes
from quire.kernels.triton.attention.prefill_split import MERGE, RECORD, SharePartials, distribute_tiles, max_merges
from quire.kernels.triton.launch import num_multiprocessors, supports_gluon

PADDING = -1
MAX_MIXED_TYPES = 256  # maximum tokens of a captured step whose cache has another type than its queries


@dataclass(slots=True)
class _WorkLists:
    """The list tensors that the kernels read, and the parameters needed to fill them."""

    numbers: Tensor  # int32: tiles, or merges and items; then the decode rows' tokens, then their rows
    num_fields: int  # of tiles, or of merges and items
    num_merge_fields: int
    tokens_per_tile: int
    num_kv_heads: int
    window: int | None
    hopper: bool


class CapturedWork:
    """Attention work of captured mixed steps, sized by the first run and filled before each replay."""

    def __init__(self, num_tokens: int, num_decodes: int, num_prefills: int):
        """Maximum numbers of tokens, decode rows and prefill rows of a step."""
        self._num_tokens, self._num_decodes, self._num_prefills = num_tokens, num_decodes, num_prefills
        self._lists: _WorkLists | None = None
        self._prepared: AttentionWork | None = None

    @property
    def is_used(self) -> bool:
        """Whether a layer has attended with it. The model's last layer has a plan of its own and may be the only layer
        of its group."""
        return self._prepared is not None

    def prepare(self, plan: TritonPlan, q: Tensor, k_cache: Tensor, plain: bool) -> AttentionWork:
        """Prepare as `paged` does for an eager plan, but once for all steps, with empty lists."""
        if self._prepared is None:
            self._prepared = self._make(plan, q, k_cache, plain)
        return self._prepared

    def fill(self, counts: list[int], len_bounds: list[int]) -> None:
        """List the next step's work. `counts`: tokens of each row; `len_bounds`: bounds of the rows' lengths."""
        lists = self._lists
        assert lists is not None, "the first run sizes the lists"
        decodes = [row for row, count in enumerate(counts) if count == 1]
        prefills = [row for row, count in enumerate(counts) if count > 1]
        tiles = prefill.list_tiles(prefills, counts, len_bounds, lists.tokens_per_tile)
        if lists.hopper:
            assert self._prepared is not None
            shares = distribute_tiles(tiles, lists.num_kv_heads, lists.window, self._prepared.num_programs)
            parts = [(0, shares.merges), (lists.num_merge_fields, shares.items)]
        else:
            parts = [(0, np.array(tiles, np.int32).reshape(-1))]
        numbers = np.zeros(len(lists.numbers), np.int32)
        numbers[lists.num_fields :] = PADDING
        firsts = prefill.first_tokens(counts)
        token_index, row_index = lists.num_fields, (lists.num_fields + len(numbers)) // 2
        parts += [(token_index, np.array([firsts[row] for row in decodes])), (row_index, np.array(decodes))]
        for begin, part in parts:
            numbers[begin : begin + len(part)] = part
        host = torch.from_numpy(numbers)
        lists.numbers.copy_(host.pin_memory() if lists.numbers.is_cuda else host, non_blocking=True)

    def _make(self, plan: TritonPlan, q: Tensor, k_cache: Tensor, plain: bool) -> AttentionWork:
        num_kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
        if k_cache.dtype != q.dtype and self._num_tokens > MAX_MIXED_TYPES:
            raise NotImplementedError(
                f"A step of {self._num_tokens} tokens over an FP8 cache dequantizes its pages, which can't be captured."
            )
        work = AttentionWork()
        hopper = plan.hopper and supports_gluon(q.device.index) and prefill_hopper.supports(q, k_cache, plain)
        work.prefill_tuning = prefill_hopper.TUNING if hopper else prefill.tune(head_dim, q.element_size())
        per_tile = prefill.tile_tokens(work.prefill_tuning, q.shape[1], num_kv_heads)
        work.num_tiles = -(-self._num_tokens // per_tile) + self._num_prefills
        num_fields, num_merge_fields = work.num_tiles * prefill.TILE_FIELDS, 0
        if hopper:
            work.num_programs = num_multiprocessors(q.device.index)
            num_merge_fields = max_merges(work.num_programs) * MERGE
            work.num_merges = max_merges(work.num_programs)
            work.partials = SharePartials.create(work.num_programs, q.device)
            # One spare record, which programs without items read.
            num_items = max(work.num_tiles * num_kv_heads, work.num_programs) + 1
            num_fields = num_merge_fields + work.num_programs + 1 + num_items * RECORD
        num_fields = -(-num_fields // 4) * 4  # Triton specializes kernels on pointers aligned to 16 bytes
        padded_decodes = -(-self._num_decodes // 4) * 4
        numbers = torch.zeros(num_fields + 2 * padded_decodes, dtype=torch.int32, device=q.device)
        numbers[num_fields:] = PADDING
        if hopper:
            work.merges, work.items = numbers[:num_merge_fields], numbers[num_merge_fields:num_fields]
        else:
            work.tiles = numbers[:num_fields]
        if self._num_decodes:
            len_bound = plan.page_table.shape[1] * plan.page_tokens
            plan_decodes(work, self._num_decodes, min(len_bound, plan.window or len_bound), q, k_cache)
            work.token_index = numbers[num_fields : num_fields + self._num_decodes]
            work.row_index = numbers[num_fields + padded_decodes : num_fields + padded_decodes + self._num_decodes]
        self._lists = _WorkLists(numbers, num_fields, num_merge_fields, per_tile, num_kv_heads, plan.window, hopper)
        return work
