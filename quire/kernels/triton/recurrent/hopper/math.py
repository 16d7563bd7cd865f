"""Element-wise functions of the recurrent Hopper kernels, in as few instructions as the hardware allows: these kernels
are bound by instruction issue. Written in Gluon.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def joined(first, second):
    """Concatenation of two tuples; Gluon does not support unpacking (`*`)."""
    return first + second


@gluon.jit
def wide(x):
    """x in float32. The compiler's conversion from bfloat16 takes two instructions for every second element."""
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
    """x / 2 in float32; from bfloat16, three instructions for two elements."""
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
    """2 ** x, flushing denormals to zero."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def doubled_silu(x):
    """SiLU of 2 x, computed as x + x tanh(x): one special-function instruction instead of two (exponential and
    reciprocal). The relative error of tanh is at most 2^-11; rounding to bfloat16 has 2^-9."""
    tangent = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    return gl.fma(x, tangent, x)


@gluon.jit
def sigmoid(x):
    """Sigmoid by an exponential and a reciprocal: where it is small, the error of a tanh would be as large as
    itself."""
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
