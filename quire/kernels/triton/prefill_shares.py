"""How the Hopper catch-up kernel's work is shared out to its programs, and how shares of one tile become whole again.

An item is a tile for one key-value head. Many items go to whoever has least to do; few, as for the short tail of a long
cached prompt, are cut along their keys, so that all programs have something: each then leaves its share unfinished,
with its largest score and its sum, and `merge_shares` puts them together.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import launch_options, let_next_start, wait_for_inputs

RECORD = 8  # numbers of an item: kv head, row, first token, tokens, which share of its keys, of how many, its slot, 0
MERGE = 8  # numbers of a merge: first slot, shares, kv head, first token, tokens, and nothing
LANES = 128  # queries of a tile
HEAD = 128
BLOCK = 128  # keys at a time
MIN_BLOCKS = 4  # of a share: less would not be worth merging
START_COST = 1  # what an item costs beside its blocks of keys, in blocks
MERGE_LANES = 32  # that one program merges


@dataclass(frozen=True, slots=True)
class Shares:
    items: list[int]  # where each program's list begins, num_programs + 1 numbers, then a record per item
    merges: list[int]  # a record per merge


@dataclass(frozen=True, slots=True)
class Partials:
    """What shares leave for the merge, by slot."""

    sums: Tensor  # [slots, LANES, HEAD] float32: of weighted values
    stats: Tensor  # [slots, 2, LANES] float32: the largest score, a power of two, and the sum of weights

    @classmethod
    def create(cls, num_slots: int, device: torch.device) -> Partials:
        sums = torch.empty(num_slots, LANES, HEAD, dtype=torch.float32, device=device)
        return cls(sums, torch.empty(num_slots, 2, LANES, dtype=torch.float32, device=device))


def share_out(tiles: list[list[int]], num_kv_heads: int, window: int | None, num_programs: int) -> Shares:
    """Tiles come heaviest first (see `prefill.list_tiles`), and the next item goes to whoever has least to do."""
    lists: list[list[int]] = [[] for _ in range(num_programs)]
    loads = [(0, program) for program in range(num_programs)]
    merges: list[int] = []
    num_slots = 0
    for row, first, size, num_keys in tiles:
        seen = num_keys if window is None else min(num_keys, size + window + BLOCK)
        blocks = -(-seen // BLOCK)
        num_shares = max(1, min(num_programs // (len(tiles) * num_kv_heads), blocks // MIN_BLOCKS))
        cost = -(-blocks // num_shares) + START_COST
        for kv_head in range(num_kv_heads):
            if num_shares > 1:
                merges += (num_slots, num_shares, kv_head, first, size, 0, 0, 0)
            for share in range(num_shares):
                load, program = loads[0]
                lists[program] += (kv_head, row, first, size, share, num_shares, num_slots + share, 0)
                heapq.heapreplace(loads, (load + cost, program))
            num_slots += num_shares if num_shares > 1 else 0
    begins = itertools.accumulate((len(records) // RECORD for records in lists), initial=0)
    return Shares([*begins, *itertools.chain.from_iterable(lists)], merges)


def max_merges(num_programs: int) -> int:
    """Each has two shares at least, and there are no more shares than programs."""
    return num_programs // 2


@triton.jit
def _merge_kernel(
    sums_ptr, stats_ptr, merges_ptr, out_ptr, num_kv_heads, GROUP: tl.constexpr, GROUP_STORED: tl.constexpr,
    LANES: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, RECORD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: ROWS queries of one tile for one kv head. A record without shares is padding."""
    let_next_start(PDL)
    record = merges_ptr + tl.program_id(0) * RECORD
    slot = tl.load(record).to(tl.int64)
    num_shares = tl.load(record + 1)
    kv_head = tl.load(record + 2)
    first_token = tl.load(record + 3).to(tl.int64)
    num_tokens = tl.load(record + 4)
    wait_for_inputs(PDL)
    lanes = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, D)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    for share in range(num_shares):
        best = tl.maximum(best, tl.load(stats_ptr + (slot + share) * 2 * LANES + lanes))
    mass = tl.zeros([ROWS], tl.float32)
    merged = tl.zeros([ROWS, D], tl.float32)
    for share in range(num_shares):
        stats = stats_ptr + (slot + share) * 2 * LANES + lanes
        weight = tl.exp2(tl.load(stats) - best)
        mass += weight * tl.load(stats + LANES)
        part = tl.load(sums_ptr + ((slot + share) * LANES + lanes)[:, None] * D + dims[None, :])
        merged += weight[:, None] * part
    offset = lanes // GROUP_STORED
    member = lanes % GROUP_STORED
    live = (offset < num_tokens) & (member < GROUP) & (num_shares > 0)
    head = (first_token + offset) * num_kv_heads * GROUP + kv_head * GROUP + member
    out = merged / mass[:, None]
    tl.store(out_ptr + head[:, None] * D + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=live[:, None])


def merge_shares(partials: Partials, merges: Tensor, num_merges: int, num_kv_heads: int, group: int,
                 out: Tensor) -> None:  # fmt: skip
    """`merges` (int32, flat) of `share_out`, into `out` [tokens, heads * HEAD]."""
    _merge_kernel[(num_merges, LANES // MERGE_LANES)](
        partials.sums, partials.stats, merges, out, num_kv_heads, GROUP=group,
        GROUP_STORED=triton.next_power_of_2(group), LANES=LANES, D=HEAD, ROWS=MERGE_LANES, RECORD=MERGE,
        **launch_options(out.device, num_warps=4),
    )  # fmt: skip
