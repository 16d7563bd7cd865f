"""What recurrent layers' kernels for Hopper do element by element, in as few instructions as the card has for it: in
these kernels the units that issue instructions are what is short. Written in Gluon.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def joined(first, second):
    """Of two tuples: a kernel knows no stars."""
    return first + second


@gluon.jit
def wide(x):
    """In float32. The compiler's own way from bfloat16 takes two instructions for every second element."""
    if x.dtype != gl.bfloat16:
        return x.to(gl.float32)
    return gl.inline_asm_elementwise(
        """
        {
        shl.b32 $0, $2, 16;
        and.b32 $1, $2, 0xffff0000;
        }
        """,
        "=r,=r,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def halved(x):
    """Half of it in float32, from bfloat16 in three instructions for two elements."""
    if x.dtype != gl.bfloat16:
        return x.to(gl.float32) * 0.5
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, h;
        mov.b32 h, 0x3F003F00;
        mul.bf16x2 t, $2, h;
        shl.b32 $0, t, 16;
        and.b32 $1, t, 0xffff0000;
        }
        """,
        "=r,=r,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def exp2(x):
    """Without care for denormals."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def doubled_silu(x):
    """SiLU of twice x, x + x tanh(x): one instruction of the special units where an exponential and a quotient are two.
    The tangent is off by 2^-11 of itself at most; rounding to bfloat16 is off by 2^-9."""
    tangent = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    return gl.fma(x, tangent, x)


@gluon.jit
def sigmoid(x):
    """By an exponential and a quotient: where it is small, a tangent's error would be as large as itself."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .f32 t;
        mul.ftz.f32 t, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 t, t;
        add.ftz.f32 t, t, 0f3F800000;
        rcp.approx.ftz.f32 $0, t;
        }
        """,
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
