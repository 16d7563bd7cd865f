"""The delta rule's walk over chunks for Hopper, norm and gate included: heads of 128 x 128 in bfloat16 or float16.

Written in Gluon, because the walk is a chain of products and Triton waits for each of them. A program has one head of
one row. Two groups of four warps have 64 values of the head's matrix each, in registers: what one product yields is the
left factor of the next one as it lies there, so nothing of the chain goes through shared memory. While one group is
between products the other one has some under way. One warp copies chunks with the copy engine, and a third group norms
and gates what comes out of them. `recurrent_ready` makes what the chunks are of, `recurrent_walk` launches it,
`trial_recurrent` decides whether it is used.

All that is in shared memory is there twice: chunk `i` has the places `i % 2`, which are filled for the `i // 2`th time.
What comes out of a chunk goes one place further on, because something seems to come out before the first. Barriers, two
of each:
    first_full    keys and values of a chunk are there (the copying warp to the groups that walk)
    second_full   queries, T, scores and how it fades are there (likewise)
    empty         both groups are done with a chunk's tiles (back to the copying warp)
    result_full   both groups have stored what comes out of a chunk (to the group that finishes)
    result_empty  the finishing group has read it, and its gate (to both groups and to the copying warp)
    gate_full     the output's gate of a chunk is there (the copying warp to the finishing group)
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

from quire.kernels.triton.gluon_names import thread_barrier
from quire.kernels.triton.hopper_math import doubled_silu, halved, joined, wide

# ---------------------------------------------------------------------------------------------------------------------
# The groups that walk


@gluon.jit
def _tell(results, result_full, result_empty, i, result, X: gl.constexpr):
    """What came out of the chunk before this one, for the group that finishes."""
    mbarrier.wait(result_empty.index(i % 2), (i // 2 & 1) ^ 1)
    results.index(i % 2 * 2 + X).permute((1, 0)).store(result)
    mbarrier.arrive(result_full.index(i % 2), count=1)


@gluon.jit
def _walk(tiles, lines, results, barriers, matrix_ptr, last_ptr, num_chunks, X: gl.constexpr, HEADS: gl.constexpr):
    """64 values of the head over all chunks. With S the matrix so far, a chunk's tokens write U = T (V - exp(G) K S),
    where T has beta in it already, and read exp(G) Q S + scores U; S fades and takes up K^T U, each token's part by how
    much it fades until the chunk's end. Everything has its values first: the matrix is [value, key], what is written
    and what comes out is [value, token]."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=2)
    A_WIDE: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=WIDE, k_width=2)
    TOKEN: gl.constexpr = gl.SliceLayout(0, MMA)
    q_tile, k_tile, v_tile, t_tile, scores_tile = tiles
    first_full, second_full, empty, result_full, result_empty, _gate_full = barriers
    dtype: gl.constexpr = q_tile.dtype
    values = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    keys = gl.arange(0, 128, gl.SliceLayout(0, WIDE))
    in_matrix = matrix_ptr + values[:, None] * 128 + keys[None, :]
    matrix = gl.load(in_matrix)
    nothing = gl.full([64, 64], 0.0, gl.float32, MMA)
    last = gl.load(last_ptr)
    # Of a chunk that seems to have been before the first. It is a product, although of nothing: the compiler then knows
    # that these sums belong to the matrix units, and puts no waits of its own into the loop.
    update = gl.full([64, 64], 0.0, dtype, A)
    out = warpgroup_mma(update, scores_tile.index(0), nothing, use_acc=False, is_async=True)
    old = gl.convert_layout(matrix.to(dtype), A)
    out, update = warpgroup_mma_wait(0, deps=[out, update])
    result = out.to(dtype)
    for i in range(num_chunks):
        stage = i % 2
        full = i // 2 & 1
        fade = last
        last = gl.load(last_ptr + gl.minimum(i + 1, num_chunks - 1).to(gl.int64) * (HEADS * 128))
        mbarrier.wait(first_full.index(stage), full)
        change = warpgroup_mma(old, k_tile.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.arrive(empty.index((i + 1) % 2), count=1, pred=i > 0)  # the chunk before is over, but for its results
        mbarrier.wait(second_full.index(stage), full)
        out = warpgroup_mma(old, q_tile.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        _tell(results, result_full, result_empty, i, result, X)
        matrix = matrix * fade
        v = v_tile.index(stage * 2 + X).permute((1, 0)).load(MMA)
        # For both: the other group has products under way meanwhile, and registers are short.
        change, out, old = warpgroup_mma_wait(0, deps=[change, out, old])
        growth = lines.index(stage * 2).load(TOKEN)
        wanted = wide(v) - change * growth[None, :]
        wanted = gl.convert_layout(wanted.to(dtype), A)
        change = warpgroup_mma(wanted, t_tile.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        out = out * growth[None, :]
        change, wanted = warpgroup_mma_wait(0, deps=[change, wanted])
        decay = lines.index(stage * 2 + 1).load(TOKEN)
        left = gl.convert_layout((change * decay[None, :]).to(dtype), A_WIDE)
        matrix = warpgroup_mma(left, k_tile.index(stage), matrix, is_async=True)
        update = gl.convert_layout(change.to(dtype), A)
        out = warpgroup_mma(update, scores_tile.index(stage).permute((1, 0)), out, is_async=True)
        matrix, left = warpgroup_mma_wait(1, deps=[matrix, left])
        old = gl.convert_layout(matrix.to(dtype), A)
        out, update = warpgroup_mma_wait(0, deps=[out, update])
        result = out.to(dtype)
    _tell(results, result_full, result_empty, num_chunks, result, X)
    gl.store(in_matrix, matrix)


# ---------------------------------------------------------------------------------------------------------------------
# The copying warp


@gluon.jit
def _copy(desc, row, into, full, BOXES: gl.constexpr):
    """BOXES times 64 columns of 64 rows: no box of the copy engine is wider than the swizzle."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    boxes = into._reinterpret(into.dtype, [BOXES, 64, 64], SHARED)
    for box in gl.static_range(BOXES):
        tma.async_copy_global_to_shared(desc, [row, box * 64], full, boxes.index(box))


@gluon.jit
def _copy_halves(desc, row, column, into, place, full):
    """128 columns of 64 rows, each group's by themselves."""
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(desc, [row, column + half * 64], full, into.index(place * 2 + half))


@gluon.jit
def _fetch_gate(x_desc, gates, barriers, i, first, column):
    """Of chunk i's output, where that of the chunk before the last one was."""
    _first_full, _second_full, _empty, _result_full, result_empty, gate_full = barriers
    turn = (i + 1) % 2
    mbarrier.wait(result_empty.index(turn), ((i + 1) // 2 & 1) ^ 1)
    mbarrier.expect(gate_full.index(turn), 64 * 256)
    _copy_halves(x_desc, first + i * 64, column, gates, turn, gate_full.index(turn))


@gluon.jit
def _fetch(descs, tiles, lines, gates, barriers, first, first_tile, num_chunks, head, HEADS: gl.constexpr,
           GROUPS: gl.constexpr):  # fmt: skip
    """Each chunk in three parts: what its first product and the change need, the other products' factors, and the
    output's gate, which is asked for a chunk later: its place is free last. Of a row's last chunk that may be another
    row's, too: nobody stores what comes of it."""
    keys_desc, values_desc, t_desc, scores_desc, gates_desc, x_desc = descs
    q_tile, k_tile, v_tile, t_tile, scores_tile = tiles
    first_full, second_full, empty, _result_full, _result_empty, _gate_full = barriers
    LINES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    boxes = lines._reinterpret(gl.float32, [2, 2, 64], LINES)
    gate_column = (HEADS + 2 * GROUPS + head) * 128
    for i in range(num_chunks):
        stage = i % 2
        tile = first_tile + i
        place = tile * HEADS + head
        q_row = (tile * (2 * GROUPS) + head // (HEADS // GROUPS)) * 64
        mbarrier.wait(empty.index(stage), (i // 2 & 1) ^ 1)
        full = first_full.index(stage)
        mbarrier.expect(full, 64 * 256 + 64 * 256)
        _copy(keys_desc, q_row + GROUPS * 64, k_tile.index(stage), full, 2)
        _copy_halves(values_desc, place * 64, 0, v_tile, stage, full)
        full = second_full.index(stage)
        mbarrier.expect(full, 64 * 256 + 64 * 128 + 64 * 128 + 2 * 256)
        _copy(keys_desc, q_row, q_tile.index(stage), full, 2)
        tma.async_copy_global_to_shared(gates_desc, [place * 2, 0], full, boxes.index(stage))
        _copy(t_desc, place * 64, t_tile.index(stage), full, 1)
        _copy(scores_desc, place * 64, scores_tile.index(stage), full, 1)
        if i > 0:
            _fetch_gate(x_desc, gates, barriers, i - 1, first, gate_column)
    _fetch_gate(x_desc, gates, barriers, num_chunks - 1, first, gate_column)


# ---------------------------------------------------------------------------------------------------------------------
# The group that finishes


@gluon.jit
def _write_ring(x_ptr, x_stride, ring_ptr, count, position, channel, CHANNELS: gl.constexpr, TAPS: gl.constexpr):
    """The last inputs of 128 channels, for the next step's convolution."""
    channels = channel + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    for age in gl.static_range(TAPS):
        place = count - 1 - age
        if place >= 0:
            x = gl.load(x_ptr + place.to(gl.int64) * x_stride + channels)
            gl.store(ring_ptr + ((position + place) % TAPS) * CHANNELS + channels, x.to(gl.float32))


@gluon.jit
def _write_rings(x_ptr, x_stride, ring_ptr, count, position, head, HEADS: gl.constexpr, GROUPS: gl.constexpr,
                 TAPS: gl.constexpr):  # fmt: skip
    """Of the head's values; one head of a group sees to query and key."""
    CHANNELS: gl.constexpr = HEADS * 128 + 2 * GROUPS * 128
    PER_GROUP: gl.constexpr = HEADS // GROUPS
    _write_ring(x_ptr, x_stride, ring_ptr, count, position, 2 * GROUPS * 128 + head * 128, CHANNELS, TAPS)
    if head % PER_GROUP == 0:
        _write_ring(x_ptr, x_stride, ring_ptr, count, position, head // PER_GROUP * 128, CHANNELS, TAPS)
        _write_ring(x_ptr, x_stride, ring_ptr, count, position, (GROUPS + head // PER_GROUP) * 128, CHANNELS, TAPS)


@gluon.jit
def _gated(part, scale, weight, gate):
    """Of [tokens, 64] values: normed, weighed and gated."""
    return (wide(part) * scale[:, None]) * (doubled_silu(halved(gate)) * weight[None, :])


@gluon.jit
def _finish(results, gates, barriers, x_ptr, x_stride, out_ptr, norm_ptr, ring_ptr, position, count, num_chunks, head,
            eps, HEADS: gl.constexpr, GROUPS: gl.constexpr, TAPS: gl.constexpr):  # fmt: skip
    """Norm and gate, 16 tokens at a time. x and out begin at the row's first token."""
    ROWS: gl.constexpr = 16
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    _first_full, _second_full, _empty, result_full, result_empty, gate_full = barriers
    _write_rings(x_ptr, x_stride, ring_ptr, count, position, head, HEADS, GROUPS, TAPS)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
    columns = gl.arange(0, 64, gl.SliceLayout(0, LOADED))
    weight_low = gl.load(norm_ptr + columns).to(gl.float32)
    weight_high = gl.load(norm_ptr + 64 + columns).to(gl.float32)
    in_out = rows[:, None] * (HEADS * 128) + columns[None, :]
    out_ptr += head * 128
    mbarrier.wait(result_full.index(0), 0)  # the chunk that seems to have been before the first
    mbarrier.arrive(result_empty.index(0), count=1)
    for i in range(num_chunks):
        turn = (i + 1) % 2
        mbarrier.wait(result_full.index(turn), (i + 1) // 2 & 1)
        # All tokens' norms side by side: each of them alone is a chain of waits. Registers do not suffice to keep what
        # is loaded for them.
        scales = ()
        for piece in gl.static_range(64 // ROWS):
            low = wide(results.index(turn * 2).slice(piece * ROWS, ROWS).load(LOADED))
            high = wide(results.index(turn * 2 + 1).slice(piece * ROWS, ROWS).load(LOADED))
            scales = joined(scales, (gl.sum(gl.fma(low, low, high * high), 1),))
        mbarrier.wait(gate_full.index(turn), i // 2 & 1)
        target = out_ptr + i.to(gl.int64) * (64 * HEADS * 128) + in_out  # type: ignore[attr-defined]
        for piece in gl.static_range(64 // ROWS):
            low = results.index(turn * 2).slice(piece * ROWS, ROWS).load(LOADED)
            high = results.index(turn * 2 + 1).slice(piece * ROWS, ROWS).load(LOADED)
            scale = gl.rsqrt(scales[piece] * (1.0 / 128) + eps)
            low = _gated(low, scale, weight_low, gates.index(turn * 2).slice(piece * ROWS, ROWS).load(LOADED))
            high = _gated(high, scale, weight_high, gates.index(turn * 2 + 1).slice(piece * ROWS, ROWS).load(LOADED))
            inside = (rows < count - i * 64 - piece * ROWS)[:, None] & (columns < 64)[None, :]
            gl.store(target, low.to(out_ptr.dtype.element_ty), mask=inside)
            gl.store(target + 64, high.to(out_ptr.dtype.element_ty), mask=inside)
            target += ROWS * HEADS * 128
        mbarrier.arrive(result_empty.index(turn), count=1)


# ---------------------------------------------------------------------------------------------------------------------
# The program


@gluon.jit
def _make_barriers(COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(2):
        mbarrier.init(barriers.index(place), count=COUNT)
    return barriers


@gluon.jit(do_not_specialize=["x_stride"], do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "rows_ptr"])
def _walk_hopper_kernel(
    x_ptr, x_desc, keys_desc, values_desc, t_desc, scores_desc, gates_desc, gates_ptr, norm_ptr, state_ptr, out_ptr,
    slots_ptr, positions_ptr, rows_ptr, x_stride, slot_stride, eps, HEADS: gl.constexpr, GROUPS: gl.constexpr,
    TAPS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """One head over all chunks of one row of the step. A model needs this compiled once, whatever the step."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    head = gl.program_id(0)
    item = gl.program_id(1)
    row = gl.load(rows_ptr + 4 * item)
    first = gl.load(rows_ptr + 4 * item + 1)
    count = gl.load(rows_ptr + 4 * item + 2)
    first_tile = gl.load(rows_ptr + 4 * item + 3)
    num_chunks = gl.cdiv(count, 64)
    state_ptr += gl.load(slots_ptr + row) * slot_stride
    position = gl.load(positions_ptr + first)
    q_tile = gl.allocate_shared_memory(dtype, [2, 64, 128], SHARED)
    k_tile = gl.allocate_shared_memory(dtype, [2, 64, 128], SHARED)
    v_tile = gl.allocate_shared_memory(dtype, [4, 64, 64], SHARED)  # a chunk's two halves side by side
    t_tile = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    scores_tile = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    results = gl.allocate_shared_memory(dtype, [4, 64, 64], SHARED)
    gates = gl.allocate_shared_memory(dtype, [4, 64, 64], SHARED)
    lines = gl.allocate_shared_memory(gl.float32, [4, 64], LINE)  # of a chunk: growth, decay
    # first_full, second_full, empty, result_full, result_empty, gate_full
    barriers = (_make_barriers(1), _make_barriers(1), _make_barriers(2), _make_barriers(2), _make_barriers(1),
                _make_barriers(1))  # fmt: skip
    fence_async_shared()
    thread_barrier()
    descs = (keys_desc, values_desc, t_desc, scores_desc, gates_desc, x_desc)
    tiles = (q_tile, k_tile, v_tile, t_tile, scores_tile)
    place = first_tile.to(gl.int64) * HEADS + head
    matrix_ptr = state_ptr + head * (128 * 128)
    last_ptr = gates_ptr + place * 128 + 63
    ring_ptr = state_ptr + HEADS * 128 * 128
    x_ptr += first.to(gl.int64) * x_stride
    out_ptr += first.to(gl.int64) * (HEADS * 128)
    gl.warp_specialize(
        [
            (_walk, (tiles, lines, results, barriers, matrix_ptr, last_ptr, num_chunks, 0, HEADS)),
            (_walk, (tiles, lines, results, barriers, matrix_ptr + 64 * 128, last_ptr, num_chunks, 1, HEADS)),
            (_finish, (results, gates, barriers, x_ptr, x_stride, out_ptr, norm_ptr, ring_ptr, position, count,
                       num_chunks, head, eps, HEADS, GROUPS, TAPS)),
            (_fetch, (descs, tiles, lines, gates, barriers, first, first_tile, num_chunks, head, HEADS,
                      GROUPS)),
        ],
        [4, 4, 1],
        [200, 80, 32],  # registers of a thread: as many for the second group as the first one gets, of what there is
    )  # fmt: skip
