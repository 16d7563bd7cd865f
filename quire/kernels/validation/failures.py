"""Classifies kernel errors: out of memory, device lost, kernel unusable.

Out of memory is not the kernel's fault and is re-raised; a lost device ends the engine; any other error makes the
kernel unusable, so that a fallback replaces it or the start is refused. Called by trials before a model is built, by
the sampler when a request needs a kernel for the first time (`LazyKernels`), and by the runtime guard when a step
fails.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Container
from typing import TypeVar

import torch

from quire.types import QuireError, is_out_of_memory

Result = TypeVar("Result")


def probe_device(device: torch.device) -> None:
    """Raises if the device is lost: after an illegal access or a failed launch every CUDA synchronization returns that
    error until the process ends."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reason(error: Exception) -> str:
    """Returns the error's type and message in one line. Triton's compile errors quote the source first, so their last
    line is taken."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1 if re.match(r'at [0-9]+:[0-9]+:', lines[0]) else 0].strip()}"


def report_unusable(
    name: str,
    why: str,
    *,
    refuse: bool,
    instead: str = "plain torch runs instead, more slowly",
    hint: str = "Leave strict_kernels and FP8 out, or see `quire doctor`.",
) -> None:
    """Warns that a kernel can't be used and what runs instead; raises `kernel_failed` if `refuse`."""
    line = f"The {name} kernel can't be used here ({why})"
    if refuse:
        raise QuireError("kernel_failed", f"{line}.", hint)
    warnings.warn(f"{line}; {instead}.", stacklevel=3)


class LazyKernels:
    """Kernels that are compiled on first use, because only some requests need them.

    A kernel that fails then is not tried again: a warning is logged once and the caller falls back. A kernel in
    `irreplaceable` has no fallback and raises for every request that needs it."""

    def __init__(self, irreplaceable: Container[str] = ()):
        self._irreplaceable = irreplaceable
        self._unusable: dict[str, str] = {}  # kernel name -> reason

    def attempt(self, name: str, device: torch.device, launch: Callable[[], Result]) -> Result | None:
        """Returns the result of `launch`, or None if the caller must fall back. Must not be called while a CUDA graph
        is captured, because it may synchronize."""
        refuse = name in self._irreplaceable
        if name not in self._unusable:
            try:
                return launch()
            except Exception as error:  # compilers and drivers raise errors of any type
                _reraise_foreign(error, device)
                self._unusable[name] = reason(error)
            if not refuse:
                report_unusable(name, self._unusable[name], refuse=False)
        if refuse:
            hint = "Ask for less of the sampler, or leave strict_kernels and deterministic out."
            report_unusable(name, self._unusable[name], refuse=True, hint=hint)
        return None


def _reraise_foreign(error: Exception, device: torch.device) -> None:
    """Re-raises errors that are not the kernel's own: out of memory and a lost device."""
    if is_out_of_memory(error):
        raise error
    try:
        probe_device(device)
    except Exception:
        raise error from None
