"""Compiles what a start will need before it comes to it: `compilers` beside the start, `rehearsal` and the `workers` it
forks in processes of their own.
"""

from quire.ahead.compilers import Compilers, start_compilers

__all__ = ["Compilers", "start_compilers"]
