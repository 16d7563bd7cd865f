"""The convolution of one chunk for Hopper's delta net: 128 channels (a head's values, a key or a query) of 64 tokens,
with SiLU and, of keys and queries, norm. Written in Gluon; `recurrent_ready` calls it for each of its parts.

The copy engine fetches a part as it lies: 4 tokens before the chunk, of which the last three at most are read, then its
own 64, in all 17 kB of shared memory. They are worked on by halves, in a loop: half as many results in registers, half
as much code. A thread has 8 channels of 4 tokens in a row, so that inputs move on from tap to tap in its registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from quire.kernels.triton.gluon_names import thread_barrier
from quire.kernels.triton.hopper_math import doubled_silu, halved, joined, wide
from quire.kernels.triton.recurrent_step import L2_EPS as _L2_EPS

L2_EPS = gl.constexpr(_L2_EPS.value)
UNITS = gl.constexpr(17)  # of a kilobyte (4 tokens, or 8 x 64 elements), that the inputs of a part take
CONV = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # [8 blocks of tokens, channels]: one of each 4
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))  # for the matrix units


@gluon.jit
def fetch_before(before_desc, row, channel, slot, full):
    """Asks for the tokens before a part's own. What lies before x comes as zeros."""
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)
    before = slot.index(0)._reinterpret(slot.dtype, [4, 128], PLAIN)
    tma.async_copy_global_to_shared(before_desc, [row - 4, channel], full, before)


@gluon.jit
def fetch_own(x_desc, row, channel, slot, full):
    """Asks for a part's own tokens, from `row` of x on."""
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)
    own = slot.index(1)._reinterpret(slot.dtype, [64, 128], PLAIN)
    tma.async_copy_global_to_shared(x_desc, [row, channel], full, own)


@gluon.jit
def await_part(slot, full, num_tokens):
    """Tokens behind the row's end are another row's: nothing of them may get into this one, least of all a NaN."""
    mbarrier.wait(full, 0)
    if num_tokens < 64:
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        own = slot.index(1)._reinterpret(slot.dtype, [64, 128], PLAIN)
        x = own.load(CONV)  # [64, 128]
        own.store(gl.where(gl.arange(0, 64, gl.SliceLayout(1, CONV))[:, None] < num_tokens, x, 0.0))
        fence_async_shared()  # the copy engine may write there next
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
    if TAPS == 4:  # side by side, whatever the channel: by 16 bytes
        FLAT: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=[[1], [2], [4], [8], [16]],
            lane_bases=[[32], [64], [128], [256], [0]],
            warp_bases=[[0], [0]],
            block_bases=[],
            shape=[512],
        )
        flat = gl.load(conv_ptr + channel * 4 + gl.arange(0, 512, FLAT))
        return gl.convert_layout(flat.reshape([128, 4]), LOADED, assert_trivial=True)
    return gl.load(conv_ptr + (rows * TAPS)[:, None] + tap[None, :], mask=(tap < TAPS)[None, :] & (rows >= 0)[:, None],
                   other=0.0)  # fmt: skip


@gluon.jit
def _by_age(loaded, TAPS: gl.constexpr):
    """What a token's own input is multiplied with, then those of the tokens before it: [1, 128] each. Halved, because
    SiLU is of twice the sum."""
    even, odd = gl.split(halved(loaded).reshape([128, 2, 2]))
    zeroth, second = gl.split(even)
    first, third = gl.split(odd)
    taps = ()
    for age in gl.static_range(TAPS):
        one = (zeroth, first, second, third)[TAPS - 1 - age]
        taps = joined(taps, (gl.convert_layout(one, gl.SliceLayout(0, CONV), assert_trivial=True)[None, :],))
    return taps


@gluon.jit
def _token(blocks, token: gl.constexpr):
    """One token of each four: [8, 128] of [8, 4, 128], in float32."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 1, 8], [2, 1, 16], [4, 1, 1], [2, 1, 0])
    loaded = blocks.slice(token, 1, dim=1).load(LOADED).reshape([8, 128])
    return wide(gl.convert_layout(loaded, CONV, assert_trivial=True))


@gluon.jit
def _from_ring(past, ring_ptr, position, channel, CHANNELS: gl.constexpr, TAPS: gl.constexpr):
    """The row's first tokens look back into the ring."""
    blocks = 4 * gl.arange(0, 8, gl.SliceLayout(1, CONV))
    channels = channel + gl.arange(0, 128, gl.SliceLayout(0, CONV))
    found = ()
    for age in gl.static_range(1, TAPS):
        before = (blocks < age)[:, None] & (channels >= 0)[None, :]
        entry = (position - age + TAPS) % TAPS
        kept = gl.load(ring_ptr + entry * CHANNELS + (0 * blocks)[:, None] + channels[None, :], mask=before, other=0.0)
        found = joined(found, (gl.where(before, kept, past[age - 1]),))
    return found


@gluon.jit
def _pasts(slot, half, where, channel, CHANNELS: gl.constexpr, TAPS: gl.constexpr):
    """What lies before each block's first token, the youngest first."""
    BLOCKS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ring_ptrs, start = where
    shifted = slot.index(8 * half)._reinterpret(slot.dtype, [8, 4, 128], BLOCKS)  # by the four tokens before
    past = ()
    for age in gl.static_range(1, TAPS):
        past = joined(past, (_token(shifted, 4 - age),))
    if start + half == 0:
        state_ptr, slots_ptr, positions_ptr, slot_stride = ring_ptrs
        position = gl.load(positions_ptr).to(gl.int32)
        past = _from_ring(past, state_ptr + gl.load(slots_ptr) * slot_stride, position, channel, CHANNELS, TAPS)
    return past


@gluon.jit
def _mix(x, past, taps, TAPS: gl.constexpr):
    total = x * taps[0]
    for age in gl.static_range(1, TAPS):
        total = gl.fma(past[age - 1], taps[age], total)
    return doubled_silu(total)


@gluon.jit
def convolve_values(slot, loaded, where, channel, values_ptr, CHANNELS: gl.constexpr, TAPS: gl.constexpr):
    """Of a part that is there, with `loaded` its taps: SiLU included, in x's type, stored token by token."""
    BLOCKS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    taps = _by_age(loaded, TAPS)
    n = 4 * gl.arange(0, 8, gl.SliceLayout(1, CONV))
    columns = gl.arange(0, 128, gl.SliceLayout(0, CONV))
    target = values_ptr + n[:, None] * 128 + columns[None, :]
    for half in range(2):
        own = slot.index(1 + 8 * half)._reinterpret(slot.dtype, [8, 4, 128], BLOCKS)
        past = _pasts(slot, half, where, channel, CHANNELS, TAPS)
        for token in gl.static_range(4):
            x = _token(own, token)
            gl.store(target + token * 128, _mix(x, past, taps, TAPS).to(slot.dtype))
            past = joined((x,), past[: TAPS - 2])
        target += 32 * 128


@gluon.jit
def convolve(slot, into, loaded, where, channel, scale, keys_ptr, mine, CHANNELS: gl.constexpr, TAPS: gl.constexpr):
    """The same of a key or a query, normed and scaled, stored in its tile [64 tokens, 128 channels], too. `where`: the
    row's ring, the position of its first token, and the chunk's first token within the row."""
    BLOCKS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    taps = _by_age(loaded, TAPS)
    n = 4 * gl.arange(0, 8, gl.SliceLayout(1, CONV))
    columns = gl.arange(0, 128, gl.SliceLayout(0, CONV))
    target = keys_ptr + n[:, None] * 128 + columns[None, :]
    stored = (n < 32 * mine)[:, None] & (columns >= 0)[None, :]
    for half in range(2):
        own = slot.index(1 + 8 * half)._reinterpret(slot.dtype, [8, 4, 128], BLOCKS)
        past = _pasts(slot, half, where, channel, CHANNELS, TAPS)
        mixed = ()
        for token in gl.static_range(4):
            x = _token(own, token)
            total = _mix(x, past, taps, TAPS)
            past = joined((x,), past[: TAPS - 2])
            total = total * (gl.rsqrt(gl.sum(total * total, 1) + L2_EPS) * scale)[:, None]
            gl.store(target + token * 128, total.to(slot.dtype), mask=stored)
            mixed = joined(mixed, (total.to(slot.dtype),))
        tile = into.index(4 * half)._reinterpret(slot.dtype, [64, 128], SHARED)
        tile.slice(0, 32).store(_side_by_side(mixed))
        target += 32 * 128


@gluon.jit
def _side_by_side(mixed):
    """The four tokens of each block in a row, [32, 128] of four [8, 128]: the same elements in the same threads."""
    TILE: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [0, 64], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 128],
    )
    tile = gl.join(gl.join(mixed[0], mixed[2]), gl.join(mixed[1], mixed[3]))
    return gl.convert_layout(tile.permute((0, 2, 3, 1)).reshape([32, 128]), TILE, assert_trivial=True)
