"""The delta rule's walk over chunks for Hopper, norm and gate included: heads of 128 x 128 in bfloat16 or float16.

Written in Gluon, because the walk is a chain of products and Triton waits for each of them. A program computes one head
of one row, warp-specialized. Two groups of four warps each hold 64 values of the head's matrix in registers: the result
of one product is the left operand of the next one in the same layout, so the chain does not go through shared memory.
While one group is between products, the other has some in flight. One warp copies chunks with TMA, and a third group
applies norm and gate to the results (`finish`). With so few heads that half of the GPU would idle, two programs share a
head: each walks with 64 of its values and one group, which shortens the chain, and two groups finish alternate chunks.
`chunks` prepares the chunks, `gated_delta` launches this kernel, `validation.recurrent_trials` decides whether it is
used.

Inputs are double-buffered: chunk `i` uses stage `i % 2`, filled for the `i // 2`th time. Results and their gates have
four tiles of 64 values: two chunks of a whole head, four of half a head. They are one buffer ahead of their chunk,
because a virtual chunk yields a result before the first. Barriers, one per buffer:
    first_full    keys and values of a chunk are loaded (copying warp to walking groups)
    second_full   queries, T, scores and decays are loaded (copying warp to walking groups)
    empty         both groups have finished with a chunk's tiles (back to the copying warp)
    result_full   both groups have stored a chunk's result (to the finishing group)
    result_empty  the finishing group has read the result and its gate (to walking groups and copying warp)
    gate_full     the output gate of a chunk is loaded (copying warp to finishing group)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from quire.kernels.triton.gluon_names import thread_barrier
from quire.kernels.triton.recurrent.hopper.finish import finish
from quire.kernels.triton.recurrent.hopper.math import wide

# ---------------------------------------------------------------------------------------------------------------------
# The groups that walk


@gluon.jit
def tell(results, result_full, result_empty, i, result, X: gl.constexpr, HALVES: gl.constexpr):
    """Pass the preceding chunk's result to the finishing group."""
    RING: gl.constexpr = result_full.shape[0]
    mbarrier.wait(result_empty.index(i % RING), (i // RING & 1) ^ 1)
    results.index(i % RING * HALVES + X).permute((1, 0)).store(result)
    mbarrier.arrive(result_full.index(i % RING), count=1)


@gluon.jit
def _walk(
    tiles,
    lines,
    results,
    barriers,
    matrix_ptr,
    last_ptr,
    num_chunks,
    X: gl.constexpr,
    HALVES: gl.constexpr,
    HEADS: gl.constexpr,
):
    """64 values of the head over all chunks. With S the matrix so far, a chunk's tokens write U = T (V - exp(G) K S),
    where T includes beta, and read exp(G) Q S + scores U; S decays and is incremented by K^T U, each token's part
    scaled by its decay until the chunk's end. All tiles are value-major: the matrix is [value, key], updates and
    results are [value, token]."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    A_WIDE: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=WIDE, k_width=2)
    TOKEN: gl.constexpr = gl.SliceLayout(0, MMA)
    ALONE: gl.constexpr = HALVES == 1
    q_tile, k_tile, v_tile, t_tile, scores_tile = tiles
    first_full, second_full, empty, result_full, result_empty, _gate_full = barriers
    dtype: gl.constexpr = q_tile.dtype
    values = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    keys = gl.arange(0, 128, gl.SliceLayout(0, WIDE))
    in_matrix = matrix_ptr + values[:, None] * 128 + keys[None, :]
    matrix = gl.load(in_matrix)
    nothing = gl.full([64, 64], 0.0, gl.float32, MMA)
    last = gl.load(last_ptr)
    # Result of a virtual chunk before the first. It is computed as a product with zeros: the compiler then knows that
    # these accumulators belong to the matrix units and inserts no waits of its own into the loop.
    update = gl.full([64, 64], 0.0, dtype, A)
    out = warpgroup_mma(update, scores_tile.index(0), nothing, use_acc=False, is_async=True)
    old = gl.convert_layout(matrix.to(dtype), A)
    out, update = warpgroup_mma_wait(0, deps=[out, update])
    result = out.to(dtype)
    for i in range(num_chunks):
        stage = i % 2
        full = i // 2 & 1
        fade = last
        last = gl.load(last_ptr + gl.minimum(i + 1, num_chunks - 1).to(gl.int64) * (HEADS * 256))
        mbarrier.wait(first_full.index(stage), full)
        change = warpgroup_mma(old, k_tile.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.arrive(empty.index((i + 1) % 2), count=1, pred=i > 0)  # the preceding chunk only lacks its results
        # The other products with the old matrix fill pauses. Where two groups alternate, each is awaited together with
        # the first product: the other group keeps the matrix units busy, and registers are short. A single group issues
        # them behind T's product and computes the matrix's inputs meanwhile.
        if ALONE:
            v = v_tile.index(stage).permute((1, 0)).load(MMA)
            tell(results, result_full, result_empty, i, result, X, HALVES)
            matrix = matrix * fade
            mbarrier.wait(second_full.index(stage), full)
            growth = lines.index(stage * 2).load(TOKEN)
            change, matrix, v = warpgroup_mma_wait(0, deps=[change, matrix, wide(v)])
        else:
            mbarrier.wait(second_full.index(stage), full)
            out = warpgroup_mma(old, q_tile.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            tell(results, result_full, result_empty, i, result, X, HALVES)
            matrix = matrix * fade
            v = v_tile.index(stage * HALVES + X).permute((1, 0)).load(MMA)
            change, out, old = warpgroup_mma_wait(0, deps=[change, out, old])
            growth = lines.index(stage * 2).load(TOKEN)
            v = wide(v)
        wanted = gl.convert_layout((v - change * growth[None, :]).to(dtype), A)
        change = warpgroup_mma(wanted, t_tile.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        if ALONE:
            out = warpgroup_mma(old, q_tile.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            change, wanted = warpgroup_mma_wait(1, deps=[change, wanted])
        else:
            out = out * growth[None, :]
            change, wanted = warpgroup_mma_wait(0, deps=[change, wanted])
        decay = lines.index(stage * 2 + 1).load(TOKEN)
        left = gl.convert_layout((change * decay[None, :]).to(dtype), A_WIDE)
        matrix = warpgroup_mma(left, k_tile.index(stage), matrix, is_async=True)
        update = gl.convert_layout(change.to(dtype), A)
        if ALONE:
            out, old, update = warpgroup_mma_wait(1, deps=[out, old, update])
            out = out * growth[None, :]
        out = warpgroup_mma(update, scores_tile.index(stage).permute((1, 0)), out, is_async=True)
        matrix, left = warpgroup_mma_wait(1, deps=[matrix, left])
        old = gl.convert_layout(matrix.to(dtype), A)
        out, update = warpgroup_mma_wait(0, deps=[out, update])
        result = out.to(dtype)
    tell(results, result_full, result_empty, num_chunks, result, X, HALVES)
    gl.store(in_matrix, matrix)


# ---------------------------------------------------------------------------------------------------------------------
# The copying warp


@gluon.jit
def copy_tile(desc, row, into, full, BOXES: gl.constexpr):
    """Copy BOXES times 64 columns of 64 rows: a TMA box is at most as wide as the swizzle."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    boxes = into._reinterpret(into.dtype, [BOXES, 64, 64], SHARED)
    for box in gl.static_range(BOXES):
        tma.async_copy_global_to_shared(desc, [row, box * 64], full, boxes.index(box))


@gluon.jit
def copy_halves(desc, row, column, into, place, full, HALVES: gl.constexpr):
    """Copy 64 rows of 64 columns for each of the program's halves, as separate tiles."""
    for part in gl.static_range(HALVES):
        tma.async_copy_global_to_shared(desc, [row, column + part * 64], full, into.index(place * HALVES + part))


@gluon.jit
def fetch_gate(desc, gates, barriers, i, first, column, HALVES: gl.constexpr):
    """Copy the gate of chunk i's output into the buffer that an earlier one has released."""
    _first_full, _second_full, _empty, _result_full, result_empty, gate_full = barriers
    RING: gl.constexpr = result_empty.shape[0]
    turn = (i + 1) % RING
    mbarrier.wait(result_empty.index(turn), ((i + 1) // RING & 1) ^ 1)
    mbarrier.expect(gate_full.index(turn), 64 * 128 * HALVES)
    copy_halves(desc, first + i * 64, column, gates, turn, gate_full.index(turn), HALVES)


@gluon.jit
def _fetch(
    descs,
    tiles,
    lines,
    gates,
    barriers,
    first,
    first_tile,
    num_chunks,
    head,
    half,
    HALVES: gl.constexpr,
    HEADS: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """Copy each chunk in three parts: inputs of its first product and update, operands of the other products, and the
    output's gate. The gate is loaded one chunk later, because its buffer is released last. Behind a row's end the copy
    may contain another row's gates; results computed from them are not stored."""
    keys_desc, values_desc, t_desc, scores_desc, gates_desc, x_desc = descs
    q_tile, k_tile, v_tile, t_tile, scores_tile = tiles
    first_full, second_full, empty, _result_full, _result_empty, _gate_full = barriers
    LINES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    boxes = lines._reinterpret(gl.float32, [2, 2, 64], LINES)
    gate_column = (HEADS + 2 * GROUPS + head) * 128 + half * 64
    for i in range(num_chunks):
        stage = i % 2
        tile = first_tile + i
        place = tile * HEADS + head
        q_row = (tile * (2 * GROUPS) + head // (HEADS // GROUPS)) * 64
        mbarrier.wait(empty.index(stage), (i // 2 & 1) ^ 1)
        full = first_full.index(stage)
        mbarrier.expect(full, 64 * 256 + 64 * 128 * HALVES)
        copy_tile(keys_desc, q_row + GROUPS * 64, k_tile.index(stage), full, 2)
        copy_halves(values_desc, place * 64, half * 64, v_tile, stage, full, HALVES)
        full = second_full.index(stage)
        mbarrier.expect(full, 64 * 256 + 64 * 128 + 64 * 128 + 2 * 256)
        copy_tile(keys_desc, q_row, q_tile.index(stage), full, 2)
        tma.async_copy_global_to_shared(gates_desc, [place * 4, 0], full, boxes.index(stage))
        copy_tile(t_desc, place * 64, t_tile.index(stage), full, 1)
        copy_tile(scores_desc, place * 64, scores_tile.index(stage), full, 1)
        if i > 0:
            fetch_gate(x_desc, gates, barriers, i - 1, first, gate_column, HALVES)
    fetch_gate(x_desc, gates, barriers, num_chunks - 1, first, gate_column, HALVES)


# ---------------------------------------------------------------------------------------------------------------------
# The program


@gluon.jit
def make_barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    """Allocate and initialize NUM barriers of COUNT arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(NUM):
        mbarrier.init(barriers.index(place), count=COUNT)
    return barriers


@gluon.jit
def walk_barriers(RING: gl.constexpr, HALVES: gl.constexpr):
    """Create first_full, second_full, empty, result_full, result_empty, gate_full, and make them visible to all
    threads."""
    barriers = (
        make_barriers(2, 1),
        make_barriers(2, 1),
        make_barriers(2, HALVES),
        make_barriers(RING, HALVES),
        make_barriers(RING, 1),
        make_barriers(RING, 1),
    )
    fence_async_shared()
    thread_barrier()
    return barriers


@gluon.jit
def row_of_program(rows_ptr, slots_ptr, positions_ptr):
    """The slot, position of the first token, first token, number of tokens, and first chunk of the program's row."""
    item = gl.program_id(1)
    row = gl.load(rows_ptr + 4 * item)
    first = gl.load(rows_ptr + 4 * item + 1)
    count = gl.load(rows_ptr + 4 * item + 2)
    first_tile = gl.load(rows_ptr + 4 * item + 3)
    return gl.load(slots_ptr + row), gl.load(positions_ptr + first), first, count, first_tile


@gluon.jit(do_not_specialize=["x_stride"], do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "rows_ptr"])
def _walk_hopper_kernel(
    x_ptr,
    x_desc,
    keys_desc,
    values_desc,
    t_desc,
    scores_desc,
    gates_desc,
    gates_ptr,
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
    GROUPS: gl.constexpr,
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
    v_tile = gl.allocate_shared_memory(dtype, [2 * HALVES, 64, 64], SHARED)  # the halves of a chunk side by side
    t_tile = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    scores_tile = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    results = gl.allocate_shared_memory(dtype, [RING * HALVES, 64, 64], SHARED)
    gates = gl.allocate_shared_memory(dtype, [RING * HALVES, 64, 64], SHARED)
    lines = gl.allocate_shared_memory(gl.float32, [4, 64], LINE)  # growth and decay of each stage's chunk
    barriers = walk_barriers(RING, HALVES)
    descs = (keys_desc, values_desc, t_desc, scores_desc, gates_desc, x_desc)
    tiles = (q_tile, k_tile, v_tile, t_tile, scores_tile)
    place = first_tile.to(gl.int64) * HEADS + head
    matrix_ptr = state_ptr + head * (128 * 128) + half * (64 * 128)
    last_ptr = gates_ptr + place * 256 + 63
    sums_ptr = gates_ptr + place * 256 + 128
    out_ptr += first.to(gl.int64) * (HEADS * 128)
    gdc_wait()  # wait for the prepared chunks; all other inputs are older
    rings = (x_ptr + first.to(gl.int64) * x_stride, x_stride, state_ptr + HEADS * 128 * 128, position, count)
    # Registers per thread of the other warp groups; the first group gets the rest: for a whole head, as many as the
    # second.
    if HALVES == 2:
        gl.warp_specialize(
            [
                (_walk, (tiles, lines, results, barriers, matrix_ptr, last_ptr, num_chunks, 0, 2, HEADS)),
                (_walk, (tiles, lines, results, barriers, matrix_ptr + 64 * 128, last_ptr, num_chunks, 1, 2, HEADS)),
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
                        GROUPS,
                        TAPS,
                    ),
                ),
                (
                    _fetch,
                    (descs, tiles, lines, gates, barriers, first, first_tile, num_chunks, head, half, 2, HEADS, GROUPS),
                ),
            ],
            [4, 4, 1],
            [200, 80, 32],
        )
    else:
        gl.warp_specialize(
            [
                (_walk, (tiles, lines, results, barriers, matrix_ptr, last_ptr, num_chunks, 0, 1, HEADS)),
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
                        GROUPS,
                        TAPS,
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
                        GROUPS,
                        TAPS,
                    ),
                ),
                (
                    _fetch,
                    (descs, tiles, lines, gates, barriers, first, first_tile, num_chunks, head, half, 1, HEADS, GROUPS),
                ),
            ],
            [4, 4, 1],
            [80, 80, 32],
        )
