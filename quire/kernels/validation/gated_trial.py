"""Trial of Hopper's fused gate/up projection (`triton/linear/gated_hopper.py`), which enters the ops table if its
results are right and it is faster than cuBLAS followed by the activation kernel.

The loader calls `settle_gated` for models with gated feed-forward blocks. Which one is faster depends on the card, its
power limit and the cuBLAS version, so both are timed once, alternately.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.activations import Curve
from quire.kernels.table import FirstWinner, Ops
from quire.kernels.timing import Timer, device_seconds
from quire.kernels.validation.hopper_trial import runs_on_hopper, settle_row
from quire.kernels.validation.trial_results import Findings
from quire.kernels.validation.trials import compare, finish_writes

NAME = "product of gate and up for Hopper"
NUM_ROWS = (1025, 1100, 1279)  # row counts of the trial, whose last tiles are partial
TIMED_ROWS = 8192  # rows of the timed product, as in a large prefill step
TURNS = 2
WARM_SECONDS = 0.2  # an idle card clocks higher at first, which would favour the kernel timed first
MARGIN = 0.99  # fraction of the plain path's time that the kernel must stay below; 0 disables the kernel


@dataclass(frozen=True, slots=True)
class GatedTrialShape:
    """The properties of a model that decide whether the kernel supports it and how it is compiled."""

    in_features: int
    num_outputs: int  # gate and up outputs together
    dtype: torch.dtype
    curve: Curve = "silu"


def settle_gated(
    ops: Ops, shape: GatedTrialShape, device: torch.device, *, strict: bool, findings: Findings | None = None
) -> Ops:
    """Returns the table with the kernel, or unchanged if the kernel does not fit, fails or is not faster; see
    `hopper_trial.settle_row`."""
    if not runs_on_hopper(ops, device):
        return ops
    from quire.kernels.triton.linear.gated_hopper import fits

    if not fits(shape.num_outputs, shape.in_features, shape.dtype, shape.curve):
        return ops

    def exchange() -> Ops:
        from quire.kernels.triton.linear.gated_hopper import GatedLinear

        gated = GatedLinear((shape.num_outputs, shape.in_features), shape.curve, ops.rms_norm, ops.gate_mul)
        return replace(ops, fused_linear=gated if ops.fused_linear is None else FirstWinner(gated, ops.fused_linear))

    findings = findings or Findings()
    faster = settle_row(
        ops, NAME, exchange, lambda faster: try_gated(faster, shape, device), strict=strict, findings=findings
    )
    if faster is ops:
        return ops
    return faster if findings.decide(NAME, lambda: is_quicker(faster, shape, device)) else ops


def try_gated(ops: Ops, shape: GatedTrialShape, device: torch.device) -> None:
    """Compares the kernel with norm, GEMM and activation run separately; raises if they disagree."""
    weight = _weight(shape, device)
    norm = torch.randn(shape.in_features, dtype=shape.dtype, device=device)
    for num_rows in NUM_ROWS:
        x = torch.randn(num_rows, shape.in_features, dtype=shape.dtype, device=device)
        finish_writes(device)
        normed = ops.rms_norm(x, norm, 1e-6)
        compare(_run(ops, x, weight, shape.curve, norm), partial(_plain, ops, normed, weight, shape.curve), shape.dtype)


def is_quicker(ops: Ops, shape: GatedTrialShape, device: torch.device, timer: Timer = device_seconds) -> bool | None:
    """Whether the kernel is faster than the plain path for a prefill step on a warm card; None if there was not enough
    memory to measure."""
    if device.type == "meta":  # a dry run compiles the kernel, in case it is chosen
        return True
    try:
        ours, plain = _race(ops, shape, device, timer)
    except torch.OutOfMemoryError:
        return None  # the next allocation of the start reports it
    finally:  # memory cached by torch's allocator would count as used in the memory plan
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return ours < MARGIN * plain


def _race(ops: Ops, shape: GatedTrialShape, device: torch.device, timer: Timer) -> tuple[float, float]:
    """Returns the seconds of the kernel and of the plain path, the minimum of `TURNS` each."""
    weight = _weight(shape, device)
    x = torch.randn(TIMED_ROWS, shape.in_features, dtype=shape.dtype, device=device)

    run_plain = partial(_plain, ops, x, weight, shape.curve)
    ours = plain = float("inf")
    _warm(run_plain, device)
    for _ in range(TURNS):
        ours = min(ours, timer(lambda: _run(ops, x, weight, shape.curve)))
        plain = min(plain, timer(run_plain))
    return ours, plain


def _plain(ops: Ops, x: Tensor, weight: Tensor, curve: Curve) -> Tensor:
    return ops.gate_mul(functional.linear(x, weight), curve)


def _run(ops: Ops, x: Tensor, weight: Tensor, curve: Curve, norm: Tensor | None = None) -> Tensor:
    if ops.fused_linear is None or not ops.fused_linear.wins(len(x), weight, curve):
        raise RuntimeError("it is not used for what it was made for")
    return ops.fused_linear.run(x, weight, None, norm, 1e-6, curve, None)


def _weight(shape: GatedTrialShape, device: torch.device) -> Tensor:
    weight = torch.randn(shape.num_outputs, shape.in_features, dtype=shape.dtype, device=device)
    return weight.mul_(shape.in_features**-0.5)


def _warm(launch: Callable[[], object], device: torch.device) -> None:
    end = time.monotonic() + WARM_SECONDS
    while time.monotonic() < end:
        for _ in range(10):
            launch()
        finish_writes(device)
