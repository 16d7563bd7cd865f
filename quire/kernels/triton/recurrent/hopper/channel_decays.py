"""Packed pairs of channels, and per-token decay factors from block to larger block, for `channel_chunks`. Written in
Gluon.

16-bit numbers are processed as pairs in 32 bits. A thread holds two channels of 32 consecutive tokens; a token is
[2, 64]: one of each half of a chunk.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.triton.recurrent.hopper.chunk_solve import pair
from quire.kernels.triton.recurrent.hopper.math import exp2, joined

# [64 tokens, 64 pairs of channels]: 16-bit numbers are processed as pairs in 32 bits.
PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        lane_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]],
        warp_bases=[[0, 32], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)
ONE = gl.constexpr(  # [2, 64]: one token of each half
    gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]],
        warp_bases=[[0, 32], [1, 0]],
        block_bases=[],
        shape=[2, 64],
    )
)

# ---------------------------------------------------------------------------------------------------------------------
# Pairs


@gluon.jit
def split_pair(x, dtype: gl.constexpr):
    """Both numbers of a pair, in float32."""
    if dtype == gl.bfloat16:
        return (x << 16).to(gl.float32, bitcast=True), (x & -65536).to(gl.float32, bitcast=True)
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b16 a, b;
        mov.b32 {a, b}, $2;
        cvt.f32.f16 $0, a;
        cvt.f32.f16 $1, b;
        }
        """,
        "=f,=f,r",
        [x],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def times(a, b):
    """Element-wise product of pairs in float16."""
    return gl.inline_asm_elementwise("mul.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def as_pair(low, high, dtype: gl.constexpr):
    """Two float32 numbers rounded to `dtype` and packed into 32 bits."""
    if dtype == gl.float16:
        return pair(low, high)
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


# ---------------------------------------------------------------------------------------------------------------------
# Tokens of a thread, one by one


@gluon.jit
def apart(x):
    """[64, 64] as a tuple of 32 tokens per half, [2, 64] each."""
    parts = joined((), (x.reshape([2, 32, 64]),))
    for level in gl.static_range(5):
        finer = ()
        for i in gl.static_range(1 << level):
            first, second = gl.split(parts[i].reshape([2, 2, 16 >> level, 64]).permute((0, 2, 3, 1)))
            finer = joined(finer, (first, second))
        parts = finer
    tokens = ()
    for i in gl.static_range(32):
        tokens = joined(tokens, (gl.convert_layout(parts[i].reshape([2, 64]), ONE, assert_trivial=True),))
    return tokens


@gluon.jit
def together(tokens):
    """The inverse of `apart`."""
    parts = ()
    for i in gl.static_range(32):
        parts = joined(parts, (tokens[i].reshape([2, 1, 64]),))
    for level in gl.static_range(5):
        larger = ()
        for i in gl.static_range(16 >> level):
            both = gl.join(parts[2 * i], parts[2 * i + 1]).permute((0, 3, 1, 2))
            larger = joined(larger, (both.reshape([2, 2 << level, 64]),))
        parts = larger
    return gl.convert_layout(parts[len(parts) - 1].reshape([64, 64]), PAIRS, assert_trivial=True)


@gluon.jit
def running_sums(steps):
    """Running sums of the tokens' steps, within each half."""
    total = steps[0]
    sums = joined((), (total,))
    for i in gl.static_range(1, 32):
        total = total + steps[i]
        sums = joined(sums, (total,))
    return sums


@gluon.jit
def _carry(fade, carried):
    """A pair of decay factors in float16, times `carried`, the rounding error carried over from earlier tokens (close
    to 1). So the product over many tokens is off by one rounding only, even if all factors are alike."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .f32 a, b;
        .reg .b16 low, high;
        mul.f32 $1, $3, $5;
        mul.f32 $2, $4, $6;
        cvt.rn.f16x2.f32 $0, $2, $1;
        mov.b32 {low, high}, $0;
        cvt.f32.f16 a, low;
        cvt.f32.f16 b, high;
        sub.f32 $1, $1, a;
        sub.f32 $2, $2, b;
        add.f32 $1, $1, 0f3F800000;
        add.f32 $2, $2, 0f3F800000;
        }
        """,
        "=&r,=&f,=&f,f,f,f,f",
        [fade[0], fade[1], carried[0], carried[1]],
        dtype=(gl.int32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def fades_of_tokens(even, odd):
    """Each token's decay factors, as pairs in float16."""
    one = gl.full([2, 64], 1.0, gl.float32, ONE)
    carried = (one, one)
    fades = ()
    for i in gl.static_range(32):
        fade, low, high = _carry((exp2(even[i]), exp2(odd[i])), carried)
        carried = (low, high)
        fades = joined(fades, (fade,))
    return fades


@gluon.jit
def join_fades(before, after, level: gl.constexpr):
    """Decay factors for blocks twice as large: of each token since its block began, its own decay included (`before`),
    and until its block ends (`after`)."""
    new_before = ()
    new_after = ()
    for i in gl.static_range(32):
        if (i >> level) & 1:
            new_before = joined(new_before, (times(before[i], before[(i >> level << level) - 1]),))
            new_after = joined(new_after, (after[i],))
        else:
            new_before = joined(new_before, (before[i],))
            new_after = joined(new_after, (times(after[i], before[(i | (2 << level) - 1)]),))
    return new_before, new_after


@gluon.jit
def pick_fades(before, after, level: gl.constexpr):
    """The decay factor of each token to or from the boundary between its block and the neighbouring one; [64, 64]."""
    halves = gl.arange(0, 2, gl.SliceLayout(1, ONE))[:, None]
    picked = ()
    for i in gl.static_range(32):
        if level == 5:
            picked = joined(picked, (gl.where(halves == 0, after[i], before[i]),))
        elif (i >> level) & 1:
            picked = joined(picked, (before[i],))
        else:
            picked = joined(picked, (after[i],))
    return together(picked)
