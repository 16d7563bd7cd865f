"""Prepares the chunks of Kimi Delta Attention's walk for Hopper in one kernel: convolution, norms, decays, T and
scores.

Written in Gluon: a program computes a chunk of 64 tokens of one head, and no intermediate goes through global memory.
`hopper.channel_delta` launches it. Convolution and T are those of `chunk_conv` and `chunk_solve`; `channel_decays`
computes the decay factors of tokens from block to block.

A decay per channel cannot be factored out of a sum over channels, so the products between a chunk's tokens are computed
by halves (see `reference.recurrent.faded_products`): tokens of two neighbouring blocks of 1, 2, ... 32 with each other,
scaled by the decay to or from the blocks' common boundary. A thread holds two channels of 32 consecutive tokens, so it
already has the factors of small blocks when it computes those of larger ones. Shared memory consists of regions of 17
and 16 kB, so that three programs fit on a multiprocessor:

    region  inputs of   then holds
    A       values      the key, then scores
    B       the key     the query, then L's diagonal blocks, then T: of 16, of 32, whole
    C       the query   decayed keys, then -L
    D       the decays  decayed queries
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
from quire.kernels.triton.recurrent.hopper.channel_decays import (
    ONE,
    PAIRS,
    apart,
    as_pair,
    fades_of_tokens,
    join_fades,
    pick_fades,
    running_sums,
    split_pair,
    times,
    together,
)
from quire.kernels.triton.recurrent.hopper.chunk_conv import (
    SHARED,
    UNITS,
    await_part,
    by_age,
    clear_behind,
    convolve,
    fetch,
    load_taps,
    norm_tokens,
    side_by_side,
    store_values,
)
from quire.kernels.triton.recurrent.hopper.chunk_solve import MMA, SHARED_PAIRS, on_diagonal, pair, solve
from quire.kernels.triton.recurrent.hopper.chunks import BLOCKS, LINE, LOG2_E, PLANE, channel_of
from quire.kernels.triton.recurrent.hopper.finish import UNTOLD
from quire.kernels.triton.recurrent.hopper.math import exp2, joined, sigmoid

LEVELS = gl.constexpr(6)

# ---------------------------------------------------------------------------------------------------------------------
# Parts of the program


@gluon.jit
def _log2(x):
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _decays(x, dt_bias, rate, there):
    """Log decays in base 2. Tokens behind the row's end do not decay."""
    step = gl.fma(x, LOG2_E, dt_bias)
    return gl.where(there, gl.where(step > 30.0, step, _log2(1.0 + exp2(gl.minimum(step, 30.0)))) * rate, 0.0)


@gluon.jit
def _make_decays(forget, num_tokens, a_log_ptr, dt_bias_ptr, head, dtype: gl.constexpr):
    """Log decays of the tokens' even and odd channels, [64, 64] each."""
    there = (gl.arange(0, 64, gl.SliceLayout(1, PAIRS)) < num_tokens)[:, None]
    bias_ptr = dt_bias_ptr + head * 128 + 2 * gl.arange(0, 64, gl.SliceLayout(0, PAIRS))[None, :]
    rate = -gl.exp(gl.load(a_log_ptr + head).to(gl.float32))
    even, odd = split_pair(forget.load(PAIRS), dtype)
    even = _decays(even, gl.load(bias_ptr).to(gl.float32) * LOG2_E, rate, there)
    return even, _decays(odd, gl.load(bias_ptr + 1).to(gl.float32) * LOG2_E, rate, there)


@gluon.jit
def _make_beta(x_ptr, x_stride, num_tokens, lines, BETA_TOP: gl.constexpr):
    """Store the tokens' beta. Tokens behind the row's end write nothing."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    n = gl.arange(0, 64, FLAT)
    beta = gl.load(x_ptr + gl.minimum(n, num_tokens - 1) * x_stride).to(gl.float32)
    lines.index(0).store(gl.where(n < num_tokens, BETA_TOP * sigmoid(beta), 0.0))


@gluon.jit
def _faded(x, even, odd, dtype: gl.constexpr):
    """A pair in float16 times two powers of 2, as a pair of `dtype`."""
    low, high = split_pair(x, gl.float16)
    return as_pair(low * exp2(even), high * exp2(odd), dtype)


@gluon.jit
def _store_faded(
    even, odd, ends, k_tile, q_tile, keys_ptr, w_ptr, fades_ptr, always, ever, dtype: gl.constexpr, HEADS: gl.constexpr
):
    """Store what the walk multiplies with its matrix: queries and keys (`w`) scaled by the decay since the chunk began,
    and keys scaled by the decay until it ends. Also store the decay of the matrix itself, and initialize the lines in
    which the walk's programs exchange sums. `even`, `odd`: running sums within each half."""
    n = gl.arange(0, 64, gl.SliceLayout(1, PAIRS))
    channels = gl.arange(0, 64, gl.SliceLayout(0, PAIRS))
    late = (n >= 32)[:, None]
    first_even = ends.index(0).load(gl.SliceLayout(0, PAIRS))
    first_odd = ends.index(1).load(gl.SliceLayout(0, PAIRS))
    all_even = first_even + ends.index(2).load(gl.SliceLayout(0, PAIRS))
    all_odd = first_odd + ends.index(3).load(gl.SliceLayout(0, PAIRS))
    even += gl.where(late, first_even[None, :], 0.0)
    odd += gl.where(late, first_odd[None, :], 0.0)
    offsets = n[:, None] * 64 + channels[None, :]
    if always:
        k = _faded(k_tile.load(PAIRS), all_even[None, :] - even, all_odd[None, :] - odd, dtype)
        gl.store(keys_ptr + HEADS * 64 * 64 + offsets, k)
    if ever:
        gl.store(w_ptr + offsets, _faded(k_tile.load(PAIRS), even, odd, dtype))
        gl.store(keys_ptr + offsets, _faded(q_tile.load(PAIRS), even, odd, dtype))
    untold = gl.full([64], UNTOLD, gl.int32, gl.SliceLayout(0, PAIRS)).to(gl.float32, bitcast=True)
    gl.store(fades_ptr + 2 * channels, exp2(all_even))
    gl.store(fades_ptr + 2 * channels + 1, exp2(all_odd))
    gl.store(fades_ptr + 128 + channels, untold)
    gl.store(fades_ptr + 192 + channels, untold)


@gluon.jit
def _columns(x):
    """[64, 64] split into its even and odd columns."""
    return gl.split(x.reshape([64, 32, 2]))


@gluon.jit
def _put(old, new, where):
    """`new` [64, 64], packed as pairs of columns in float16 [64, 32], merged into `old` where the bits of `where` are
    set."""
    low, high = _columns(new)
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xE4;",
        "=r,r,r,r",
        [pair(low, high), old, where],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _multiply(faded_keys, faded_queries, parted, lower, scores):
    """Products of the decayed keys and queries of one level, merged into `lower` and `scores` at the bits of
    `parted`."""
    nothing = gl.full([64, 64], 0.0, gl.float32, MMA)
    fence_async_shared()
    thread_barrier()  # the inputs are written
    turned = faded_keys.permute((1, 0))
    alike = warpgroup_mma(faded_keys, turned, nothing, use_acc=False, is_async=True)
    asked = warpgroup_mma(faded_queries, turned, nothing, use_acc=False, is_async=True)
    alike, asked = warpgroup_mma_wait(0, deps=[alike, asked])
    thread_barrier()  # the inputs are read
    return _put(lower, alike, parted), _put(scores, asked, parted)


@gluon.jit
def _products(before, k_tile, q_tile, faded_keys, faded_queries, always):
    """Products of keys with earlier keys, and of queries with keys, [64, 64] each."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, MMA))[:, None]
    columns = gl.arange(0, 64, gl.SliceLayout(0, MMA))[None, :]
    between, _odd = _columns(gl.where(rows > columns, rows ^ columns, 0))
    nothing = gl.full([64, 64], 0.0, gl.float32, MMA)
    asked = warpgroup_mma(_numbers(q_tile), _numbers(k_tile).permute((1, 0)), nothing, use_acc=False, is_async=True)
    after = ()
    for _ in gl.static_range(32):
        after = joined(after, (gl.full([2, 64], 0x3C003C00, gl.int32, ONE),))  # ones
    asked = warpgroup_mma_wait(0, deps=[asked])
    low, high = _columns(gl.where(rows == columns, asked, 0.0))
    scores = pair(low, high)
    lower = between * 0
    for level in gl.static_range(LEVELS):
        fades = pick_fades(before, after, level)
        faded_queries.store(times(q_tile.load(PAIRS), fades))  # first, because this allocation is not read here
        faded_keys.store(times(k_tile.load(PAIRS), fades))
        parted = gl.where(between >> level == 1, 0xFFFF if level == 0 else -1, 0)
        if always:
            lower, scores = _multiply(_numbers(faded_keys), _numbers(faded_queries), parted, lower, scores)
        if level < LEVELS - 1:
            before, after = join_fades(before, after, level)
    return _whole(lower), _whole(scores)


@gluon.jit
def _numbers(tile):
    """A tile of pairs reinterpreted as float16 [64, 128] for the matrix units."""
    return tile._reinterpret(gl.float16, [64, 128], SHARED)


@gluon.jit
def _whole(x):
    """Pairs of columns as [64, 64] in float32."""
    low, high = split_pair(x, gl.float16)
    return gl.convert_layout(gl.join(low, high).reshape([64, 64]), MMA, assert_trivial=True)


@gluon.jit(do_not_specialize=["x_units"], do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "tiles_ptr"])
def _channel_ready_kernel(
    x_ptr,
    x_desc,
    before_desc,
    forget_desc,
    conv_ptr,
    a_log_ptr,
    dt_bias_ptr,
    state_ptr,
    keys_ptr,
    w_ptr,
    values_ptr,
    fades_ptr,
    t_desc,
    scores_desc,
    slots_ptr,
    positions_ptr,
    tiles_ptr,
    x_units,
    slot_stride,
    query_scale,
    HEADS: gl.constexpr,
    TAPS: gl.constexpr,
    BETA_TOP: gl.constexpr,
):
    """One program: one head of one chunk. A row of x is `x_units` times 8 elements; keys and `w` are pairs. A model
    needs this compiled once, whatever the step."""
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)
    KEY: gl.constexpr = 1  # index among the three convolved parts: values, key, query
    DECAYS: gl.constexpr = 3
    LAST: gl.constexpr = 31
    CHANNELS: gl.constexpr = 3 * HEADS * 128
    dtype: gl.constexpr = values_ptr.dtype.element_ty
    head = gl.program_id(0)
    tile = gl.program_id(1)
    row = gl.load(tiles_ptr + 4 * tile)
    first = gl.load(tiles_ptr + 4 * tile + 1).to(gl.int64)
    start = gl.load(tiles_ptr + 4 * tile + 2)
    num_tokens = gl.load(tiles_ptr + 4 * tile + 3) - start  # above 64 if more chunks follow
    slots = gl.allocate_shared_memory(dtype, [3 * UNITS, 8, 64], SHARED)
    forget = gl.allocate_shared_memory(dtype, [64, 128], SHARED)  # D
    ends = gl.allocate_shared_memory(gl.float32, [4, 64], LINE)  # even and odd channels of each half
    lines = gl.allocate_shared_memory(gl.float32, [1, 64], LINE)
    fulls = ()
    for _part in gl.static_range(4):
        fulls = joined(fulls, (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),))
    for part in gl.static_range(4):
        mbarrier.init(fulls[part], count=1)
    fence_async_shared()
    thread_barrier()
    x_row = first.to(gl.int32) + start
    for part in gl.static_range(3):
        fetch(x_desc, before_desc, x_row, channel_of(part, head, head, HEADS, 1), slots, part * UNITS, fulls[part])
    mbarrier.expect(fulls[DECAYS], 64 * 256)
    tma.async_copy_global_to_shared(
        forget_desc, [x_row, head * 128], fulls[DECAYS], forget._reinterpret(dtype, [64, 128], PLAIN)
    )
    x_stride = x_units * 8
    _make_beta(x_ptr + (first + start) * x_stride + CHANNELS + head, x_stride, num_tokens, lines, BETA_TOP)
    taps = by_age(load_taps(conv_ptr, channel_of(0, head, head, HEADS, 1), TAPS), TAPS)
    ring = (state_ptr + HEADS * 128 * 128, slots_ptr + row, positions_ptr + first, slot_stride)
    place = tile.to(gl.int64) * HEADS + head
    for part in range(3):  # taps of the next part are prefetched
        channel = channel_of(part, head, head, HEADS, 1)
        taps_ahead = load_taps(conv_ptr, channel_of(gl.minimum(part + 1, 2), head, head, HEADS, 1), TAPS)
        thread_barrier()  # the inputs of the preceding part have been read
        await_part(part, fulls, 3)
        if num_tokens < 64:
            clear_behind(slots, part * UNITS, num_tokens, 64)
        for half in range(2):
            mixed = convolve(slots, part * UNITS + 8 * half, taps, (ring, start + 32 * half), channel, CHANNELS, TAPS)
            if part < KEY:
                store_values(mixed, values_ptr + place * (64 * 128), half)
            else:
                # 32 tokens of a tile are four units.
                into = slots.index((part - 1) * UNITS + 4 * half)._reinterpret(gl.float16, [64, 128], SHARED)
                normed = norm_tokens(mixed, gl.where(part == KEY, 1.0, query_scale), gl.float16)
                into.slice(0, 32).store(side_by_side(normed))
        taps = by_age(taps_ahead, TAPS)
    k_tile = slots.index(0)._reinterpret(gl.int32, [64, 64], SHARED_PAIRS)  # A
    q_tile = slots.index(UNITS)._reinterpret(gl.int32, [64, 64], SHARED_PAIRS)  # B
    faded_keys = slots.index(2 * UNITS)._reinterpret(gl.int32, [64, 64], SHARED_PAIRS)  # C
    faded_queries = forget._reinterpret(gl.int32, [64, 64], SHARED_PAIRS)  # D
    mbarrier.wait(fulls[DECAYS], 0)
    even, odd = _make_decays(
        forget._reinterpret(gl.int32, [64, 64], PLANE), num_tokens, a_log_ptr, dt_bias_ptr, head, dtype
    )
    even, odd = apart(even), apart(odd)
    fades = fades_of_tokens(even, odd)
    even, odd = running_sums(even), running_sums(odd)
    ends._reinterpret(gl.float32, [2, 2, 64], BLOCKS).slice(0, 1, dim=1).store(even[LAST].reshape([2, 1, 64]))
    ends._reinterpret(gl.float32, [2, 2, 64], BLOCKS).slice(1, 1, dim=1).store(odd[LAST].reshape([2, 1, 64]))
    fence_async_shared()
    thread_barrier()  # key, query and ends are written, the decays read
    keys_ptr += (tile.to(gl.int64) * (2 * HEADS) + head) * (64 * 64)
    # Both conditions are always true, which the assembler does not know. Without them it would interleave the guarded
    # code with what follows, delay the use of products, and exceed the registers.
    always, ever = num_tokens > 0, start >= 0
    _store_faded(
        together(even),
        together(odd),
        ends,
        k_tile,
        q_tile,
        keys_ptr,
        w_ptr + place * (64 * 64),
        fades_ptr + place * 256,
        always,
        ever,
        dtype,
        HEADS,
    )
    lower, asked = _products(fades, k_tile, q_tile, faded_keys, faded_queries, always)
    gdc_launch_dependents()  # the walk can start now and waits for this kernel's end
    scores = slots.index(0)._reinterpret(dtype, [1, 64, 64], SHARED)
    lowers = slots.index(2 * UNITS)._reinterpret(gl.float16, [1, 64, 64], SHARED)
    diagonals = slots.index(UNITS)._reinterpret(gl.float32, [1, 16, 4, 16], BLOCKS)
    scores.index(0).store(asked.to(dtype))
    negative = lower * -lines.index(0).load(gl.SliceLayout(1, MMA))[:, None]
    lowers.index(0).store(negative.to(gl.float16))
    diagonals.index(0).store(on_diagonal(negative).reshape([4, 16, 16]).permute((1, 0, 2)))
    solve(scores, _numbers(q_tile), lowers, diagonals, lines, t_desc, scores_desc, place, 0, 1)
