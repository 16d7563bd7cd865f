"""Compiles kernels as another process would launch them, onto the disk where that one will look for them, with the
launcher that Triton 3.6 has a C compiler make for each. `quire.startup.dry_run` hands it to the processes it forks.

It never opens a device: a compiler needs to know its name, no more.
"""

from __future__ import annotations

import importlib
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class StandIn:
    """A driver that knows which device there will be. Nothing can be launched through it."""

    def __init__(self, target: GPUTarget):
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def prepare(index: int) -> None:
    """What Triton does once in a process, before there is anything to compile: it hashes itself, hundreds of megabytes.
    The first also builds what Triton needs before it can launch anything."""
    importlib.import_module("triton.compiler.code_generator")
    importlib.import_module("triton.runtime.cache").triton_key()
    if index == 0:
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


def compile_kernel(job: dict[str, Any]) -> Any:
    """`module` and `name` of a kernel, Triton's own description of what it is compiled for, and the `target`."""
    driver.set_active(StandIn(GPUTarget(*job["target"])))
    kernel: Any = importlib.import_module(job["module"])
    for part in job["name"].split("."):
        kernel = getattr(kernel, part)
    compiled = kernel.preload(job["data"])
    if job["target"][0] == "cuda":
        from triton.backends.nvidia import driver as nvidia

        if hasattr(nvidia, "make_launcher"):  # from 3.7 on all kernels have one in common, which `prepare` builds
            nvidia.CudaLauncher(compiled.src, compiled.metadata)
    return compiled
