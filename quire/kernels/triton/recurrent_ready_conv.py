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
def fetch(x_desc, before_desc, row, channel, slots, slot, full):
    """Asks for a part: its own tokens, from `row` of x on, and those before. What lies before x comes as zeros."""
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)
    before = slots.index(slot * UNITS)._reinterpret(slots.dtype, [4, 128], PLAIN)
    own = slots.index(slot * UNITS + 1)._reinterpret(slots.dtype, [64, 128], PLAIN)
    mbarrier.expect(full, UNITS * 1024)
    tma.async_copy_global_to_shared(x_desc, [row, channel], full, own)
    tma.async_copy_global_to_shared(before_desc, [row - 4, channel], full, before)


@gluon.jit
def await_part(part, fulls, PARTS: gl.constexpr):
    """Each has its own allocation: around one that is picked at run time the compiler lets threads meet."""
    for one in gl.static_range(PARTS):
        if part == one:
            mbarrier.wait(fulls[one], 0)


@gluon.jit
def clear_behind(slots, slot, num_tokens):
    """Tokens behind the row's end are another row's: nothing of them may get into this one, least of all a NaN."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])  # two elements in 32 bits
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    own = slots.index(slot * UNITS + 1)._reinterpret(gl.int32, [64, 64], PLAIN)
    x = own.load(PAIRS)
    own.store(gl.where(gl.arange(0, 64, gl.SliceLayout(1, PAIRS))[:, None] < num_tokens, x, 0))
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
def by_age(loaded, TAPS: gl.constexpr):
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
def _blocks(slots, unit):
    """32 tokens from some unit on, [8, 4, 128]."""
    BLOCKS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    return slots.index(unit)._reinterpret(slots.dtype, [8, 4, 128], BLOCKS)


@gluon.jit
def _pasts(slots, slot, half, where, channel, CHANNELS: gl.constexpr, TAPS: gl.constexpr):
    """What lies before each block's first token, the youngest first."""
    ring_ptrs, start = where
    shifted = _blocks(slots, slot * UNITS + 8 * half)  # by the four tokens before
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
def convolve(slots, slot, half, taps, where, channel, CHANNELS: gl.constexpr, TAPS: gl.constexpr):
    """Half of a part that is there, SiLU included: the four tokens of each block, [8, 128] each, in float32. `where`:
    the row's ring, the position of its first token, and the chunk's first token within the row."""
    past = _pasts(slots, slot, half, where, channel, CHANNELS, TAPS)
    own = _blocks(slots, slot * UNITS + 8 * half + 1)
    mixed = ()
    for token in gl.static_range(4):
        x = _token(own, token)
        mixed = joined(mixed, (_mix(x, past, taps, TAPS),))
        past = joined((x,), past[: TAPS - 2])
    return mixed


@gluon.jit
def store_values(mixed, values_ptr, half):
    """In x's type, [64 tokens, 128 channels]."""
    n = 32 * half + 4 * gl.arange(0, 8, gl.SliceLayout(1, CONV))
    target = values_ptr + n[:, None] * 128 + gl.arange(0, 128, gl.SliceLayout(0, CONV))[None, :]
    for token in gl.static_range(4):
        gl.store(target + token * 128, mixed[token].to(values_ptr.dtype.element_ty))


@gluon.jit
def store_normed(mixed, scale, slots, slot, keys_ptr, mine, half):
    """The same of a key or a query, normed and scaled, and in a place of shared memory, too."""
    n = 4 * gl.arange(0, 8, gl.SliceLayout(1, CONV))
    columns = gl.arange(0, 128, gl.SliceLayout(0, CONV))
    target = keys_ptr + (32 * half + n)[:, None] * 128 + columns[None, :]
    stored = (n < 32 * mine)[:, None] & (columns >= 0)[None, :]
    normed = ()
    for token in gl.static_range(4):
        total = mixed[token]
        total = total * (gl.rsqrt(gl.sum(total * total, 1) + L2_EPS) * scale)[:, None]
        gl.store(target + token * 128, total.to(slots.dtype), mask=stored)
        normed = joined(normed, (total.to(slots.dtype),))
    tile = slots.index(slot * UNITS + 4 * half)._reinterpret(slots.dtype, [64, 128], SHARED)
    tile.slice(0, 32).store(_side_by_side(normed))


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
