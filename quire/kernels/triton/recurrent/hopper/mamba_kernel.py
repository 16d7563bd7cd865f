"""Mamba2's walk over chunks for Hopper: convolution of the values, recurrence, skip and gate, for heads of 64 values
with 128 keys in bfloat16 or float16.

Written in Gluon, warp-specialized and persistent: a program has one group of four warps per task. One convolves values,
one computes the scores (how much each token reads of each other one's value), one walks and holds the head's matrix in
registers, one gates and stores the output; one warp copies with TMA. All run concurrently, each on a chunk of its own,
because each alone is a chain of latencies. There are at most as many programs as multiprocessors; each continues with
the next head and row. `hopper.mamba` computes keys, queries and gates beforehand and launches this kernel,
`validation.recurrent_trials` decides whether it is used.

The chunks of all heads of a program are numbered consecutively. Chunk `n` uses buffers `n % 2`, and `n % 3` for what
TMA fetches, which has the longest latency. Results and their gates are one buffer ahead of their chunk, because a
virtual chunk yields a result before the first. Barriers, one per buffer:
    raw_full      inputs of the convolution and decays are loaded (copying warp, two arrivals)
    raw_empty     they are read (back)
    values_full   values are convolved (to the walking group)
    keys_full     keys, queries and gates are loaded (copying warp to the scoring and walking groups)
    keys_empty    the products with them are finished (back)
    scores_full   scores are computed (to the walking group)
    done          the products with values and scores are finished (back to the groups that wrote them)
    result_full   the result is stored (to the storing group)
    result_empty  result and gate are read (back to the walking group and the copying warp)
    gate_full     the output gate is loaded (copying warp to the storing group)
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
from quire.kernels.triton.recurrent.hopper.chunk_conv import (
    CONV_64,
    SHARED,
    UNITS,
    by_age,
    clear_behind,
    convolve,
    fetch,
    load_taps,
    side_by_side,
)
from quire.kernels.triton.recurrent.hopper.delta_kernel import copy_tile, make_barriers
from quire.kernels.triton.recurrent.hopper.finish import LOADED, ROWS, write_ring
from quire.kernels.triton.recurrent.hopper.math import doubled_silu, exp2, halved, joined, wide

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


# ---------------------------------------------------------------------------------------------------------------------
# The group that convolves


@gluon.jit
def _fading(fades):
    """Factors of the tokens' values for the matrix update: [16, 1] for each of a block's four tokens."""
    FOURS: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2]],
        lane_bases=[[0, 0], [0, 0], [0, 0], [1, 0], [2, 0]],
        warp_bases=[[4, 0], [8, 0]],
        block_bases=[],
        shape=[16, 4],
    )
    even, odd = gl.split(fades.load(FOURS).reshape([16, 2, 2]))
    zeroth, second = gl.split(even)
    first, third = gl.split(odd)
    fading = ()
    for token in gl.static_range(4):
        one = (zeroth, first, second, third)[token]
        fading = joined(fading, (gl.convert_layout(one, gl.SliceLayout(1, CONV_64), assert_trivial=True)[:, None],))
    return fading


@gluon.jit
def _convolve_chunks(
    rows_ptr,
    num_items,
    raw,
    fades,
    plain_tile,
    faded_tile,
    barriers,
    conv_ptr,
    bias_ptr,
    ring_ptr,
    slot_stride,
    GROUPS: gl.constexpr,
    HEADS: gl.constexpr,
    TAPS: gl.constexpr,
):
    """Convolve values chunk by chunk; store them plain and scaled for the matrix update."""
    raw_full, raw_empty, values_full, done = barriers
    CHANNELS: gl.constexpr = HEADS * 64 + 2 * GROUPS * 128
    dtype: gl.constexpr = plain_tile.dtype
    n = 0
    for index in range(gl.program_id(0), num_items, gl.num_programs(0)):
        _first, count, _tile, slot, position = _row(rows_ptr, index, HEADS)
        head = index % HEADS
        where = (ring_ptr + slot.to(gl.int64) * slot_stride, position)
        taps = by_age(load_taps(conv_ptr, head * 64, TAPS, 64), TAPS)
        bias = None
        if bias_ptr is not None:
            loaded = gl.load(bias_ptr + head * 64 + gl.arange(0, 64, gl.SliceLayout(0, CONV_64)))
            bias = loaded.to(gl.float32)[None, :] * 0.5
        for i in range(gl.cdiv(count, 64)):
            stage = n % 2
            place = n % FETCHED
            mbarrier.wait(raw_full.index(place), n // FETCHED & 1)
            if count - i * 64 < 64:
                clear_behind(raw, place * UNITS, count - i * 64, 64)
            mixed = convolve(raw, place * UNITS, taps, (where, i * 64), head * 64, CHANNELS, TAPS, bias)
            fading = _fading(fades.index(place))
            plain = ()
            faded = ()
            for token in gl.static_range(4):
                plain = joined(plain, (mixed[token].to(dtype),))
                faded = joined(faded, ((mixed[token] * fading[token]).to(dtype),))
            mbarrier.wait(done.index(stage), (n // 2 & 1) ^ 1)
            plain_tile.index(stage).store(side_by_side(plain))
            faded_tile.index(stage).store(side_by_side(faded))
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(raw_empty.index(place), count=1)
            mbarrier.arrive(values_full.index(stage), count=1)
            n += 1


# ---------------------------------------------------------------------------------------------------------------------
# The copying warp


@gluon.jit
def _fetch_gate(gate_desc, gates, result_empty, gate_full, n, token, head):
    """Copy the gate of the chunk before `n` into the buffer that an earlier one has released."""
    place = n % 2
    mbarrier.wait(result_empty.index(place), (n // 2 & 1) ^ 1)
    full = gate_full.index(place)
    mbarrier.expect(full, 64 * 128)
    tma.async_copy_global_to_shared(gate_desc, [token, head * 64], full, gates.index(place))


@gluon.jit
def _fetch(
    rows_ptr,
    num_items,
    descs,
    raw,
    fades,
    k_tile,
    q_tile,
    lines,
    gates,
    barriers,
    GROUPS: gl.constexpr,
    HEADS: gl.constexpr,
    GATED: gl.constexpr,
):
    """Copy the chunks' inputs. Gates are loaded one chunk later, because their buffers are released last. Behind a
    row's end the copy may contain another row's gates; results computed from them are not stored."""
    x_desc, before_desc, gate_desc, keys_desc, lines_desc, fades_desc = descs
    raw_full, raw_empty, keys_full, keys_empty, result_empty, gate_full = barriers
    FLAT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    line_boxes = lines._reinterpret(gl.float32, [FETCHED, LINES, 64], FLAT)
    fade_boxes = fades._reinterpret(gl.float32, [FETCHED, 1, 64], FLAT)
    n = 0
    token_before = 0  # first token of the preceding chunk
    head_before = 0
    for index in range(gl.program_id(0), num_items, gl.num_programs(0)):
        first, count, first_tile, _slot, _position = _row(rows_ptr, index, HEADS)
        head = index % HEADS
        for i in range(gl.cdiv(count, 64)):
            place = n % FETCHED
            tile = first_tile + i
            there = tile * HEADS + head
            mbarrier.wait(raw_empty.index(place), (n // FETCHED & 1) ^ 1)
            full = raw_full.index(place)
            mbarrier.expect(full, 256)
            tma.async_copy_global_to_shared(fades_desc, [there, 0], full, fade_boxes.index(place))
            fetch(x_desc, before_desc, first + i * 64, (HEADS + head) * 64, raw, place * UNITS, full)
            mbarrier.wait(keys_empty.index(place), (n // FETCHED & 1) ^ 1)
            full = keys_full.index(place)
            mbarrier.expect(full, 2 * 64 * 256 + LINES * 256)
            key = (tile * (2 * GROUPS) + head // (HEADS // GROUPS)) * 64
            copy_tile(keys_desc, key, k_tile.index(place), full, 2)
            copy_tile(keys_desc, key + GROUPS * 64, q_tile.index(place), full, 2)
            tma.async_copy_global_to_shared(lines_desc, [there * LINES, 0], full, line_boxes.index(place))
            if GATED and n > 0:
                _fetch_gate(gate_desc, gates, result_empty, gate_full, n, token_before, head_before)
            token_before = first + i * 64
            head_before = head
            n += 1
    if GATED:
        _fetch_gate(gate_desc, gates, result_empty, gate_full, n, token_before, head_before)


# ---------------------------------------------------------------------------------------------------------------------
# The program


@gluon.jit(do_not_specialize=["x_stride", "num_items"], do_not_specialize_on_alignment=["rows_ptr"])
def _mamba_hopper_kernel(
    x_ptr,
    x_desc,
    before_desc,
    gate_desc,
    keys_desc,
    lines_desc,
    fades_desc,
    conv_ptr,
    bias_ptr,
    skip_ptr,
    state_ptr,
    out_ptr,
    rows_ptr,
    num_items,
    x_stride,
    slot_stride,
    GATED: gl.constexpr,
    HEADS: gl.constexpr,
    GROUPS: gl.constexpr,
    TAPS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One program: every num_programs-th (row, head) item of the step. A model needs this compiled once, whatever the
    step."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    raw = gl.allocate_shared_memory(dtype, [FETCHED * UNITS, 4, 64], SHARED)
    k_tile = gl.allocate_shared_memory(dtype, [FETCHED, 64, 128], SHARED)
    q_tile = gl.allocate_shared_memory(dtype, [FETCHED, 64, 128], SHARED)
    plain_tile = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    faded_tile = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    scores_tile = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    matrix_tile = gl.allocate_shared_memory(dtype, [64, 128], SHARED)
    results = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    gates = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    lines = gl.allocate_shared_memory(gl.float32, [FETCHED * LINES, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fades = gl.allocate_shared_memory(gl.float32, [FETCHED, 16, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    raw_full, raw_empty = make_barriers(FETCHED, 2), make_barriers(FETCHED, 1)
    keys_full, keys_empty = make_barriers(FETCHED, 1), make_barriers(FETCHED, 1)
    values_full, scores_full, done = make_barriers(2, 1), make_barriers(2, 1), make_barriers(2, 1)
    result_full, result_empty, gate_full = make_barriers(2, 1), make_barriers(2, 1), make_barriers(2, 1)
    fence_async_shared()
    thread_barrier()
    descs = (x_desc, before_desc, gate_desc, keys_desc, lines_desc, fades_desc)
    tiles = (k_tile, q_tile, plain_tile, faded_tile, scores_tile)
    ring_ptr = state_ptr + HEADS * 64 * 128
    gdc_wait()  # wait for keys and gates; all other inputs are older
    gl.warp_specialize(
        [
            (
                _walk,
                (
                    rows_ptr,
                    num_items,
                    tiles,
                    matrix_tile,
                    results,
                    lines,
                    (values_full, keys_full, keys_empty, scores_full, done, result_full, result_empty),
                    state_ptr,
                    slot_stride,
                    HEADS,
                ),
            ),
            (
                _weigh,
                (
                    rows_ptr,
                    num_items,
                    k_tile,
                    q_tile,
                    scores_tile,
                    lines,
                    (keys_full, scores_full, done),
                    skip_ptr,
                    HEADS,
                ),
            ),
            (
                _finish,
                (
                    rows_ptr,
                    num_items,
                    results,
                    gates,
                    (result_full, result_empty, gate_full),
                    out_ptr,
                    x_ptr + HEADS * 64,
                    x_stride,
                    ring_ptr,
                    slot_stride,
                    GATED,
                    HEADS,
                    GROUPS,
                    TAPS,
                ),
            ),
            (
                _convolve_chunks,
                (
                    rows_ptr,
                    num_items,
                    raw,
                    fades,
                    plain_tile,
                    faded_tile,
                    (raw_full, raw_empty, values_full, done),
                    conv_ptr,
                    bias_ptr,
                    ring_ptr,
                    slot_stride,
                    GROUPS,
                    HEADS,
                    TAPS,
                ),
            ),
            (
                _fetch,
                (
                    rows_ptr,
                    num_items,
                    descs,
                    raw,
                    fades,
                    k_tile,
                    q_tile,
                    lines,
                    gates,
                    (raw_full, raw_empty, keys_full, keys_empty, result_empty, gate_full),
                    GROUPS,
                    HEADS,
                    GATED,
                ),
            ),
        ],
        [4, 4, 4, 1],
        [80, 56, 152, 24],  # registers per thread; the walking group gets the rest
    )
