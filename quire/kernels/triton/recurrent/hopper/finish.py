"""Norm and gate of each chunk's output, and the update of the rings, for the delta rule's walks on Hopper. Written in
Gluon; `delta_kernel` and `channel_kernel` run it in warp groups of their programs.

Where two programs share a head, each has half of the values that a token's norm sums over. They exchange their sums of
squares through global memory, in lines that the preparing kernel has filled with `UNTOLD`: any other value is the sum
itself, so no memory ordering is needed. The two programs run concurrently, or the second is the next to start: programs
start in order, and none waits for a later pair.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from quire.kernels.triton.recurrent.hopper.math import doubled_silu, halved, joined, sigmoid, wide

UNTOLD = gl.constexpr(-1)  # as a float, a NaN other than the one that the hardware produces
ROWS = gl.constexpr(16)  # tokens at a time; a chunk is four times as many
LOADED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def write_ring(
    x_ptr,
    x_stride,
    ring_ptr,
    count,
    position,
    channel,
    CHANNELS: gl.constexpr,
    TAPS: gl.constexpr,
    WIDTH: gl.constexpr = 128,
):
    """Store the last inputs of WIDTH channels, for the next step's convolution."""
    channels = channel + gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [4], [0]))
    for age in gl.static_range(TAPS):
        place = count - 1 - age
        if place >= 0:
            x = gl.load(x_ptr + place.to(gl.int64) * x_stride + channels)
            gl.store(ring_ptr + ((position + place) % TAPS) * CHANNELS + channels, x.to(gl.float32))


@gluon.jit
def _write_rings(
    x_ptr, x_stride, ring_ptr, position, count, head, HEADS: gl.constexpr, GROUPS: gl.constexpr, TAPS: gl.constexpr
):
    """Update the rings of the head's values; the first head of a group also updates those of query and key."""
    CHANNELS: gl.constexpr = HEADS * 128 + 2 * GROUPS * 128
    PER_GROUP: gl.constexpr = HEADS // GROUPS
    write_ring(x_ptr, x_stride, ring_ptr, count, position, 2 * GROUPS * 128 + head * 128, CHANNELS, TAPS)
    if head % PER_GROUP == 0:
        write_ring(x_ptr, x_stride, ring_ptr, count, position, head // PER_GROUP * 128, CHANNELS, TAPS)
        write_ring(x_ptr, x_stride, ring_ptr, count, position, (GROUPS + head // PER_GROUP) * 128, CHANNELS, TAPS)


@gluon.jit
def _piece(tiles, tile, piece: gl.constexpr):
    return tiles.index(tile).slice(piece * ROWS, ROWS).load(LOADED)  # [16 tokens, 64 values]


@gluon.jit
def _squares(results, turn, piece: gl.constexpr, HALVES: gl.constexpr):
    """Sum of squares over the program's values, for 16 tokens."""
    low = wide(_piece(results, turn * HALVES, piece))
    if HALVES == 1:
        return gl.sum(low * low, 1)
    high = wide(_piece(results, turn * HALVES + 1, piece))
    return gl.sum(gl.fma(low, low, high * high), 1)


@gluon.jit
def _await_all(pointers):
    """Wait until four pointers have been written and return their values. All are polled together, because each access
    is a round trip across the GPU."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        AGAIN:
        ld.relaxed.gpu.global.b32 $0, [$4];
        ld.relaxed.gpu.global.b32 $1, [$5];
        ld.relaxed.gpu.global.b32 $2, [$6];
        ld.relaxed.gpu.global.b32 $3, [$7];
        setp.eq.b32 p, $0, -1;
        @p bra AGAIN;
        setp.eq.b32 p, $1, -1;
        @p bra AGAIN;
        setp.eq.b32 p, $2, -1;
        @p bra AGAIN;
        setp.eq.b32 p, $3, -1;
        @p bra AGAIN;
        }
        """,
        "=&r,=&r,=&r,=&r,l,l,l,l",
        [pointers[0].to(gl.int64), pointers[1].to(gl.int64), pointers[2].to(gl.int64), pointers[3].to(gl.int64)],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _share_sums(sums, line_ptr, half):
    """Exchange sums with the other program; returns the totals of a chunk's tokens. `line_ptr`: the head's two lines of
    that chunk."""
    tokens = gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
    pointers = ()
    for piece in gl.static_range(64 // ROWS):
        place = line_ptr + piece * ROWS + tokens
        gl.atomic_xchg(place + half * 64, sums[piece], sem="relaxed", scope="gpu")  # visible sooner than a store
        pointers = joined(pointers, (place + (1 - half) * 64,))
    theirs = _await_all(pointers)
    both = ()
    for piece in gl.static_range(64 // ROWS):
        both = joined(both, (sums[piece] + theirs[piece],))
    return both


@gluon.jit
def finish(
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
    FIRST: gl.constexpr,
    EACH: gl.constexpr,
    HALVES: gl.constexpr,
    HEADS: gl.constexpr,
    GROUPS: gl.constexpr,
    TAPS: gl.constexpr,
    CURVED: gl.constexpr = True,
):
    """Norm and gate of every EACHth chunk from FIRST on; the first group also updates the rings, if the program has the
    head's first half. HALVES: number of the head's halves in this program, from `half` on. `out_ptr` begins at the
    row's first token, `sums_ptr` at the head's lines of the row's first chunk. CURVED: the gate is a SiLU, else a
    sigmoid."""
    _first_full, _second_full, _empty, result_full, result_empty, gate_full = barriers
    RING: gl.constexpr = result_full.shape[0]
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
    columns = gl.arange(0, 64, gl.SliceLayout(0, LOADED))
    weights = ()
    for part in gl.static_range(HALVES):
        weights = joined(weights, (gl.load(norm_ptr + (half + part) * 64 + columns).to(gl.float32),))
    in_out = head * 128 + half * 64 + rows[:, None] * (HEADS * 128) + columns[None, :]
    x_ptr, x_stride, ring_ptr, position, count = rings
    if FIRST == 0:
        if half == 0:
            _write_rings(x_ptr, x_stride, ring_ptr, position, count, head, HEADS, GROUPS, TAPS)
        mbarrier.wait(result_full.index(0), 0)  # the virtual chunk before the first
        mbarrier.arrive(result_empty.index(0), count=1)
    for i in range(FIRST, num_chunks, EACH):
        turn = (i + 1) % RING
        mbarrier.wait(result_full.index(turn), (i + 1) // RING & 1)
        # The norms of all tokens are computed side by side, because each alone is a chain of latencies. The loaded
        # values are not kept: there are too few registers.
        sums = ()
        for piece in gl.static_range(64 // ROWS):
            sums = joined(sums, (_squares(results, turn, piece, HALVES),))
        if HALVES == 1:
            sums = _share_sums(sums, sums_ptr + i.to(gl.int64) * (HEADS * 256), half)  # type: ignore[attr-defined]
        mbarrier.wait(gate_full.index(turn), i // RING & 1)
        target = out_ptr + i.to(gl.int64) * (64 * HEADS * 128) + in_out  # type: ignore[attr-defined]
        for piece in gl.static_range(64 // ROWS):
            scale = gl.rsqrt(sums[piece] * (1.0 / 128) + eps)[:, None]
            inside = (rows < count - i * 64 - piece * ROWS)[:, None] & (columns < 64)[None, :]
            for part in gl.static_range(HALVES):
                normed = wide(_piece(results, turn * HALVES + part, piece)) * scale
                gate = _piece(gates, turn * HALVES + part, piece)
                if CURVED:
                    gate = doubled_silu(halved(gate))
                else:
                    gate = sigmoid(wide(gate))
                normed = normed * (gate * weights[part][None, :])
                gl.store(target + part * 64, normed.to(out_ptr.dtype.element_ty), mask=inside)
            target += ROWS * HEADS * 128
        mbarrier.arrive(result_empty.index(turn), count=1)
