"""T of a chunk for Hopper's delta nets: the inverse of I + L, where L is strictly lower triangular (see
`recurrent.scan`). Written in Gluon. `chunks` calls it for the heads that share a key, `channel_chunks` for one head.
Small blocks of all heads are inverted together; the rest runs head by head, because registers do not suffice for two
and other programs fill the pauses.

Diagonal blocks of 16 are inverted first, each row of a block in one thread's registers. Then by halves: with D the
inverses of blocks of one size, those of blocks twice as large are (I - D N) D, with N the entries of L below the
diagonal blocks and inside the larger ones. Factors are float16: all entries are small, and ten bits of mantissa are as
many as tf32 has.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.triton.gluon_names import thread_barrier
from quire.kernels.triton.recurrent.hopper.chunk_conv import SHARED
from quire.kernels.triton.recurrent.hopper.math import joined

MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
SHARED_PAIRS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))  # 16-bit pairs
ALL_BLOCKS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
LEFT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=MMA.value, k_width=2))


# ---------------------------------------------------------------------------------------------------------------------
# Blocks of 16


@gluon.jit
def invert_blocks(diagonals, HEADS: gl.constexpr):
    """The inverses of I + each diagonal block of L, [HEADS * 64, 64] float16 as pairs in int32, with zeros elsewhere.
    `diagonals` [HEADS, 16, 4, 16] float32: the diagonal blocks of -L, row by row of all four. A thread holds a row of
    one inverse: from the last column on, the row's entry times the block's row is added to the preceding columns."""
    BLOCKS: gl.constexpr = 4 * HEADS
    ROWS: gl.constexpr = gl.DistributedLinearLayout(  # [blocks, 16]: one per thread
        reg_bases=[],
        lane_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [1, 0]],
        warp_bases=[[2, 0], [4 % BLOCKS, 0]],
        block_bases=[],
        shape=[BLOCKS, 16],
    )
    LINES: gl.constexpr = gl.DistributedLinearLayout(  # a block's whole row in each of its threads
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8]],
        lane_bases=[[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]],
        warp_bases=[[0, 0, 2, 0], [HEADS - 1, 0, 0, 0]],
        block_bases=[],
        shape=[HEADS, 1, 4, 16],
    )
    rows = gl.arange(0, 16, gl.SliceLayout(0, ROWS))[None, :]
    zeros = gl.arange(0, BLOCKS, gl.SliceLayout(1, ROWS))[:, None] * 0
    t = ()
    for column in gl.static_range(16):
        t = joined(t, (gl.where(rows + zeros == column, 1.0, 0.0),))
    for last in gl.static_range(15, 0, -1):
        line = _columns(diagonals.slice(last, 1, dim=1).load(LINES).reshape([BLOCKS, 16]))
        after = ()
        for column in gl.static_range(16):
            if column < last:
                factor = gl.convert_layout(line[column], gl.SliceLayout(1, ROWS), assert_trivial=True)[:, None]
                after = joined(after, (t[column] + t[last] * factor,))
            else:
                after = joined(after, (t[column],))
        t = after
    return _spread(_row_of(t), HEADS)


@gluon.jit
def _columns(x):
    """[n, 16] split into its columns."""
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
def pair(low, high):
    """Two numbers rounded to float16 and packed into 32 bits."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _row_of(c):
    """The inverse of `_columns`: 16 tensors of one shape side by side, packed as float16 pairs in int32."""
    a = gl.join(gl.join(pair(c[0], c[1]), pair(c[8], c[9])), gl.join(pair(c[4], c[5]), pair(c[12], c[13])))
    b = gl.join(gl.join(pair(c[2], c[3]), pair(c[10], c[11])), gl.join(pair(c[6], c[7]), pair(c[14], c[15])))
    return gl.join(a, b).reshape([c[0].shape[0], 16, 8])


@gluon.jit
def _spread(whole, HEADS: gl.constexpr):
    """Blocks of 16 [blocks, 16, 8] placed on the diagonal of [HEADS * 64, 32]."""
    block = gl.arange(0, 4 * HEADS, gl.SliceLayout(1, gl.SliceLayout(2, whole.type.layout)))[:, None][:, :, None] % 4
    a = gl.join(gl.where(block == 0, whole, 0), gl.where(block == 2, whole, 0))
    b = gl.join(gl.where(block == 1, whole, 0), gl.where(block == 3, whole, 0))
    return gl.join(a, b).permute((0, 1, 3, 4, 2)).reshape([64 * HEADS, 32])


# ---------------------------------------------------------------------------------------------------------------------
# By halves


@gluon.jit
def _below(inner, within, one):
    """I - D N as a left operand, whose product with D is the wanted inverse. `inner` is D times -L: left of a block's
    rows it contains only their products with L's entries there, so masking it to the next larger block (`within` has
    all bits set there) equals multiplying with N. `one` is I: of two columns, the first holds both as float16. Written
    in assembly because the compiler would select each float16 separately."""
    picked = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 t;
        cvt.rn.f16x2.f32 t, $2, $1;
        lop3.b32 $0, t, $3, $5, 0xEA;
        }
        """,
        "=r,f,f,r,r,r,r",
        [inner, within, one],
        dtype=gl.float16,
        is_pure=True,
        pack=2,
    )
    return gl.convert_layout(picked, LEFT)


@gluon.jit
def join_blocks(inverse, negative):
    """The whole inverse, [64, 64] float32. `inverse` [64, 64] float16 holds blocks of 16, later those of 32; `negative`
    [64, 64] float16 is -L with arbitrary values on the diagonal."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, MMA))[:, None]
    columns = gl.arange(0, 64, gl.SliceLayout(0, MMA))[None, :]
    nothing = gl.full([64, 64], 0.0, gl.float32, MMA)
    one = gl.where(rows == columns, gl.where((columns & 1) != 0, 0x3C000000, 0x3C00), 0)
    one = gl.where(rows == columns + 1, gl.where((rows & 1) != 0, 0x3C000000, 0), one)
    near = gl.where(columns >> 4 == gl.where(rows & 16 != 0, (rows >> 4) - 1, -1), -1, 0)
    far = gl.where(columns < (rows & 32), -1, 0)
    inner = warpgroup_mma(inverse, negative, nothing, use_acc=False, is_async=True)
    inner = warpgroup_mma_wait(0, deps=[inner])
    left = _below(inner, near, one)
    half = warpgroup_mma(left, inverse, nothing, use_acc=False, is_async=True)
    half, left = warpgroup_mma_wait(0, deps=[half, left])
    left = gl.convert_layout(half.to(gl.float16), LEFT)
    thread_barrier()  # blocks of 16 have been read
    inverse.store(left)
    fence_async_shared()
    thread_barrier()
    inner = warpgroup_mma(left, negative, nothing, use_acc=False, is_async=True)
    inner, left = warpgroup_mma_wait(0, deps=[inner, left])
    left = _below(inner, far, one)
    whole = warpgroup_mma(left, inverse, nothing, use_acc=False, is_async=True)
    whole, left = warpgroup_mma_wait(0, deps=[whole, left])
    return whole


# ---------------------------------------------------------------------------------------------------------------------
# All of it


@gluon.jit
def on_diagonal(x):
    """The diagonal blocks of 16 of a [64, 64] tile, stacked: [64, 16]. Each warp holds the rows of one."""
    even, odd = gl.split(x.reshape([64, 2, 2, 16]).permute((0, 3, 1, 2)))
    zeroth, second = gl.split(even)
    first, third = gl.split(odd)
    block = gl.arange(0, 64, gl.SliceLayout(1, first.type.layout))[:, None] >> 4
    return gl.where(block < 2, gl.where(block == 0, zeroth, first), gl.where(block == 2, second, third))


@gluon.jit
def solve(
    scores, inverses, lowers, diagonals, lines, t_desc, scores_desc, place, BETA: gl.constexpr, HEADS: gl.constexpr
):
    """Write T of each head, its columns times beta, and its scores to global memory. Inputs have just been written to
    shared memory: `scores`, -L (`lowers`) and its diagonal blocks, whose buffer the inverses take over. `lines`: from
    BETA on, each head's beta. Barriers are numbered as in `chunks`."""
    dtype: gl.constexpr = scores.dtype
    thread_barrier()  # 3
    blocks = invert_blocks(diagonals._reinterpret(gl.float32, [HEADS, 16, 4, 16], ALL_BLOCKS), HEADS)
    thread_barrier()  # 3
    inverses._reinterpret(gl.int32, [128, 32], SHARED_PAIRS).slice(0, 64 * HEADS).store(blocks)
    fence_async_shared()
    thread_barrier()  # 4
    place = place.to(gl.int32)
    for h in range(HEADS):
        tma.async_copy_shared_to_global(scores_desc, [(place + h) * 64, 0], scores.index(h))
        inverse = inverses._reinterpret(gl.float16, [2, 64, 64], SHARED).index(h)
        whole = join_blocks(inverse, lowers.index(h))  # barrier 5 is inside
        beta = lines.index(BETA + h).load(gl.SliceLayout(0, MMA))[None, :]
        thread_barrier()  # 6
        t = inverse._reinterpret(dtype, [64, 64], SHARED)
        t.store((whole * beta).to(dtype))
        fence_async_shared()
        thread_barrier()  # 6
        tma.async_copy_shared_to_global(t_desc, [(place + h) * 64, 0], t)
    tma.store_wait(0)
