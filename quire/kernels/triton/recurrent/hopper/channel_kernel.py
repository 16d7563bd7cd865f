"""Kimi Delta Attention's walk over chunks for Hopper, norm and gate included: heads of 128 x 128 in 16 bits.

Written in Gluon. Warp groups, buffers and barriers are those of `delta_kernel`; the difference is one decay per key
channel. Decays are already multiplied into the incoming keys and queries, so tokens need no factors of their own: keys
scaled as queries are (`w`) read the matrix, other keys write it, and a chunk's decay is a vector of 128. `first_full`
signals w, values and decays, `second_full` the other tiles. `channel_chunks` prepares the chunks, `channel_delta`
launches this kernel, `validation.recurrent_trials` decides whether it is used.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from quire.kernels.triton.recurrent.hopper.delta_kernel import (
    copy_halves,
    copy_tile,
    fetch_gate,
    row_of_program,
    tell,
    walk_barriers,
)
from quire.kernels.triton.recurrent.hopper.finish import finish
from quire.kernels.triton.recurrent.hopper.math import wide


@gluon.jit
def _walk(tiles, fades, results, barriers, matrix_ptr, num_chunks, X: gl.constexpr, HALVES: gl.constexpr):
    """64 values of the head over all chunks. With S the matrix so far, a chunk's tokens write U = T (V - W S) and read
    Q S + scores U; S is scaled by the decays and incremented by K^T U. All tiles are value-major, as in
    `delta_kernel`."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    A_WIDE: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=WIDE, k_width=2)
    ALONE: gl.constexpr = HALVES == 1
    q_tile, k_tile, w_tile, v_tile, t_tile, scores_tile = tiles
    first_full, second_full, empty, result_full, result_empty, _gate_full = barriers
    dtype: gl.constexpr = q_tile.dtype
    values = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    keys = gl.arange(0, 128, gl.SliceLayout(0, WIDE))
    in_matrix = matrix_ptr + values[:, None] * 128 + keys[None, :]
    matrix = gl.load(in_matrix)
    nothing = gl.full([64, 64], 0.0, gl.float32, MMA)
    # Output of a virtual chunk before the first; see `delta_kernel`.
    update = gl.full([64, 64], 0.0, dtype, A)
    out = warpgroup_mma(update, scores_tile.index(0), nothing, use_acc=False, is_async=True)
    old = gl.convert_layout(matrix.to(dtype), A)
    out, update = warpgroup_mma_wait(0, deps=[out, update])
    result = out.to(dtype)
    for i in range(num_chunks):
        stage = i % 2
        full = i // 2 & 1
        mbarrier.wait(first_full.index(stage), full)
        change = warpgroup_mma(old, w_tile.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.arrive(empty.index((i + 1) % 2), count=1, pred=i > 0)  # the preceding chunk only lacks its results
        if ALONE:
            v = v_tile.index(stage).permute((1, 0)).load(MMA)
            tell(results, result_full, result_empty, i, result, X, HALVES)
            matrix = matrix * fades.index(stage).load(gl.SliceLayout(0, WIDE))[None, :]
            mbarrier.wait(second_full.index(stage), full)
            change, matrix, v = warpgroup_mma_wait(0, deps=[change, matrix, wide(v)])
        else:
            mbarrier.wait(second_full.index(stage), full)
            out = warpgroup_mma(old, q_tile.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            tell(results, result_full, result_empty, i, result, X, HALVES)
            matrix = matrix * fades.index(stage).load(gl.SliceLayout(0, WIDE))[None, :]
            v = v_tile.index(stage * HALVES + X).permute((1, 0)).load(MMA)
            change, out, old = warpgroup_mma_wait(0, deps=[change, out, old])
            v = wide(v)
        wanted = gl.convert_layout((v - change).to(dtype), A)
        change = warpgroup_mma(wanted, t_tile.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        if ALONE:
            out = warpgroup_mma(old, q_tile.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            change, wanted = warpgroup_mma_wait(1, deps=[change, wanted])
        else:
            change, wanted = warpgroup_mma_wait(0, deps=[change, wanted])
        update = gl.convert_layout(change.to(dtype), A)
        matrix = warpgroup_mma(gl.convert_layout(update, A_WIDE), k_tile.index(stage), matrix, is_async=True)
        out = warpgroup_mma(update, scores_tile.index(stage).permute((1, 0)), out, is_async=True)
        if ALONE:
            matrix, out, old, update = warpgroup_mma_wait(1, deps=[matrix, out, old, update])
        else:
            matrix, update = warpgroup_mma_wait(1, deps=[matrix, update])
        old = gl.convert_layout(matrix.to(dtype), A)
        out, update = warpgroup_mma_wait(0, deps=[out, update])
        result = out.to(dtype)
    tell(results, result_full, result_empty, num_chunks, result, X, HALVES)
    gl.store(in_matrix, matrix)


@gluon.jit
def _fetch(
    descs,
    tiles,
    fades,
    gates,
    barriers,
    first,
    first_tile,
    num_chunks,
    head,
    half,
    HALVES: gl.constexpr,
    HEADS: gl.constexpr,
):
    """Copy each chunk in three parts, as in `delta_kernel`."""
    keys_desc, w_desc, values_desc, t_desc, scores_desc, fades_desc, gate_desc = descs
    q_tile, k_tile, w_tile, v_tile, t_tile, scores_tile = tiles
    first_full, second_full, empty, _result_full, _result_empty, _gate_full = barriers
    LINES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    boxes = fades._reinterpret(gl.float32, [2, 2, 64], LINES)
    gate_column = head * 128 + half * 64
    for i in range(num_chunks):
        stage = i % 2
        tile = first_tile + i
        place = tile * HEADS + head
        q_row = (tile * (2 * HEADS) + head) * 64
        mbarrier.wait(empty.index(stage), (i // 2 & 1) ^ 1)
        full = first_full.index(stage)
        mbarrier.expect(full, 64 * 256 + 64 * 128 * HALVES + 2 * 256)
        copy_tile(w_desc, place * 64, w_tile.index(stage), full, 2)
        copy_halves(values_desc, place * 64, half * 64, v_tile, stage, full, HALVES)
        tma.async_copy_global_to_shared(fades_desc, [place * 4, 0], full, boxes.index(stage))
        full = second_full.index(stage)
        mbarrier.expect(full, 2 * 64 * 256 + 2 * 64 * 128)
        copy_tile(keys_desc, q_row, q_tile.index(stage), full, 2)
        copy_tile(t_desc, place * 64, t_tile.index(stage), full, 1)
        copy_tile(keys_desc, q_row + HEADS * 64, k_tile.index(stage), full, 2)
        copy_tile(scores_desc, place * 64, scores_tile.index(stage), full, 1)
        if i > 0:
            fetch_gate(gate_desc, gates, barriers, i - 1, first, gate_column, HALVES)
    fetch_gate(gate_desc, gates, barriers, num_chunks - 1, first, gate_column, HALVES)


@gluon.jit(do_not_specialize=["x_stride"], do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "rows_ptr"])
def _channel_hopper_kernel(
    x_ptr,
    keys_desc,
    w_desc,
    values_desc,
    t_desc,
    scores_desc,
    fades_desc,
    gate_desc,
    fades_ptr,
    norm_ptr,
    state_ptr,
    out_ptr,
    slots_ptr,
    positions_ptr,
    rows_ptr,
    x_stride,
    slot_stride,
    eps,
    HALVES: gl.constexpr,
    HEADS: gl.constexpr,
    TAPS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One program: HALVES of one head over all chunks of one row of the step. A model needs this compiled for one and
    for two halves, whatever the step."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    RING: gl.constexpr = 4 // HALVES  # buffers of results and their gates
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    head = gl.program_id(0) * HALVES // 2
    half = gl.program_id(0) % (3 - HALVES)
    slot, position, first, count, first_tile = row_of_program(rows_ptr, slots_ptr, positions_ptr)
    num_chunks = gl.cdiv(count, 64)
    state_ptr += slot * slot_stride
    q_tile = gl.allocate_shared_memory(dtype, [2, 64, 128], SHARED)
    k_tile = gl.allocate_shared_memory(dtype, [2, 64, 128], SHARED)
    w_tile = gl.allocate_shared_memory(dtype, [2, 64, 128], SHARED)
    v_tile = gl.allocate_shared_memory(dtype, [2 * HALVES, 64, 64], SHARED)  # the halves of a chunk side by side
    t_tile = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    scores_tile = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    results = gl.allocate_shared_memory(dtype, [RING * HALVES, 64, 64], SHARED)
    gates = gl.allocate_shared_memory(dtype, [RING * HALVES, 64, 64], SHARED)
    fades = gl.allocate_shared_memory(gl.float32, [2, 128], LINE)
    barriers = walk_barriers(RING, HALVES)
    descs = (keys_desc, w_desc, values_desc, t_desc, scores_desc, fades_desc, gate_desc)
    tiles = (q_tile, k_tile, w_tile, v_tile, t_tile, scores_tile)
    matrix_ptr = state_ptr + head * (128 * 128) + half * (64 * 128)
    sums_ptr = fades_ptr + (first_tile.to(gl.int64) * HEADS + head) * 256 + 128
    out_ptr += first.to(gl.int64) * (HEADS * 128)
    gdc_wait()  # wait for the prepared chunks; all other inputs are older
    rings = (x_ptr + first.to(gl.int64) * x_stride, x_stride, state_ptr + HEADS * 128 * 128, position, count)
    # Registers per thread of the other warp groups; the first group gets the rest: for a whole head, as many as the
    # second.
    if HALVES == 2:
        gl.warp_specialize(
            [
                (_walk, (tiles, fades, results, barriers, matrix_ptr, num_chunks, 0, 2)),
                (_walk, (tiles, fades, results, barriers, matrix_ptr + 64 * 128, num_chunks, 1, 2)),
                (
                    finish,
                    (
                        results,
                        gates,
                        barriers,
                        rings,
                        out_ptr,
                        norm_ptr,
                        sums_ptr,
                        num_chunks,
                        head,
                        half,
                        eps,
                        0,
                        1,
                        2,
                        HEADS,
                        HEADS,
                        TAPS,
                        False,
                    ),
                ),
                (_fetch, (descs, tiles, fades, gates, barriers, first, first_tile, num_chunks, head, half, 2, HEADS)),
            ],
            [4, 4, 1],
            [200, 80, 32],
        )
    else:
        gl.warp_specialize(
            [
                (_walk, (tiles, fades, results, barriers, matrix_ptr, num_chunks, 0, 1)),
                (
                    finish,
                    (
                        results,
                        gates,
                        barriers,
                        rings,
                        out_ptr,
                        norm_ptr,
                        sums_ptr,
                        num_chunks,
                        head,
                        half,
                        eps,
                        0,
                        2,
                        1,
                        HEADS,
                        HEADS,
                        TAPS,
                        False,
                    ),
                ),
                (
                    finish,
                    (
                        results,
                        gates,
                        barriers,
                        rings,
                        out_ptr,
                        norm_ptr,
                        sums_ptr,
                        num_chunks,
                        head,
                        half,
                        eps,
                        1,
                        2,
                        1,
                        HEADS,
                        HEADS,
                        TAPS,
                        False,
                    ),
                ),
                (_fetch, (descs, tiles, fades, gates, barriers, first, first_tile, num_chunks, head, half, 1, HEADS)),
            ],
            [4, 4, 1],
            [80, 80, 32],
        )
