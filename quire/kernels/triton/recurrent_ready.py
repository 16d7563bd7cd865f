"""What the delta rule's walk for Hopper needs of every chunk, in one kernel: convolution, norms, gates, T and scores.

Written in Gluon: a program has a chunk of 64 tokens and the heads (two, or one) that share a key and a query there, and
nothing between x and what the walk reads goes through global memory. `recurrent_walk` launches it; its convolution is
`recurrent_ready_conv`, T is `recurrent_ready_solve`.

Inputs come in parts of 17 kB, a head's values, the key's or the query's, into three places; what comes of them lies
where inputs have been read, so that four programs fit on a multiprocessor. All parts are asked for at once, but with
two heads the query's follows when the first head's values are read:

    place  inputs of (two heads)               (one head)  holds then
    A      the second head's values            values      the key, then scores
    B      the key                             the key     the query, L's diagonal blocks, T: of 16, of 32, whole
    C      the first head's values, the query  the query   -L of each head

Each is allocated by itself: between places that the compiler knows to be apart it puts no barriers. `fulls` tell of
each part that it is there. Between threads of a program:
  0. before the query's inputs are asked for (C), all have read the first head's values.
  1. before A is written as the key, all have read the last values' inputs.
  2. before B is written as the query, all have read the key's inputs.
  3. before the products, key and query are written, and the query's inputs read: C is free.
  4. before A and B are written again, the matrix units have read key and query.
  5. before blocks of 16 are inverted, L's diagonal blocks are written (B); before inverses take their place, read.
  6. before the next products and the copies of scores, blocks of 16 (B), L (C) and scores (A) are written.
  7. within `join_blocks`: blocks of 16 are read, then those of 32 written.
  8. before T is written, blocks of 32 are read; before it is copied, it is written.
What the matrix units or the copy engine read, or write over, is fenced first: they see shared memory by another way
than threads do.
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
from triton.language.extra.cuda import gdc_launch_dependents

from quire.kernels.triton.gluon_names import thread_barrier
from quire.kernels.triton.hopper_math import exp2, joined
from quire.kernels.triton.recurrent_finish import UNTOLD
from quire.kernels.triton.recurrent_ready_conv import (
    SHARED,
    UNITS,
    await_part,
    convolve,
    convolve_values,
    fetch_before,
    fetch_own,
    load_taps,
)
from quire.kernels.triton.recurrent_ready_solve import MMA, invert_blocks, join_blocks

LOG2_E = gl.constexpr(1.4426950408889634)
SHARED_PAIRS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))  # two in 32 bits
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # these three: as it lies
PLANE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
BLOCKS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _load_gates(x_ptr, x_stride, num_tokens, a_log_ptr, dt_bias_ptr, head, COLUMN: gl.constexpr, HEADS: gl.constexpr,
                SHARING: gl.constexpr):  # fmt: skip
    """What gates are made of: [heads, tokens]. x begins at the chunk's first token."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [SHARING, 4 // SHARING], [1, 0])
    n = gl.arange(0, 64, gl.SliceLayout(0, LANES))
    heads = head + gl.arange(0, SHARING, gl.SliceLayout(1, LANES))
    source = x_ptr + (gl.minimum(n, num_tokens - 1) * x_stride)[None, :] + (COLUMN + heads)[:, None]
    return gl.load(source), gl.load(source + HEADS), gl.load(a_log_ptr + heads), gl.load(dt_bias_ptr + heads)


@gluon.jit
def _make_gates(loaded, num_tokens, gates_ptr, lines, SHARING: gl.constexpr):
    """The walk gets what a token sees of the state before the chunk, what is left of it behind the chunk, and two lines
    for the sums that its programs tell each other. `lines` gets the running sums of the decays, for base 2, then beta.
    Tokens behind the row's end neither decay nor write."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [SHARING, 4 // SHARING], [1, 0])
    beta, step, a_log, dt_bias = loaded
    n = gl.arange(0, 64, gl.SliceLayout(0, LANES))
    inside = (n < num_tokens)[None, :]
    step = step.to(gl.float32) + dt_bias.to(gl.float32)[:, None]
    step = gl.where(step > 20.0, step, gl.log(1.0 + gl.exp(gl.minimum(step, 20.0))))
    step = gl.where(inside, -gl.exp(a_log.to(gl.float32))[:, None] * step, 0.0)
    total = gl.associative_scan(step, 1, _add)
    last = gl.sum(gl.where((n == 63)[None, :], total, 0.0), 1)[:, None]
    beta = gl.where(inside, 1.0 / (1.0 + gl.exp(-beta.to(gl.float32))), 0.0)
    target = gates_ptr + gl.arange(0, SHARING, gl.SliceLayout(1, LANES))[:, None] * 256 + n[None, :]
    gl.store(target, gl.exp(total))
    gl.store(target + 64, gl.exp(last - total))
    untold = gl.full([SHARING, 64], UNTOLD, gl.int32, LANES).to(gl.float32, bitcast=True)
    gl.store(target + 128, untold)
    gl.store(target + 192, untold)
    lines.slice(0, SHARING).store(total * LOG2_E)
    lines.slice(SHARING, SHARING).store(beta)


@gluon.jit
def _store_squares(desc, place, tiles, SHARING: gl.constexpr):
    """[64, 64] of each head, by the copy engine."""
    for h in gl.static_range(SHARING):
        tma.async_copy_shared_to_global(desc, [(place + h).to(gl.int32) * 64, 0], tiles.index(h))


@gluon.jit
def _weigh(alike, asked, lines, scores, lowers, diagonals, SHARING: gl.constexpr):
    """Of the products of keys with keys and of queries with keys, [64, 64] each: scores, -L, and its diagonal blocks by
    themselves, in float32."""
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    COLUMN: gl.constexpr = gl.SliceLayout(0, MMA)
    rows = gl.arange(0, 64, ROW)[:, None]
    columns = gl.arange(0, 64, COLUMN)[None, :]
    for h in gl.static_range(SHARING):
        total = lines.index(h)
        beta = -lines.index(SHARING + h).load(ROW)[:, None]
        between = total.load(ROW)[:, None] - total.load(COLUMN)[None, :]
        between = exp2(gl.where(rows >= columns, between, -1e30))
        scores.index(h).store((asked * between).to(scores.dtype))
        lower = alike * (between * beta)  # its diagonal is not nothing, but nobody looks there
        lowers.index(h).store(lower.to(gl.float16))
        diagonal = gl.where(rows >> 4 == columns >> 4, lower, 0.0)
        diagonal = gl.sum(diagonal.reshape([4, 16, 4, 16]), 2)  # [4, 16, 16]: one of four is not nothing
        diagonals.slice(4 * h, 4, dim=1).store(diagonal.permute((1, 0, 2)))


@gluon.jit
def _solve(k_tile, q_tile, lowers, diagonals, lines, t_desc, scores_desc, place, SHARING: gl.constexpr):
    """T, its columns times beta, and scores of each head, from key and query [64, 128] in shared memory, whose places
    (A and B) they take. See the module for the barriers."""
    dtype: gl.constexpr = k_tile.dtype
    nothing = gl.full([64, 64], 0.0, gl.float32, MMA)
    alike = warpgroup_mma(k_tile, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    asked = warpgroup_mma(q_tile, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    alike, asked = warpgroup_mma_wait(0, deps=[alike, asked])
    thread_barrier()  # 4
    scores = k_tile._reinterpret(dtype, [2, 64, 64], SHARED)
    _weigh(alike, asked, lines, scores, lowers, diagonals, SHARING)
    thread_barrier()  # 5
    blocks = invert_blocks(diagonals._reinterpret(gl.float32, [16, 4 * SHARING, 16], PLANE), SHARING)
    thread_barrier()  # 5
    q_tile._reinterpret(gl.int32, [128, 32], SHARED_PAIRS).slice(0, 64 * SHARING).store(blocks)
    fence_async_shared()
    thread_barrier()  # 6
    _store_squares(scores_desc, place, scores, SHARING)
    inverses = join_blocks(q_tile._reinterpret(gl.float16, [2, 64, 64], SHARED), lowers, SHARING)  # 7 is within
    wholes = ()
    for h in gl.static_range(SHARING):
        beta = lines.index(SHARING + h).load(gl.SliceLayout(0, MMA))[None, :]
        wholes = joined(wholes, ((inverses[h] * beta).to(dtype),))
    thread_barrier()  # 8
    t = q_tile._reinterpret(dtype, [2, 64, 64], SHARED)
    for h in gl.static_range(SHARING):
        t.index(h).store(wholes[h])
    fence_async_shared()
    thread_barrier()  # 8
    _store_squares(t_desc, place, t, SHARING)
    tma.store_wait(0)


@gluon.jit
def _place(dtype: gl.constexpr):
    """For the inputs of a part."""
    return gl.allocate_shared_memory(dtype, [UNITS, 8, 64], SHARED)


@gluon.jit(do_not_specialize=["x_units"], do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "tiles_ptr"])
def _ready_kernel(
    x_ptr, x_desc, before_desc, conv_ptr, a_log_ptr, dt_bias_ptr, state_ptr, keys_ptr, values_ptr, gates_ptr, t_desc,
    scores_desc, slots_ptr, positions_ptr, tiles_ptr, x_units, slot_stride, query_scale, HEADS: gl.constexpr,
    GROUPS: gl.constexpr, SHARING: gl.constexpr, TAPS: gl.constexpr,
):  # fmt: skip
    """SHARING heads of one chunk, their key and query included. A row of x is `x_units` times 8 elements. A model needs
    this compiled once, whatever the step."""
    PARTS: gl.constexpr = SHARING + 2  # values of the heads, key, query
    KEY: gl.constexpr = SHARING
    QUERY: gl.constexpr = SHARING + 1
    CHANNELS: gl.constexpr = (HEADS + 2 * GROUPS) * 128
    dtype: gl.constexpr = values_ptr.dtype.element_ty
    head = gl.program_id(0) * SHARING
    group = head // (HEADS // GROUPS)
    tile = gl.program_id(1)
    row = gl.load(tiles_ptr + 4 * tile)
    first = gl.load(tiles_ptr + 4 * tile + 1).to(gl.int64)
    start = gl.load(tiles_ptr + 4 * tile + 2)
    num_tokens = gl.load(tiles_ptr + 4 * tile + 3) - start  # more than 64: others follow
    k_channel, q_channel, v_channel = (GROUPS + group) * 128, group * 128, 2 * GROUPS * 128 + head * 128
    slots = (_place(dtype), _place(dtype), _place(dtype))
    fulls = ()
    for _part in gl.static_range(PARTS):
        fulls = joined(fulls, (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),))
    lines = gl.allocate_shared_memory(gl.float32, [2 * SHARING, 64], PLANE)
    for part in gl.static_range(PARTS):
        mbarrier.init(fulls[part], count=1)
    fence_async_shared()
    thread_barrier()
    x_row = first.to(gl.int32) + start
    for part in gl.static_range(PARTS):
        mbarrier.expect(fulls[part], UNITS * 1024)
    channels = (v_channel, v_channel + 128, k_channel) if SHARING == 2 else (v_channel, k_channel, q_channel)
    for part in gl.static_range(3):  # one kind first, then the other: two for one barrier need threads to meet between
        fetch_own(x_desc, x_row, channels[part], slots[part], fulls[part])
    for part in gl.static_range(3):
        fetch_before(before_desc, x_row, channels[part], slots[part], fulls[part])
    thread_barrier()  # or the compiler asks for some of it only when it has made gates
    x_stride = x_units * 8
    loaded = _load_gates(x_ptr + (first + start) * x_stride, x_stride, num_tokens, a_log_ptr, dt_bias_ptr, head,
                         CHANNELS + HEADS * 128, HEADS, SHARING)  # fmt: skip
    taps = load_taps(conv_ptr, v_channel, TAPS)
    where = ((state_ptr + HEADS * 128 * 128, slots_ptr + row, positions_ptr + first, slot_stride), start)
    place = tile.to(gl.int64) * HEADS + head
    _make_gates(loaded, num_tokens, gates_ptr + place * 256, lines, SHARING)
    # Taps of a part are asked for before the part before it is worked on.
    for h in gl.static_range(SHARING):
        channel = v_channel + h * 128
        taps_ahead = load_taps(conv_ptr, channel + 128 if h + 1 < SHARING else k_channel, TAPS)
        await_part(slots[h], fulls[h], num_tokens)
        convolve_values(slots[h], taps, where, channel, values_ptr + (place + h) * (64 * 128), CHANNELS, TAPS)
        taps = taps_ahead
        if SHARING == 2 and h == 0:
            thread_barrier()  # 0
            fetch_own(x_desc, x_row, q_channel, slots[0], fulls[QUERY])
            fetch_before(before_desc, x_row, q_channel, slots[0], fulls[QUERY])
    k_tile = slots[KEY - 1].index(0)._reinterpret(dtype, [64, 128], SHARED)  # A
    q_tile = slots[KEY].index(0)._reinterpret(dtype, [64, 128], SHARED)  # B
    keys_ptr += (tile.to(gl.int64) * (2 * GROUPS) + group) * (64 * 128)
    mine = (head % (HEADS // GROUPS) == 0).to(gl.int32)  # the others that share them work out the same
    await_part(slots[KEY], fulls[KEY], num_tokens)
    thread_barrier()  # 1
    convolve(
        slots[KEY], slots[KEY - 1], taps, where, k_channel, 1.0, keys_ptr + GROUPS * (64 * 128), mine, CHANNELS, TAPS
    )
    taps = load_taps(conv_ptr, q_channel, TAPS)
    await_part(slots[QUERY % 3], fulls[QUERY], num_tokens)
    thread_barrier()  # 2
    convolve(slots[QUERY % 3], slots[KEY], taps, where, q_channel, query_scale, keys_ptr, mine, CHANNELS, TAPS)
    fence_async_shared()
    thread_barrier()  # 3
    lowers = slots[QUERY % 3].index(0)._reinterpret(gl.float16, [SHARING, 64, 64], SHARED)  # C
    diagonals = slots[KEY].index(0)._reinterpret(gl.float32, [16, 4 * SHARING, 16], BLOCKS)  # B
    lines = lines._reinterpret(gl.float32, [2 * SHARING, 64], LINE)
    gdc_launch_dependents()  # the walk starts where nothing is left to make ready, and waits there; earlier it lost
    _solve(k_tile, q_tile, lowers, diagonals, lines, t_desc, scores_desc, place, SHARING)
