"""Puts a kernel for Hopper alone into a row of the ops table, if it is right here: what `trial_gated`,
`trial_latent` and `trial_recurrent` share.

Such kernels are compiled once for all kinds of steps, when they are tried: no request waits for that, and the next
start finds them on disk.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from quire.kernels.table import Ops
from quire.kernels.validation.failures import is_out_of_memory, reason
from quire.kernels.validation.trial_results import Findings
from quire.types import QuireError


def runs_on_hopper(ops: Ops, device: torch.device) -> bool:
    """Whether these are Triton's ops on such a card, or on meta beside one."""
    return ops.captures and device.type != "cpu" and torch.cuda.get_device_capability(device.index)[0] == 9


def settle_row(
    ops: Ops,
    name: str,
    exchange: Callable[[], Ops],
    attempt: Callable[[Ops], None],
    *,
    strict: bool,
    findings: Findings | None = None,
) -> Ops:
    """The table with the kernel that `exchange` puts in, if `attempt` finds nothing wrong with it (it raises if it
    does); else as it is, and a line says so. `strict`: refuse instead."""
    import triton

    from quire.kernels.triton.launch import KNOWN_GLUON

    findings, cause = findings or Findings(), None
    if triton.__version__.startswith(KNOWN_GLUON):
        try:
            faster = exchange()
            findings.attempt(lambda: attempt(faster))
            return faster
        except Exception as error:  # whatever a compiler, a driver or a kernel may say
            findings.doubt()
            if is_out_of_memory(error):  # no fault of the kernel's, and whoever needs the memory next will say so
                return ops
            cause, why = error, reason(error)
    else:  # from a kernel that waits forever no trial comes back
        known = " and ".join(version[:-1] for version in KNOWN_GLUON)
        why = f"made for Triton {known}, this is {triton.__version__}"
    line = f"The {name} can't be used here ({why})"
    if strict:
        raise QuireError("kernel_failed", f"{line}.", "Leave strict_kernels out, or see `quire doctor`.") from cause
    warnings.warn(f"{line}; the one for all cards does its work, more slowly.", stacklevel=3)
    return ops
