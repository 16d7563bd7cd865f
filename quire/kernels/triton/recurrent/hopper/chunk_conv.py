"""The convolution of one chunk for Hopper's recurrent layers: 64 tokens of 128 channels (a head's values, a key or a
query; two of Mamba2's heads) or of 64, with SiLU and, for keys and queries of delta nets, L2 norm. Written in Gluon.
`chunks` and `channel_chunks` call it for each of their parts, `mamba_kernel` for a program's values.

TMA fetches a part as 4 tokens before the chunk, of which at most the last three are read, and the chunk's 64: 17 kB of
shared memory for 128 channels. Those are processed by halves, which needs half the registers for results and, in a
loop, half the code. A thread holds 8 channels of 4 consecutive tokens, so inputs move from tap to tap in its registers.
Shared memory is counted in units of 4 tokens, [channels / 16, 64], whose shape implies the number of channels.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from quire.kernels.triton.gluon_names import thread_barrier
from quire.kernels.triton.recurrent.hopper.math import doubled_silu, halved, joined, wide
from quire.kernels.triton.recurrent.step import L2_EPS as _L2_EPS

L2_EPS = gl.constexpr(_L2_EPS.value)
UNITS = gl.constexpr(17)  # units of 4 tokens that the inputs of a part take
CONV = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # [8 blocks of 4 tokens, channels]
CONV_64 = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # [16 blocks of 4 tokens, 64 channels]
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))  # for the matrix units


@gluon.jit
def fetch(x_desc, before_desc, row, channel, slots, unit, full):
    """Start copying a part: its tokens, from `row` of x on, and the 4 before. Tokens before x are read as zeros."""
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)
    WIDTH: gl.constexpr = slots.shape[1] * 16
    TOKENS: gl.constexpr = x_desc.block_shape[0]
    before = slots.index(unit)._reinterpret(slots.dtype, [4, WIDTH], PLAIN)
    own = slots.index(unit + 1)._reinterpret(slots.dtype, [TOKENS, WIDTH], PLAIN)
    mbarrier.expect(full, (4 + TOKENS) * 2 * WIDTH)
    tma.async_copy_global_to_shared(x_desc, [row, channel], full, own)
    tma.async_copy_global_to_shared(before_desc, [row - 4, channel], full, before)


@gluon.jit
def await_part(part, fulls, PARTS: gl.constexpr):
    """Wait for a part. Barriers are separate allocations: for one selected at run time, the compiler would add
    synchronization of all threads."""
    for one in gl.static_range(PARTS):
        if part == one:
            mbarrier.wait(fulls[one], 0)


@gluon.jit
def clear_behind(slots, unit, num_tokens, TOKENS: gl.constexpr):
    """Zero the tokens behind the row's end: they belong to another row and may even contain NaN."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])  # two elements in 32 bits
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    own = slots.index(unit + 1)._reinterpret(gl.int32, [TOKENS, slots.shape[1] * 8], PLAIN)
    x = own.load(PAIRS)
    own.store(gl.where(gl.arange(0, TOKENS, gl.SliceLayout(1, PAIRS))[:, None] < num_tokens, x, 0))
    fence_async_shared()  # TMA may write there next
    thread_barrier()


@gluon.jit
def load_taps(conv_ptr, channel, TAPS: gl.constexpr, WIDTH: gl.constexpr = 128):
    """Taps as [channels, 4], zeros behind TAPS. A channel's taps are contiguous; a thread loads those of its
    channels."""
    LOADED: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        lane_bases=[[8, 0], [16, 0], [32, 0], [64 % WIDTH, 0], [0, 0]],
        warp_bases=[[0, 0], [0, 0]],
        block_bases=[],
        shape=[WIDTH, 4],
    )
    tap = gl.arange(0, 4, gl.SliceLayout(0, LOADED))
    rows = channel + gl.arange(0, WIDTH, gl.SliceLayout(1, LOADED))
    if TAPS == 4:  # contiguous over channels: loads of 16 bytes
        FLAT: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=[[1], [2], [4], [8], [16]],
            lane_bases=[[32], [64], [128], [256 % (4 * WIDTH)], [0]],
            warp_bases=[[0], [0]],
            block_bases=[],
            shape=[4 * WIDTH],
        )
        flat = gl.load(conv_ptr + channel * 4 + gl.arange(0, 4 * WIDTH, FLAT))
        return gl.convert_layout(flat.reshape([WIDTH, 4]), LOADED, assert_trivial=True)
    return gl.load(
        conv_ptr + (rows * TAPS)[:, None] + tap[None, :], mask=(tap < TAPS)[None, :] & (rows >= 0)[:, None], other=0.0
    )


@gluon.jit
def by_age(loaded, TAPS: gl.constexpr):
    """Weights of the current input, then of preceding ones by age: [1, channels] each. They are halved, because
    `doubled_silu` is SiLU of twice its argument."""
    LAYOUT: gl.constexpr = CONV if loaded.shape[0] == 128 else CONV_64
    even, odd = gl.split(halved(loaded).reshape([loaded.shape[0], 2, 2]))
    zeroth, second = gl.split(even)
    first, third = gl.split(odd)
    taps = ()
    for age in gl.static_range(TAPS):
        one = (zeroth, first, second, third)[TAPS - 1 - age]
        taps = joined(taps, (gl.convert_layout(one, gl.SliceLayout(0, LAYOUT), assert_trivial=True)[None, :],))
    return taps


@gluon.jit
def _token(blocks, token: gl.constexpr):
    """One token of each block of four: [8, 128] of [8, 4, 128], or [16, 64] of [16, 4, 64], in float32."""
    BLOCKS: gl.constexpr = blocks.shape[0]
    LAYOUT: gl.constexpr = CONV if BLOCKS == 8 else CONV_64
    LOADED: gl.constexpr = gl.BlockedLayout([1, 1, 8], [BLOCKS // 4, 1, 128 // BLOCKS], [4, 1, 1], [2, 1, 0])
    loaded = blocks.slice(token, 1, dim=1).load(LOADED).reshape([BLOCKS, blocks.shape[2]])
    return wide(gl.convert_layout(loaded, LAYOUT, assert_trivial=True))


@gluon.jit
def _from_ring(past, ring_ptr, position, channel, CHANNELS: gl.constexpr, TAPS: gl.constexpr):
    """The inputs before each block, taking those before the row's first token of the step from the ring."""
    BLOCKS: gl.constexpr = past[0].shape[0]
    LAYOUT: gl.constexpr = CONV if BLOCKS == 8 else CONV_64
    blocks = 4 * gl.arange(0, BLOCKS, gl.SliceLayout(1, LAYOUT))
    channels = channel + gl.arange(0, 1024 // BLOCKS, gl.SliceLayout(0, LAYOUT))
    found = ()
    for age in gl.static_range(1, TAPS):
        before = (blocks < age)[:, None] & (channels >= 0)[None, :]
        entry = (position - age + TAPS) % TAPS
        kept = gl.load(ring_ptr + entry * CHANNELS + (0 * blocks)[:, None] + channels[None, :], mask=before, other=0.0)
        found = joined(found, (gl.where(before, kept, past[age - 1]),))
    return found


@gluon.jit
def _blocks(slots, unit):
    """Blocks of 4 tokens from `unit` on: 32 tokens of 128 channels, [8, 4, 128], or 64 of 64, [16, 4, 64]."""
    BLOCKS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    WIDTH: gl.constexpr = slots.shape[1] * 16
    return slots.index(unit)._reinterpret(slots.dtype, [1024 // WIDTH, 4, WIDTH], BLOCKS)


@gluon.jit
def _pasts(slots, unit, where, channel, CHANNELS: gl.constexpr, TAPS: gl.constexpr):
    """The inputs before each block's first token, most recent first."""
    ring, start = where
    shifted = _blocks(slots, unit)  # shifted back by four tokens
    past = ()
    for age in gl.static_range(1, TAPS):
        past = joined(past, (_token(shifted, 4 - age),))
    if start == 0:
        if len(ring) == 2:
            ring_ptr, position = ring
        else:
            state_ptr, slots_ptr, positions_ptr, slot_stride = ring
            ring_ptr, position = state_ptr + gl.load(slots_ptr) * slot_stride, gl.load(positions_ptr).to(gl.int32)
        past = _from_ring(past, ring_ptr, position, channel, CHANNELS, TAPS)
    return past


@gluon.jit
def _mix(x, past, taps, bias, TAPS: gl.constexpr):
    """Weighted sum of a token's input and the preceding ones, then SiLU."""
    if bias is None:
        total = x * taps[0]
    else:
        total = gl.fma(x, taps[0], bias)
    for age in gl.static_range(1, TAPS):
        total = gl.fma(past[age - 1], taps[age], total)
    return doubled_silu(total)


@gluon.jit
def convolve(slots, unit, taps, where, channel, CHANNELS: gl.constexpr, TAPS: gl.constexpr, bias=None):
    """Convolution and SiLU of 32 tokens of 128 channels, or 64 of 64. Returns the four tokens of each block, [8, 128]
    or [16, 64] each, in float32. `unit`: the four tokens before them; `where`: the row's ring and the position of its
    first token (or pointers to find them), then the offset of these tokens in the row; `bias`: half the bias, [1,
    channels]."""
    past = _pasts(slots, unit, where, channel, CHANNELS, TAPS)
    own = _blocks(slots, unit + 1)
    mixed = ()
    for token in gl.static_range(4):
        x = _token(own, token)
        mixed = joined(mixed, (_mix(x, past, taps, bias, TAPS),))
        past = joined((x,), past[: TAPS - 2])
    return mixed


@gluon.jit
def store_values(mixed, values_ptr, half):
    """Store to global memory in x's type, [64 tokens, 128 channels]."""
    n = 32 * half + 4 * gl.arange(0, 8, gl.SliceLayout(1, CONV))
    target = values_ptr + n[:, None] * 128 + gl.arange(0, 128, gl.SliceLayout(0, CONV))[None, :]
    for token in gl.static_range(4):
        gl.store(target + token * 128, mixed[token].to(values_ptr.dtype.element_ty))


@gluon.jit
def norm_tokens(mixed, scale, dtype: gl.constexpr):
    """The four tokens of each block, L2-normalized and scaled."""
    normed = ()
    for token in gl.static_range(4):
        total = mixed[token]
        total = total * (gl.rsqrt(gl.sum(total * total, 1) + L2_EPS) * scale)[:, None]
        normed = joined(normed, (total.to(dtype),))
    return normed


@gluon.jit
def store_normed(mixed, scale, slots, slot, keys_ptr, mine, half):
    """Normalize and scale a key or query; store it to global memory and as a tile in shared memory."""
    n = 4 * gl.arange(0, 8, gl.SliceLayout(1, CONV))
    columns = gl.arange(0, 128, gl.SliceLayout(0, CONV))
    target = keys_ptr + (32 * half + n)[:, None] * 128 + columns[None, :]
    stored = (n < 32 * mine)[:, None] & (columns >= 0)[None, :]
    normed = norm_tokens(mixed, scale, slots.dtype)
    for token in gl.static_range(4):
        gl.store(target + token * 128, normed[token], mask=stored)
    tile = slots.index(slot * UNITS + 4 * half)._reinterpret(slots.dtype, [64, 128], SHARED)
    tile.slice(0, 32).store(side_by_side(normed))


@gluon.jit
def side_by_side(mixed):
    """The four tokens of each block in token order: [32, 128] from four [8, 128], or [64, 64] from four [16, 64].
    Elements stay in their threads."""
    TOKENS: gl.constexpr = 4 * mixed[0].shape[0]
    WIDTH: gl.constexpr = mixed[0].shape[1]
    TILE: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [4 * (WIDTH == 64), 64 % WIDTH], [512 // WIDTH, 0]],
        warp_bases=[[1024 // WIDTH, 0], [2048 // WIDTH, 0]],
        block_bases=[],
        shape=[TOKENS, WIDTH],
    )
    tile = gl.join(gl.join(mixed[0], mixed[2]), gl.join(mixed[1], mixed[3]))
    return gl.convert_layout(tile.permute((0, 2, 3, 1)).reshape([TOKENS, WIDTH]), TILE, assert_trivial=True)
