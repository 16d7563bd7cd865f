"""Gluon names that differ between Triton versions. Kernels import them from here, so that one source works with all of
`launch.KNOWN_GLUON`, and use no other name that only some of these versions have.
"""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl

# Renamed to `barrier` in 3.7, which can also synchronize a cluster; as called here it synchronizes the threads of a
# program, as before. With a Triton that has neither, these kernels are not used, but their modules are still imported.
thread_barrier: Any = getattr(gl, "thread_barrier", None) or getattr(gl, "barrier", None)
