"""Distributes the Hopper prefill kernel's work over its programs, and merges the shares of cut tiles.

An item is a tile for one key-value head. Many items are distributed whole; few, as for the short tail of a long cached
prompt, are cut along their keys so that all programs have work. Each share leaves unnormalized sums with its largest
score and sum of weights, and `merge_shares` combines them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import launch_options, let_next_start, wait_for_inputs

RECORD = 8  # fields of an item: kv head, row, first token, tokens, share index, number of shares, slot, 0
MERGE = 8  # fields of a merge: first slot, shares, kv head, first token, tokens, three unused
LANES = 128  # queries of a tile
HEAD = 128
BLOCK = 128  # keys per iteration
MIN_BLOCKS = 4  # minimum blocks of a share: merging smaller ones costs more than it saves
MERGE_LANES = 32  # queries merged by one program


@dataclass(frozen=True, slots=True)
class TileShares:
    """Items of each program, and merges of those that were cut."""

    items: np.ndarray  # int32: start of each program's list, num_programs + 1 numbers, then a record per item
    merges: np.ndarray  # int32: a record per merge


@dataclass(frozen=True, slots=True)
class SharePartials:
    """Partial results of shares, by slot."""

    sums: Tensor  # [slots, LANES, HEAD] float32: of weighted values
    stats: Tensor  # [slots, 2, LANES] float32: largest score (base 2), sum of weights

    @classmethod
    def create(cls, num_slots: int, device: torch.device) -> SharePartials:
        sums = torch.empty(num_slots, LANES, HEAD, dtype=torch.float32, device=device)
        return cls(sums, torch.empty(num_slots, 2, LANES, dtype=torch.float32, device=device))


def distribute_tiles(tiles: list[list[int]], num_kv_heads: int, window: int | None, num_programs: int) -> TileShares:
    """Distribute tiles, heaviest first (see `prefill.list_tiles`), in alternating direction: the program that receives
    the heaviest item of one round receives the lightest of the next."""
    fields = np.array(tiles, np.int32).reshape(-1, 4)  # row, first token, tokens, keys
    num_keys = fields[:, 3]
    seen = num_keys if window is None else np.minimum(num_keys, fields[:, 2] + window + BLOCK)
    most = num_programs // max(len(tiles) * num_kv_heads, 1)
    num_shares = np.clip(-(-seen // BLOCK) // MIN_BLOCKS, 1, max(most, 1))  # per tile
    heads = np.arange(num_kv_heads, dtype=np.int32)
    whole = np.zeros((len(tiles), num_kv_heads, RECORD), np.int32)
    whole[..., 0], whole[..., 1:4], whole[..., 5] = heads, fields[:, None, :3], num_shares[:, None]
    items = whole.reshape(-1, RECORD)
    slots = np.cumsum(np.where(items[:, 5] > 1, items[:, 5], 0)) - items[:, 5]  # first slot of each item that is cut
    if most > 1:
        cut = items[:, 5] > 1
        merges = np.zeros((cut.sum(), MERGE), np.int32)
        merges[:, 0], merges[:, 1], merges[:, 2] = slots[cut], items[cut, 5], items[cut, 0]
        merges[:, 3:5] = items[cut, 2:4]
        repeats = items[:, 5]
        items = np.repeat(items, repeats, axis=0)
        items[:, 4] = np.arange(len(items)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        items[:, 6] = np.repeat(slots, repeats) + items[:, 4]
    else:
        merges = np.zeros((0, MERGE), np.int32)
    turn = np.arange(len(items))
    place = turn % num_programs
    program = np.where(turn // num_programs % 2 == 0, place, num_programs - 1 - place)
    begins = np.zeros(num_programs + 1, np.int32)
    np.cumsum(np.bincount(program, minlength=num_programs), out=begins[1:])
    dealt = items[np.argsort(program, kind="stable")]
    return TileShares(np.concatenate((begins, dealt.reshape(-1))), merges.reshape(-1))


def max_merges(num_programs: int) -> int:
    """Maximum number of merges: each has at least two shares, and there are no more shares than programs."""
    return num_programs // 2


@triton.jit
def _merge_kernel(
    sums_ptr,
    stats_ptr,
    merges_ptr,
    out_ptr,
    num_kv_heads,
    GROUP: tl.constexpr,
    GROUP_STORED: tl.constexpr,
    LANES: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    RECORD: tl.constexpr,
    PDL: tl.constexpr,
):
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


def merge_shares(
    partials: SharePartials, merges: Tensor, num_merges: int, num_kv_heads: int, group: int, out: Tensor
) -> None:
    """Merge the cut tiles listed in `merges` (int32, flat, from `distribute_tiles`) into `out` [tokens, heads *
    HEAD]."""
    _merge_kernel[(num_merges, LANES // MERGE_LANES)](
        partials.sums,
        partials.stats,
        merges,
        out,
        num_kv_heads,
        GROUP=group,
        GROUP_STORED=triton.next_power_of_2(group),
        LANES=LANES,
        D=HEAD,
        ROWS=MERGE_LANES,
        RECORD=MERGE,
        **launch_options(out.device, num_warps=4),
    )
