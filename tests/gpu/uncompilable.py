"""A kernel that no compiler takes, for `test_trials`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def uncompilable(x_ptr):
    tl.static_assert(False, "no such instruction")
    tl.store(x_ptr, 0)
