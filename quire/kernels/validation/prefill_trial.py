"""Keeps Hopper's attention of prompts (`triton/prefill_hopper.py`) in the ops table if it is right here.

Triton's row chooses that kernel by itself, for shapes it can do. Where it fails, the plan is told to leave it out, and
the kernel for all cards does the prompts; decodes stay as they are. `models.trials` and the doctor call it.
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
    """The table as it is, or without that kernel; see `trial_hopper.settle_row`."""
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
    """An FP8 cache's pages are copied out in the type of the queries."""
    from quire.kernels.triton.attention.prefill_hopper import supports

    cache_dtype = shape.dtype if is_fp8(shape.cache_dtype) else shape.cache_dtype
    q = torch.empty(1, shape.num_heads, shape.head_dim, dtype=shape.dtype, device="meta")
    cache = torch.empty(1, shape.page_tokens, shape.num_kv_heads, shape.head_dim, dtype=cache_dtype, device="meta")
    return supports(q, cache, plain=shape.softcap is None and not shape.sinks)


def try_prompts(ops: Ops, shapes: list[TrialShape], device: torch.device) -> None:
    """Raises."""
    for shape in shapes:
        try_attention(ops, shape, device, counts=(NUM_TOKENS,))
