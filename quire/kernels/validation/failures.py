"""What an error of a kernel means, and what is said and done about it: memory that ran out is nobody's fault, a device
that answers no more is everybody's end, and whatever is left makes the kernel one that can't be used here.

Trials ask before anything is built (`trial`), the sampler when the first request needs a kernel (`LateKernels`), and
the guard around the workers whenever a step fails.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Container
from typing import TypeVar

import torch

from quire.types import QuireError

# How others than torch's own allocator say it: the CPU's, cuBLAS, Triton's launcher.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")

Result = TypeVar("Result")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY)


def sign_of_life(device: torch.device) -> None:
    """Raises if there is none: CUDA's own answer to "have you finished", which after an illegal access or a failed
    launch is that same error, for ever."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reason(error: Exception) -> str:
    """In one line. Triton's compiler first quotes the kernel, then says what is wrong."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1 if re.match(r'at [0-9]+:[0-9]+:', lines[0]) else 0].strip()}"


def give_way(
    name: str,
    why: str,
    *,
    refuse: bool,
    instead: str = "plain torch does its work, more slowly",
    hint: str = "Leave strict_kernels and FP8 out, or see `quire doctor`.",
) -> None:
    """The line on a kernel that can't be used; or, if nothing else may step in, the refusal."""
    line = f"The {name} kernel can't be used here ({why})"
    if refuse:
        raise QuireError("kernel_failed", f"{line}.", hint)
    warnings.warn(f"{line}; {instead}.", stacklevel=3)


class LateKernels:
    """Kernels that only some requests need, and that are therefore compiled when the first of them comes. One that does
    not compile then is given up for good, with a line; one that nothing else may stand in for fails the requests that
    need it, each time, without being compiled again."""

    def __init__(self, irreplaceable: Container[str] = ()):
        self._irreplaceable = irreplaceable
        self._given_up: dict[str, str] = {}  # name -> why

    def attempt(self, name: str, device: torch.device, launch: Callable[[], Result]) -> Result | None:
        """What `launch` returns; None: somebody else has to do it. Not for what is captured: it may wait."""
        refuse = name in self._irreplaceable
        if name not in self._given_up:
            try:
                return launch()
            except Exception as error:  # whatever a compiler or a driver may say
                _check_kernels_own(error, device)
                self._given_up[name] = reason(error)
            if not refuse:
                give_way(name, self._given_up[name], refuse=False)
        if refuse:
            hint = "Ask for less of the sampler, or leave strict_kernels and deterministic out."
            give_way(name, self._given_up[name], refuse=True, hint=hint)
        return None


def _check_kernels_own(error: Exception, device: torch.device) -> None:
    """Errors that are not the kernel's go on, to who knows what to do."""
    if is_out_of_memory(error):
        raise error
    try:
        sign_of_life(device)
    except Exception:
        raise error from None
