"""Warp groups of Mamba2's walk for Hopper that walk, score and store; `mamba_kernel` describes them and their barriers.
Written in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.triton.gluon_names import thread_barrier
from quire.kernels.triton.recurrent.hopper.finish import LOADED, ROWS, write_ring
from quire.kernels.triton.recurrent.hopper.math import doubled_silu, exp2, halved, wide

FETCHED = gl.constexpr(3)  # buffers of fetched inputs
ROW_FIELDS = gl.constexpr(8)  # fields of a row in the table that `hopper.mamba` fills
LINES = gl.constexpr(4)  # lines of a head's gates in a chunk, see `hopper.mamba`
MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
WIDE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))


@gluon.jit
def _row(rows_ptr, index, HEADS: gl.constexpr):
    """First token, number of tokens, first chunk, slot and position of the item's row. Not prefetched: with Triton 3.6
    some groups would then keep using the first item's number of tokens."""
    at = rows_ptr + index // HEADS * ROW_FIELDS
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4)


# ---------------------------------------------------------------------------------------------------------------------
# The group that walks


@gluon.jit
def _tell(results, result_full, result_empty, n, result):
    """Pass the preceding chunk's result to the storing group."""
    mbarrier.wait(result_empty.index(n % 2), (n // 2 & 1) ^ 1)
    results.index(n % 2).store(result)
    mbarrier.arrive(result_full.index(n % 2), count=1)


@gluon.jit
def _walk(
    rows_ptr, num_items, tiles, matrix_tile, results, lines, barriers, state_ptr, slot_stride, HEADS: gl.constexpr
):
    """Walk over the chunks. With S the matrix so far, a chunk's tokens read exp(G) C S + scores V; S decays and is
    incremented by V^T B, each token's part scaled by its step size and its decay until the chunk's end. The matrix is
    [value, key], results are [token, value]."""
    k_tile, q_tile, plain_tile, faded_tile, scores_tile = tiles
    values_full, keys_full, keys_empty, scores_full, done, result_full, result_empty = barriers
    dtype: gl.constexpr = k_tile.dtype
    values = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    keys = gl.arange(0, 128, gl.SliceLayout(0, WIDE))
    nothing = gl.full([64, 64], 0.0, gl.float32, MMA)
    result = gl.full([64, 64], 0.0, dtype, MMA)  # the virtual chunk before the first
    n = 0
    for index in range(gl.program_id(0), num_items, gl.num_programs(0)):
        _first, count, _tile, slot, _position = _row(rows_ptr, index, HEADS)
        in_matrix = state_ptr + slot.to(gl.int64) * slot_stride + index % HEADS * (64 * 128)
        in_matrix = in_matrix + values[:, None] * 128 + keys[None, :]
        matrix = gl.load(in_matrix)
        for _ in range(gl.cdiv(count, 64)):
            stage = n % 2
            full = n // 2 & 1
            place = n % FETCHED
            mbarrier.wait(keys_full.index(place), n // FETCHED & 1)
            matrix_tile.store(matrix.to(dtype))
            growth = lines.index(place * LINES + 2)
            matrix = matrix * growth.slice(63, 1).load(gl.SliceLayout(1, WIDE))[:, None]
            fence_async_shared()
            thread_barrier()
            # All warps have waited for the preceding products.
            mbarrier.arrive(done.index(1 - stage), count=1, pred=n > 0)
            mbarrier.arrive(keys_empty.index((n + FETCHED - 1) % FETCHED), count=1, pred=n > 0)
            out = warpgroup_mma(q_tile.index(place), matrix_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
            mbarrier.wait(values_full.index(stage), full)
            matrix = warpgroup_mma(faded_tile.index(stage).permute((1, 0)), k_tile.index(place), matrix, is_async=True)
            _tell(results, result_full, result_empty, n, result)
            growing = growth.load(gl.SliceLayout(1, MMA))[:, None]
            mbarrier.wait(scores_full.index(stage), full)
            out = warpgroup_mma_wait(1, deps=[out])
            out = out * growing
            out = warpgroup_mma(scores_tile.index(stage), plain_tile.index(stage), out, is_async=True)
            matrix, out = warpgroup_mma_wait(0, deps=[matrix, out])
            result = out.to(dtype)
            n += 1
        gl.store(in_matrix, matrix)
    _tell(results, result_full, result_empty, n, result)


# ---------------------------------------------------------------------------------------------------------------------
# The scoring group


@gluon.jit
def _weigh(rows_ptr, num_items, k_tile, q_tile, scores_tile, lines, barriers, skip_ptr, HEADS: gl.constexpr):
    """Compute the scores, how much each token reads of each other one's value, from the products of queries and keys.
    What a token reads of itself includes the skip."""
    keys_full, scores_full, done = barriers
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    COLUMN: gl.constexpr = gl.SliceLayout(0, MMA)
    readers = gl.arange(0, 64, ROW)[:, None]
    writers = gl.arange(0, 64, COLUMN)[None, :]
    nothing = gl.full([64, 64], 0.0, gl.float32, MMA)
    n = 0
    for index in range(gl.program_id(0), num_items, gl.num_programs(0)):
        _first, count, _tile, _slot, _position = _row(rows_ptr, index, HEADS)
        skip = gl.load(skip_ptr + index % HEADS).to(gl.float32)
        for _ in range(gl.cdiv(count, 64)):
            stage = n % 2
            place = n % FETCHED
            mbarrier.wait(keys_full.index(place), n // FETCHED & 1)
            k = k_tile.index(place)
            alike = warpgroup_mma(q_tile.index(place), k.permute((1, 0)), nothing, use_acc=False, is_async=True)
            line = place * LINES
            between = lines.index(line).load(ROW)[:, None] - lines.index(line + 1).load(COLUMN)[None, :]
            between = exp2(gl.where(readers >= writers, between, -1e30))
            alike, between = warpgroup_mma_wait(0, deps=[alike, between])
            scores = alike * between
            scores = gl.where(readers == writers, scores + skip, scores)
            mbarrier.wait(done.index(stage), (n // 2 & 1) ^ 1)
            scores_tile.index(stage).store(scores.to(k_tile.dtype))
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(scores_full.index(stage), count=1)
            n += 1


# ---------------------------------------------------------------------------------------------------------------------
# The group that gates and stores


@gluon.jit
def _write_rings(
    x_ptr, x_stride, ring_ptr, position, count, head, HEADS: gl.constexpr, GROUPS: gl.constexpr, TAPS: gl.constexpr
):
    """Update the rings of the head's values; the first head of a group also updates those of key and query."""
    CHANNELS: gl.constexpr = HEADS * 64 + 2 * GROUPS * 128
    PER_GROUP: gl.constexpr = HEADS // GROUPS
    write_ring(x_ptr, x_stride, ring_ptr, count, position, head * 64, CHANNELS, TAPS, 64)
    if head % PER_GROUP == 0:
        for part in gl.static_range(2):
            channel = HEADS * 64 + (part * GROUPS + head // PER_GROUP) * 128
            write_ring(x_ptr, x_stride, ring_ptr, count, position, channel, CHANNELS, TAPS)


@gluon.jit
def _finish(
    rows_ptr,
    num_items,
    results,
    gates,
    barriers,
    out_ptr,
    x_ptr,
    x_stride,
    ring_ptr,
    slot_stride,
    GATED: gl.constexpr,
    HEADS: gl.constexpr,
    GROUPS: gl.constexpr,
    TAPS: gl.constexpr,
):
    """Gate and store the results. After a row's last chunk, whose inputs the convolution has then read, store the row's
    last inputs in its rings. x begins at the values."""
    result_full, result_empty, gate_full = barriers
    tokens = gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
    columns = gl.arange(0, 64, gl.SliceLayout(0, LOADED))
    mbarrier.wait(result_full.index(0), 0)  # the virtual chunk before the first
    mbarrier.arrive(result_empty.index(0), count=1)
    n = 1
    for index in range(gl.program_id(0), num_items, gl.num_programs(0)):
        first, count, _tile, slot, position = _row(rows_ptr, index, HEADS)
        head = index % HEADS
        target = out_ptr + first.to(gl.int64) * (HEADS * 64) + head * 64
        target = target + tokens[:, None] * (HEADS * 64) + columns[None, :]
        for i in range(gl.cdiv(count, 64)):
            place = n % 2
            mbarrier.wait(result_full.index(place), n // 2 & 1)
            if GATED:
                mbarrier.wait(gate_full.index(place), (n - 1) // 2 & 1)
            for piece in gl.static_range(64 // ROWS):
                result = results.index(place).slice(piece * ROWS, ROWS).load(LOADED)
                if GATED:
                    gate = doubled_silu(halved(gates.index(place).slice(piece * ROWS, ROWS).load(LOADED)))
                    result = (wide(result) * gate).to(out_ptr.dtype.element_ty)
                inside = (tokens < count - i * 64 - piece * ROWS)[:, None] & (columns < 64)[None, :]
                gl.store(target, result, mask=inside)
                target += ROWS * HEADS * 64
            mbarrier.arrive(result_empty.index(place), count=1)
            n += 1
        _write_rings(
            x_ptr + first.to(gl.int64) * x_stride,
            x_stride,
            ring_ptr + slot.to(gl.int64) * slot_stride,
            position,
            count,
            head,
            HEADS,
            GROUPS,
            TAPS,
        )
