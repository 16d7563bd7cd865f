"""Activation functions for Triton kernels, with the names of `kernels.activations`; float32 in and out."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gelu_tanh(x):
    """GELU by tanh: (1 + tanh(z)) / 2 is sigmoid(2 z), where z is sqrt(2 / pi) * (x + 0.044715 * x**3)."""
    return x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))


@triton.jit
def curved(x, CURVE: tl.constexpr):
    """Activation of x. CURVE: a name of `kernels.activations`."""
    if CURVE == "silu":
        y = x * tl.sigmoid(x)
    elif CURVE == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif CURVE == "gelu_tanh":
        y = gelu_tanh(x)
    else:
        tl.static_assert(CURVE == "relu" or CURVE == "relu2")
        y = tl.where(x < 0.0, 0.0, x)  # a NaN stays NaN
        if CURVE == "relu2":
            y = y * y
    return y
