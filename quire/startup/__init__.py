"""Builds an engine from a config (`assemble`), and shortens the time until it is ready.

`early_init` opens the GPU and hashes Triton while torch is imported. `compile_ahead` compiles missing kernels in other
processes: `dry_run` lists them, `compile_workers` compile them. `trial_notes` saves a start from repeating the kernel
trials of an earlier one.
"""

from quire.startup.compile_ahead import Compilers, start_compilers

__all__ = ["Compilers", "start_compilers"]
