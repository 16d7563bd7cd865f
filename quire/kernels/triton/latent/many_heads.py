"""Latent attention with many heads on Hopper, as a row of the ops table: launches `latent.hopper`, splits long rows and
merges their shares.

Unsupported shapes (see `supports`) go through `latent.latent`, so this row can replace that one in the table.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.triton.attention.paged import TritonPlan
from quire.kernels.triton.attention.prefill import TILE_FIELDS
from quire.kernels.triton.latent import latent
from quire.kernels.triton.latent.hopper import _latent_hopper_kernel
from quire.kernels.triton.latent.work_list import MIN_SPAN, LatentWork, prefers_hopper, prepare
from quire.kernels.triton.launch import launch_options, let_next_start, num_multiprocessors, wait_for_inputs

RANK, ROPE = 512, 64
HEADS = 64  # heads per program
BLOCK = 64  # entries per iteration
MAX_SPLITS = 64
# Cost model measured on an H200, in us: a row of 8192 entries, a program's start and end, a merge, and the merge's
# additional cost per share.
ROW, START, MERGE, SHARE = 230.0, 10.0, 4.0, 0.064
MERGE_LANES = 2
MERGE_SHARES = 4  # loaded at once into registers; buffers in shared memory would leave room for fewer programs
MANY_MERGES = 6  # programs per multiprocessor from which the merge starts early


@triton.jit
def _with(found, one):
    return found + (one,)  # noqa: RUF005, a kernel knows no stars


@triton.jit(
    do_not_specialize=["num_splits", "token_stride"], do_not_specialize_on_alignment=["positions_ptr", "tokens_ptr"]
)
def _merge_latents_kernel(
    partial_ptr,
    best_ptr,
    total_ptr,
    out_ptr,
    positions_ptr,
    tokens_ptr,
    token_stride,
    out_stride,
    out_head_stride,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    SHARES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: merges the shares of LANES heads of a token. Their number is computed as in the preceding kernel."""
    let_next_start(PDL)
    head_block = tl.program_id(0)
    tile = tl.program_id(2).to(tl.int64)
    token = tile
    if token_stride > 0:
        token = tl.load(tokens_ptr + tile * token_stride).to(tl.int64)
    # Positions are older than the preceding kernel, which let this one start only after it had waited itself.
    num_blocks = tl.maximum(tl.cdiv(tl.load(positions_ptr + token).to(tl.int32) + 1, BLOCK), 1)
    share = tl.maximum(tl.cdiv(num_blocks, num_splits), MIN_BLOCKS)
    num_shares = tl.cdiv(num_blocks, share)
    wait_for_inputs(PDL)
    if num_shares > 1:
        lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
        columns = tl.arange(0, RANK)
        cell = (tile * tl.num_programs(0) + head_block) * num_splits * HEADS + lanes
        best = tl.full([LANES], float("-inf"), tl.float32)
        total = tl.zeros([LANES], tl.float32)
        acc = tl.zeros([LANES, RANK], tl.float32)
        for split in range(0, num_shares, SHARES):
            parts, bests, totals = (), (), ()
            for i in tl.static_range(SHARES):
                there = lanes < tl.where(split + i < num_shares, HEADS, 0)
                place = cell + i * HEADS
                part = tl.load(partial_ptr + place[:, None] * RANK + columns[None, :], mask=there[:, None], other=0.0)
                parts = _with(parts, part)
                bests = _with(bests, tl.load(best_ptr + place, mask=there, other=float("-inf")))
                totals = _with(totals, tl.load(total_ptr + place, mask=there, other=0.0))
            new_best = best
            for i in tl.static_range(SHARES):
                new_best = tl.maximum(new_best, bests[i])  # finite: every share has entries that the token sees
            fade = tl.exp2(best - new_best)
            total *= fade
            acc *= fade[:, None]
            for i in tl.static_range(SHARES):
                factor = tl.exp2(bests[i] - new_best)
                total += totals[i] * factor
                acc += parts[i] * factor[:, None]
            best = new_best
            cell += SHARES * HEADS
        heads = head_block * HEADS + lanes
        target = out_ptr + token * out_stride + heads[:, None].to(tl.int64) * out_head_stride + columns[None, :]
        tl.store(target, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=(heads < NUM_HEADS)[:, None])


def supports(q_latent: Tensor, q_rope: Tensor, cache: Tensor) -> bool:
    """Whether the kernel supports the inputs and is faster; else use `latent.latent`."""
    num_heads, _, rank = q_latent.shape
    return (
        prefers_hopper(num_heads, rank, q_rope.shape[2], cache.shape[1], q_latent.dtype, cache.dtype)
        and q_latent.stride(2) == 1
        and q_rope.is_contiguous()
        and cache.is_contiguous()
        and cache.numel() // (RANK + ROPE) < 2**31
    )


def latent_attention(q_latent: Tensor, q_rope: Tensor, cache: Tensor, plan: TritonPlan, scale: float) -> Tensor:
    """Implements `reference.latent.latent_attention`."""
    if not supports(q_latent, q_rope, cache):
        return latent.latent_attention(q_latent, q_rope, cache, plan, scale)
    num_heads = q_latent.shape[0]
    if plan.latent is None:
        num_processors = num_multiprocessors(q_latent.device.index)
        plan.latent = prepare(
            plan,
            num_heads,
            HEADS,
            RANK,
            q_latent.device,
            lambda programs, len_bound: num_splits(programs, len_bound, num_processors),
        )
    work: LatentWork = plan.latent
    out = torch.empty_like(q_latent)
    if work.tiles is not None:  # a tile is one token; its fields begin with the row and the token
        _launch(
            q_latent,
            q_rope,
            cache,
            plan,
            scale,
            out,
            work,
            work.num_tiles,
            1,
            (work.tiles[1:], TILE_FIELDS),
            (work.tiles, TILE_FIELDS),
        )
    if work.num_decodes:
        _launch(
            q_latent,
            q_rope,
            cache,
            plan,
            scale,
            out,
            work,
            work.num_decodes,
            work.num_splits,
            _as_int32(work.token_index, plan),
            _as_int32(work.row_index, plan),
        )
    if work.num_decodes and work.num_splits > 1:
        _merge(out, plan, work)
    return out


def _merge(out: Tensor, plan: TritonPlan, work: LatentWork) -> None:
    """Merge the shares. Programs that start while the preceding kernel runs crowd onto the few multiprocessors it has
    left: few programs would nearly all end up there, so they start after its end; of many, the rest runs elsewhere."""
    num_heads = out.shape[0]
    grid = (triton.cdiv(num_heads, HEADS), triton.cdiv(min(num_heads, HEADS), MERGE_LANES), work.num_decodes)
    many = math.prod(grid) >= MANY_MERGES * num_multiprocessors(out.device.index)
    _merge_latents_kernel[grid](
        work.partial,
        work.best,
        work.total,
        out,
        plan.positions,
        *_as_int32(work.token_index, plan),
        out.stride(1),
        out.stride(0),
        work.num_splits,
        NUM_HEADS=num_heads,
        HEADS=HEADS,
        RANK=RANK,
        BLOCK=BLOCK,
        MIN_BLOCKS=MIN_SPAN // BLOCK,
        LANES=MERGE_LANES,
        SHARES=MERGE_SHARES,
        **launch_options(out.device, num_warps=4, early=many),
    )


def num_splits(num_programs: int, len_bound: int, num_processors: int) -> int:
    """Number of splits. A multiprocessor runs one program at a time. Where whole rows leave some idle: the number with
    the least time by the cost model above, in rounds of one program per multiprocessor."""
    if num_programs >= num_processors:
        return 1

    def microseconds(splits: int) -> float:
        rounds = -(-num_programs * splits // num_processors)
        return rounds * (ROW / splits + START) + (splits > 1) * (MERGE + num_programs * splits * SHARE)

    return min(range(1, min(MAX_SPLITS, max(1, len_bound // MIN_SPAN)) + 1), key=microseconds)


def _as_int32(index: Tensor | None, plan: TritonPlan) -> tuple[Tensor, int]:
    """`index` as int32 with the stride of its entries, so that one compiled kernel reads lists of any integer type. A
    stride of 0 means that there is no list; the tensor is then arbitrary."""
    if index is None:
        return plan.page_table, 0
    if index.dtype == torch.int64:
        return index.view(torch.int32), 2  # the lower halves
    return index, 1


def _launch(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    plan: TritonPlan,
    scale: float,
    out: Tensor,
    work: LatentWork,
    num_tokens: int,
    splits: int,
    tokens: tuple[Tensor, int],
    rows: tuple[Tensor, int],
) -> None:
    num_heads = q_latent.shape[0]
    num_pages, page = cache.shape[:2]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    desc = TensorDescriptor(cache, [num_pages * page, RANK + ROPE], [RANK + ROPE, 1], [min(page, 64), 64], layout)
    if work.partial is None:  # neither read nor written, but their type is part of the kernel's signature
        work.partial = work.best = work.total = torch.empty(4, dtype=torch.float32, device=cache.device)
    _latent_hopper_kernel[(triton.cdiv(num_heads, HEADS), splits, num_tokens)](
        q_latent,
        q_rope,
        desc,
        out,
        work.partial,
        work.best,
        work.total,
        plan.page_table,
        plan.positions,
        tokens[0],
        rows[0],
        q_latent.stride(1),
        q_latent.stride(0),
        out.stride(1),
        out.stride(0),
        plan.page_table.stride(0),
        tokens[1],
        rows[1],
        scale * 1.4426950408889634,
        NUM_HEADS=num_heads,
        PAGE=page,
        MIN_BLOCKS=MIN_SPAN // BLOCK,
        num_warps=4,
        launch_pdl=True,
    )
