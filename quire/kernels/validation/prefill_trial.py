"""Trial of Hopper's prefill attention (`triton/attention/prefill_hopper.py`).

Triton's ops choose that kernel for the shapes that it supports. If its trial fails, `plan_attention` is called with
`hopper=False`, so that the portable kernel prefills; decode is unaffected. `models.loading.kernel_trials` and
`quire doctor` call it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch

from quire.kernels.table import Ops
from quire.kernels.validation.hopper_trial import runs_on_hopper, settle_row
from quire.kernels.validation.trial_results import Findings
from quire.kernels.validation.trials import NUM_TOKENS, TrialShape, is_fp8, try_attention

NAME = "prompt attention for Hopper"


def settle_prompts(
    ops: Ops, shapes: Iterable[TrialShape], device: torch.device, *, strict: bool, findings: Findings | None = None
) -> Ops:
    """Returns the table unchanged, or without the kernel if it fails; see `hopper_trial.settle_row`."""
    if not runs_on_hopper(ops, device):
        return ops
    fitting = [shape for shape in shapes if fits(shape)]
    if not fitting:
        return ops
    plain = replace(ops, plan_attention=partial(ops.plan_attention, hopper=False))
    return settle_row(
        plain, NAME, lambda: ops, lambda own: try_prompts(own, fitting, device), strict=strict, findings=findings
    )


def fits(shape: TrialShape) -> bool:
    """Whether the kernel supports the shape. Pages of an FP8 cache are dequantized to the queries' dtype first."""
    from quire.kernels.triton.attention.prefill_hopper import supports

    cache_dtype = shape.dtype if is_fp8(shape.cache_dtype) else shape.cache_dtype
    q = torch.empty(1, shape.num_heads, shape.head_dim, dtype=shape.dtype, device="meta")
    cache = torch.empty(1, shape.page_tokens, shape.num_kv_heads, shape.head_dim, dtype=cache_dtype, device="meta")
    return supports(q, cache, plain=shape.softcap is None and not shape.sinks)


def try_prompts(ops: Ops, shapes: list[TrialShape], device: torch.device) -> None:
    """Compares prefill attention on each shape with the reference; raises if they disagree."""
    for shape in shapes:
        try_attention(ops, shape, device, counts=(NUM_TOKENS,))
