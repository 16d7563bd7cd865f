"""Compiles kernels ahead of time into Triton's disk cache, under the keys with which another process will look them up,
including the launcher that Triton 3.6 builds for each with a C compiler. `quire.startup.dry_run` runs it in processes
that it forks.

It never opens a device: a compiler only needs the device's name.
"""

from __future__ import annotations

import importlib
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class TargetOnlyDriver:
    """A Triton driver that only knows the compilation target; nothing can be launched through it."""

    def __init__(self, target: GPUTarget):
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def prepare(index: int) -> None:
    """Do Triton's one-time work of a process, before there is anything to compile: it hashes itself, hundreds of
    megabytes. The first process also builds what Triton needs to launch kernels."""
    importlib.import_module("triton.compiler.code_generator")
    importlib.import_module("triton.runtime.cache").triton_key()
    if index == 0:
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


def compile_kernel(job: dict[str, Any]) -> Any:
    """Compile a kernel. `job`: its `module` and `name`, Triton's serialized specialization (`data`), and the
    `target`."""
    driver.set_active(TargetOnlyDriver(GPUTarget(*job["target"])))
    kernel: Any = importlib.import_module(job["module"])
    for part in job["name"].split("."):
        kernel = getattr(kernel, part)
    compiled = kernel.preload(job["data"])
    if job["target"][0] == "cuda":
        from triton.backends.nvidia import driver as nvidia

        if hasattr(nvidia, "make_launcher"):  # from 3.7 on all kernels share a launcher, which `prepare` builds
            nvidia.CudaLauncher(compiled.src, compiled.metadata)
    return compiled
