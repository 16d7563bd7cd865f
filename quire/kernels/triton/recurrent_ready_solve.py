"""T of a chunk for Hopper's delta net: the inverse of I + L, where L is strictly lower triangular (see
`recurrent_scan`). Written in Gluon; `recurrent_ready` calls it for the heads that share a key, whose products fill each
other's pauses.

Blocks of 16 on the diagonal are inverted first, each row of a block by one thread in its registers. Then by halves:
with D the inverses of blocks of some size, those of blocks twice as large are D - D N D, with N what L has below the
diagonal inside the larger blocks. Factors are float16: all of it is small, and ten bits are as much as tf32 has.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from quire.kernels.triton.gluon_names import thread_barrier
from quire.kernels.triton.hopper_math import joined

MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=MMA.value, k_width=2))


# ---------------------------------------------------------------------------------------------------------------------
# Blocks of 16


@gluon.jit
def invert_blocks(diagonals, HEADS: gl.constexpr):
    """The inverses of I + each of the diagonal blocks, [HEADS * 64, 64] float16, zeros around them. `diagonals`
    [16, 4 * HEADS, 16] float32: a block's rows first. A thread has a row of one inverse: from the last column on, what
    is there of it times the block's row is taken from the columns before."""
    BLOCKS: gl.constexpr = 4 * HEADS
    ROWS: gl.constexpr = gl.DistributedLinearLayout(  # [blocks, 16]: one a thread
        reg_bases=[],
        lane_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [1, 0]],
        warp_bases=[[2, 0], [4 % BLOCKS, 0]],
        block_bases=[],
        shape=[BLOCKS, 16],
    )
    LINES: gl.constexpr = gl.DistributedLinearLayout(  # [blocks, 16]: all of a block's row in each of its threads
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8]],
        lane_bases=[[0, 0], [0, 0], [0, 0], [0, 0], [1, 0]],
        warp_bases=[[2, 0], [4 % BLOCKS, 0]],
        block_bases=[],
        shape=[BLOCKS, 16],
    )
    rows = gl.arange(0, 16, gl.SliceLayout(0, ROWS))[None, :]
    zeros = gl.arange(0, BLOCKS, gl.SliceLayout(1, ROWS))[:, None] * 0
    t = ()
    for column in gl.static_range(16):
        t = joined(t, (gl.where(rows + zeros == column, 1.0, 0.0),))
    for last in gl.static_range(15, 0, -1):
        line = _columns(diagonals.index(last).load(LINES))
        after = ()
        for column in gl.static_range(16):
            if column < last:
                factor = gl.convert_layout(line[column], gl.SliceLayout(1, ROWS), assert_trivial=True)[:, None]
                after = joined(after, (t[column] - t[last] * factor,))
            else:
                after = joined(after, (t[column],))
        t = after
    return _spread(_row_of(t), HEADS)


@gluon.jit
def _columns(x):
    """[n, 16] as its columns."""
    a, b = gl.split(x.reshape([x.shape[0], 2, 2, 2, 2]))
    a0, a1 = gl.split(a)
    b0, b1 = gl.split(b)
    a00, a01 = gl.split(a0)
    a10, a11 = gl.split(a1)
    b00, b01 = gl.split(b0)
    b10, b11 = gl.split(b1)
    c0, c8 = gl.split(a00)
    c4, c12 = gl.split(a01)
    c2, c10 = gl.split(a10)
    c6, c14 = gl.split(a11)
    c1, c9 = gl.split(b00)
    c5, c13 = gl.split(b01)
    c3, c11 = gl.split(b10)
    c7, c15 = gl.split(b11)
    return c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12, c13, c14, c15


@gluon.jit
def _row_of(c):
    """The other way round: 16 tensors of one shape side by side, in float16."""
    f: gl.constexpr = gl.float16
    a00, a01 = gl.join(c[0].to(f), c[8].to(f)), gl.join(c[4].to(f), c[12].to(f))
    a10, a11 = gl.join(c[2].to(f), c[10].to(f)), gl.join(c[6].to(f), c[14].to(f))
    b00, b01 = gl.join(c[1].to(f), c[9].to(f)), gl.join(c[5].to(f), c[13].to(f))
    b10, b11 = gl.join(c[3].to(f), c[11].to(f)), gl.join(c[7].to(f), c[15].to(f))
    a = gl.join(gl.join(a00, a01), gl.join(a10, a11))
    b = gl.join(gl.join(b00, b01), gl.join(b10, b11))
    return gl.join(a, b).reshape([c[0].shape[0], 16, 16])


@gluon.jit
def _spread(whole, HEADS: gl.constexpr):
    """Blocks of 16 [blocks, 16, 16] on the diagonal of [HEADS * 64, 64]."""
    block = gl.arange(0, 4 * HEADS, gl.SliceLayout(1, gl.SliceLayout(2, whole.type.layout)))[:, None][:, :, None] % 4
    a = gl.join(gl.where(block == 0, whole, 0.0), gl.where(block == 2, whole, 0.0))
    b = gl.join(gl.where(block == 1, whole, 0.0), gl.where(block == 3, whole, 0.0))
    return gl.join(a, b).permute((0, 1, 3, 4, 2)).reshape([64 * HEADS, 64])


# ---------------------------------------------------------------------------------------------------------------------
# By halves


@gluon.jit
def _add_below(inners, factors, inverse, within, SHARING: gl.constexpr):
    """D - D N D of each head, under way, and the factors it needs until it is done. `inners`: D L, under way too, and
    its `factors`, if they are in registers. Left of a block's rows there are only its own products with what L has
    there, so picking what lies `within` the next larger block is as good as multiplying with N."""
    lefts = ()
    outers = ()
    for h in gl.static_range(SHARING):
        if len(factors) == 0:
            inner = warpgroup_mma_wait(SHARING - 1, deps=[inners[h]])
        else:
            inner, _factor = warpgroup_mma_wait(SHARING - 1, deps=[inners[h], factors[h]])
        left = gl.convert_layout(gl.where(within, -inner, 0.0).to(gl.float16), LEFT)
        sums = inverse.index(h).load(MMA).to(gl.float32)
        outers = joined(outers, (warpgroup_mma(left, inverse.index(h), sums, is_async=True),))
        lefts = joined(lefts, (left,))
    return outers, lefts


@gluon.jit
def join_blocks(inverse, lowers, SHARING: gl.constexpr):
    """The whole inverse of each head, [64, 64] float32, under way, and its factors. `inverse` [SHARING, 64, 64] float16
    has blocks of 16, then those of 32; `lowers` [SHARING, 64, 64] float16 is L, and anything on the diagonal."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, MMA))[:, None]
    columns = gl.arange(0, 64, gl.SliceLayout(0, MMA))[None, :]
    nothing = gl.full([64, 64], 0.0, gl.float32, MMA)
    inners = ()
    for h in gl.static_range(SHARING):
        inner = warpgroup_mma(inverse.index(h), lowers.index(h), nothing, use_acc=False, is_async=True)
        inners = joined(inners, (inner,))
    near = columns >> 4 == gl.where(rows & 16 != 0, (rows >> 4) - 1, -1)
    outers, lefts = _add_below(inners, (), inverse, near, SHARING)
    inners = ()
    halves = ()
    for h in gl.static_range(SHARING):
        half, _left = warpgroup_mma_wait(SHARING - 1, deps=[outers[h], lefts[h]])
        half = gl.convert_layout(half.to(gl.float16), LEFT)
        inners = joined(inners, (warpgroup_mma(half, lowers.index(h), nothing, use_acc=False, is_async=True),))
        halves = joined(halves, (half,))
    thread_barrier()  # blocks of 16 are read
    for h in gl.static_range(SHARING):
        inverse.index(h).store(halves[h])
    fence_async_shared()
    thread_barrier()
    return _add_below(inners, halves, inverse, columns < (rows & 32), SHARING)
