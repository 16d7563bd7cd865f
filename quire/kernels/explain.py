"""Says which implementation of each op a device would get, and why. `quire doctor` prints it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.kernels.table import REFERENCE, Ops, select_ops
from quire.kernels.trial import TrialShape, dense_rows, failure

# What a typical model on a GPU looks like: 32 heads of 128 over 8 of keys and values, in bfloat16.
TYPICAL = TrialShape(num_heads=32, num_kv_heads=8, head_dim=128, page_tokens=64,
                     window=None, qk_norm=True, dtype=torch.bfloat16, cache_dtype=torch.bfloat16)  # fmt: skip


def explain_ops(device: torch.device, kernels: str = "auto") -> list[Mapping[str, Any]]:
    """One entry per row of the table: op, implementation, reason. On a GPU each kernel is tried."""
    names = [row.name for row in dense_rows(TYPICAL, device)]
    try:
        ops = select_ops(device.type, kernels, strict=True)
    except Exception as error:
        return [_entry(name, "torch", str(error)) for name in names]
    if device.type == "cpu" or ops is REFERENCE:
        why = "as asked for" if kernels == "torch" else "the one for a CPU"
        return [_entry(name, "torch" if ops.native is None else ops.native.isa, why) for name in names]
    return try_all(ops, TYPICAL, device)


def try_all(ops: Ops, shape: TrialShape, device: torch.device) -> list[Mapping[str, Any]]:
    found = []
    for row in dense_rows(shape, device):
        error = failure(ops, row)
        if error is None:
            found.append(_entry(row.name, "triton", "tried just now, right"))
        else:
            found.append(_entry(row.name, "torch", f"the Triton kernel failed ({type(error).__name__}: {error})"))
    return found


def explain_libraries(device: torch.device, kernels: str = "auto") -> list[Mapping[str, Any]]:
    """Of each attention library, and each of its kernels that was tried: its version and what it is used for."""
    from quire.kernels.libraries.choose import PROMPT_TOKENS, judge, pick

    judged = judge(select_ops(device.type, strict=True), TYPICAL, device, kernels)
    used, ours = pick(judged, kernels), judged[0]
    num_tokens = min(PROMPT_TOKENS, TYPICAL.max_len)
    flops = 2 * num_tokens**2 * TYPICAL.num_heads * TYPICAL.head_dim  # half of all pairs, two products
    found: list[Mapping[str, Any]] = []
    for verdict in judged[1:]:
        why = f"not used: {verdict.why}"
        if verdict.kernel is not None:
            rates = f"{flops / verdict.seconds / 1e12:.0f} TFLOP/s, our own {flops / ours.seconds / 1e12:.0f}"
            why = f"{'used' if verdict is used else 'not used'} for prompts ({rates})"
        found.append({"name": verdict.name, "installed": verdict.installed, "why": " ".join(why.split())})
    return found


def _entry(op: str, implementation: str, why: str) -> Mapping[str, Any]:
    return {"op": op, "implementation": implementation, "why": " ".join(why.split())[:200]}
