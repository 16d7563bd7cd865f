"""The convolution of one chunk for Hopper's delta net: 128 channels (a head's values, a key or a query) of 64 tokens,
with SiLU and, if asked for, norm. Written in Gluon; `recurrent_ready` calls it for each of its parts.

The copy engine fetches a part as it lies: 8 tokens before the chunk, of which the last three at most are read, then its
own 64, in all 18 kB of shared memory. A thread has 8 channels of 8 tokens in a row, so that inputs move on from tap to
tap in its registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from quire.kernels.triton.gluon_names import thread_barrier
from quire.kernels.triton.hopper_math import doubled_silu, joined, wide
from quire.kernels.triton.recurrent_step import L2_EPS as _L2_EPS

L2_EPS = gl.constexpr(_L2_EPS.value)
UNITS = gl.constexpr(18)  # of a kilobyte (8 x 64 elements), that the inputs of a part take
CONV = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # [8 blocks of tokens, channels]: one of each 8


@gluon.jit
def fetch(x_desc, before_desc, row, channel, raw, part: gl.constexpr, full):
    """Asks for a part's inputs, from the token `row` of x on. What lies before x comes as zeros."""
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)
    mbarrier.expect(full, UNITS * 1024)
    before = raw.index(part * UNITS)._reinterpret(raw.dtype, [8, 128], PLAIN)
    own = raw.index(part * UNITS + 2)._reinterpret(raw.dtype, [64, 128], PLAIN)
    tma.async_copy_global_to_shared(before_desc, [row - 8, channel], full, before)
    tma.async_copy_global_to_shared(x_desc, [row, channel], full, own)


@gluon.jit
def await_part(raw, part: gl.constexpr, full, num_tokens):
    """Tokens behind the row's end are another row's: nothing of them may get into this one, least of all a NaN."""
    mbarrier.wait(full, 0)
    if num_tokens < 64:
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        own = raw.index(part * UNITS + 2)._reinterpret(raw.dtype, [64, 128], PLAIN)
        x = own.load(CONV)  # [64, 128]
        own.store(gl.where(gl.arange(0, 64, gl.SliceLayout(1, CONV))[:, None] < num_tokens, x, 0.0))
        thread_barrier()


@gluon.jit
def load_taps(conv_ptr, channel, TAPS: gl.constexpr):
    """[128 channels, 4], zeros behind TAPS. A channel's taps lie side by side; a thread loads those of its channels."""
    LOADED: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        lane_bases=[[8, 0], [16, 0], [32, 0], [64, 0], [0, 0]],
        warp_bases=[[0, 0], [0, 0]],
        block_bases=[],
        shape=[128, 4],
    )
    tap = gl.arange(0, 4, gl.SliceLayout(0, LOADED))
    rows = channel + gl.arange(0, 128, gl.SliceLayout(1, LOADED))
    if TAPS == 4:
        return gl.load(conv_ptr + (rows * 4)[:, None] + tap[None, :])
    return gl.load(conv_ptr + (rows * TAPS)[:, None] + tap[None, :], mask=(tap < TAPS)[None, :] & (rows >= 0)[:, None],
                   other=0.0)  # fmt: skip


@gluon.jit
def _by_age(loaded, TAPS: gl.constexpr):
    """What a token's own input is multiplied with, then those of the tokens before it: [1, 128] each. Halved, because
    SiLU is of twice the sum."""
    even, odd = gl.split(loaded.reshape([128, 2, 2]))
    zeroth, second = gl.split(even)
    first, third = gl.split(odd)
    taps = ()
    for age in gl.static_range(TAPS):
        one = (zeroth, first, second, third)[TAPS - 1 - age].to(gl.float32) * 0.5
        taps = joined(taps, (gl.convert_layout(one, gl.SliceLayout(0, CONV), assert_trivial=True)[None, :],))
    return taps


@gluon.jit
def _token(blocks, token: gl.constexpr):
    """One token of each eight: [8, 128] of [8, 8, 128], in float32."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 1, 8], [2, 1, 16], [4, 1, 1], [2, 1, 0])
    loaded = blocks.slice(token, 1, dim=1).load(LOADED).reshape([8, 128])
    return wide(gl.convert_layout(loaded, CONV, assert_trivial=True))


@gluon.jit
def _from_ring(past, ring_ptr, position, channel, CHANNELS: gl.constexpr, TAPS: gl.constexpr):
    """The row's first tokens look back into the ring."""
    blocks = 8 * gl.arange(0, 8, gl.SliceLayout(1, CONV))
    channels = channel + gl.arange(0, 128, gl.SliceLayout(0, CONV))
    found = ()
    for age in gl.static_range(1, TAPS):
        before = (blocks < age)[:, None] & (channels >= 0)[None, :]
        entry = (position - age + TAPS) % TAPS
        kept = gl.load(ring_ptr + entry * CHANNELS + (0 * blocks)[:, None] + channels[None, :], mask=before, other=0.0)
        found = joined(found, (gl.where(before, kept, past[age - 1]),))
    return found


@gluon.jit
def convolve(raw, part: gl.constexpr, loaded, where, channel, scale, CHANNELS: gl.constexpr, TAPS: gl.constexpr,
             NORM: gl.constexpr):  # fmt: skip
    """Of a part that is there, with `loaded` its taps: SiLU included, normed and scaled if asked for, in x's type,
    [64 tokens, 128 channels]. `where`: the row's ring, the position of its first token, and the chunk's first token
    within the row."""
    BLOCKS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ring_ptr, position, start = where
    taps = _by_age(loaded, TAPS)
    before = raw.index(part * UNITS)._reinterpret(
        raw.dtype, [8, 8, 128], BLOCKS
    )  # of the first block, its own behind it
    own = raw.index(part * UNITS + 2)._reinterpret(raw.dtype, [8, 8, 128], BLOCKS)
    past = ()
    for age in gl.static_range(1, TAPS):
        past = joined(past, (_token(before, 8 - age),))
    if start == 0:
        past = _from_ring(past, ring_ptr, position, channel, CHANNELS, TAPS)
    dtype: gl.constexpr = raw.dtype
    mixed = ()
    for token in gl.static_range(8):
        x = _token(own, token)
        total = x * taps[0]
        for age in gl.static_range(1, TAPS):
            total = gl.fma(past[age - 1], taps[age], total)
        past = joined((x,), past[: TAPS - 2])
        total = doubled_silu(total)
        if NORM:
            total = total * (gl.rsqrt(gl.sum(total * total, 1) + L2_EPS) * scale)[:, None]
        mixed = joined(mixed, (total.to(dtype),))
    return _side_by_side(mixed)


@gluon.jit
def _side_by_side(mixed):
    """The eight tokens of each block in a row, [64, 128] of eight [8, 128]: the same elements in the same threads."""
    TILE: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [0, 64], [8, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
    low = gl.join(gl.join(mixed[0], mixed[4]), gl.join(mixed[2], mixed[6]))
    high = gl.join(gl.join(mixed[1], mixed[5]), gl.join(mixed[3], mixed[7]))
    tile = gl.join(low, high).permute((0, 2, 3, 4, 1)).reshape([64, 128])
    return gl.convert_layout(tile, TILE, assert_trivial=True)
