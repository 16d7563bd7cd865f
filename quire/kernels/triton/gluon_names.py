"""What Gluon calls by another name from one Triton to the next: the kernels written in it take such names from here, so
that one source does for all of `launch.KNOWN_GLUON`. They use no name that only some of these have.
"""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl

# In 3.7 `barrier`, which can also mean a cluster of programs; as it is called here it means the threads, as before. A
# Triton that has neither is none that these kernels are tried with, but they are imported there, too.
thread_barrier: Any = getattr(gl, "thread_barrier", None) or getattr(gl, "barrier", None)
