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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
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
from quire.kernels.triton.recurrent.hopper.mamba_groups import FETCHED, LINES, _finish, _row, _walk, _weigh
from quire.kernels.triton.recurrent.hopper.math import joined

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
