"""Puts a Hopper-only kernel into the ops table if its trial succeeds: shared by `gated_trial`, `prefill_trial`,
`latent_trials` and `recurrent_trials`.

A trial compiles the kernel for all kinds of steps, so that no request waits for the compiler and the next start finds
the kernel in Triton's cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from quire.kernels.table import Ops
from quire.kernels.validation.failures import reason
from quire.kernels.validation.trial_results import Findings
from quire.types import QuireError, is_out_of_memory


def runs_on_hopper(ops: Ops, device: torch.device) -> bool:
    """Whether these are Triton's ops on a Hopper GPU, or on the meta device of a dry run for one."""
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
    """Returns the table that `exchange` makes if `attempt`, which raises on failure, accepts it; otherwise warns and
    returns `ops`. `strict`: raise `kernel_failed` instead of warning."""
    import triton

    from quire.kernels.triton.launch import KNOWN_GLUON

    findings, cause = findings or Findings(), None
    if triton.__version__.startswith(KNOWN_GLUON):
        try:
            faster = exchange()
            findings.attempt(lambda: attempt(faster))
            return faster
        except Exception as error:  # compilers, drivers and kernels raise errors of any type
            findings.forbid_note()
            if is_out_of_memory(error):  # not the kernel's fault; the next allocation of the start reports it
                return ops
            cause, why = error, reason(error)
    else:  # an incompatible Triton may compile a kernel that never ends, which a trial can't detect
        known = " and ".join(version[:-1] for version in KNOWN_GLUON)
        why = f"made for Triton {known}, this is {triton.__version__}"
    line = f"The {name} can't be used here ({why})"
    if strict:
        raise QuireError("kernel_failed", f"{line}.", "Leave strict_kernels out, or see `quire doctor`.") from cause
    warnings.warn(f"{line}; the portable Triton kernel runs instead, more slowly.", stacklevel=3)
    return ops
