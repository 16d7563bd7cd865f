"""A process that compiles kernels for another one, onto the disk where that one will look for them: `python -m
quire.kernels.compile_worker`, started by `quire.ahead`.

It is told a kernel a line, in JSON, and answers each with a line when the kernel lies in Triton's cache, with the
launcher that Triton has a C compiler make for it. It never opens a device: a compiler needs to know its name, no more.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

NICE = 5  # whoever waits for the first token goes first


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


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # compilers may say something
    os.nice(NICE)
    if "--driver" in sys.argv:
        _build_driver()

    importlib.import_module("quire.kernels.triton.launch")  # torch takes seconds; the first job should not
    for line in sys.stdin:
        job = json.loads(line)
        try:
            compile_kernel(job)
        except Exception as error:  # whoever launches it will see for themselves
            print(f"{job.get('name')}: {type(error).__name__}: {error}", file=sys.stderr)
        answers.write("done\n")


def compile_kernel(job: dict[str, Any]) -> Any:
    """`module` and `name` of a kernel, Triton's own description of what it is compiled for, and the `target`."""
    driver.set_active(StandIn(GPUTarget(*job["target"])))
    kernel: Any = importlib.import_module(job["module"])
    for part in job["name"].split("."):
        kernel = getattr(kernel, part)
    compiled = kernel.preload(job["data"])
    if job["target"][0] == "cuda":
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)
    return compiled


def _build_driver() -> None:
    """What Triton itself needs before it can launch anything."""
    try:
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()
    except Exception as error:
        print(f"driver: {type(error).__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
