"""Reports which implementation of each op a device gets, and why. `quire doctor` prints it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.kernels.recurrent_types import RecurrentShape
from quire.kernels.table import REFERENCE, Ops, deterministic_ops, select_ops
from quire.kernels.validation.gated_trial import GatedTrialShape, settle_gated
from quire.kernels.validation.latent_trials import LatentTrialShape, settle_latent
from quire.kernels.validation.prefill_trial import settle_prompts
from quire.kernels.validation.recurrent_trials import (
    MambaTrialShape,
    settle_channel_delta,
    settle_delta_net,
    settle_mamba,
)
from quire.kernels.validation.trials import TrialShape, dense_trials, failure
from quire.types import QuireError

# Attention of a typical model on a GPU: 32 query heads and 8 KV heads of 128, in bfloat16.
TYPICAL = TrialShape(
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    page_tokens=64,
    window=None,
    qk_norm=True,
    dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16,
)


@dataclass(frozen=True, slots=True)
class HopperKernel:
    """A kernel for some models on Hopper GPUs only; on others the portable Triton kernel of the op runs."""

    op: str
    needs: str  # requirements on the model
    settle: Callable[[Ops, torch.device], Ops]  # puts the kernel into the ops table; raises QuireError if it fails


def _settle_prompts(ops: Ops, device: torch.device) -> Ops:
    """Tries the prefill kernel, which the table holds already; returns a copy of the table if it is right."""
    return replace(settle_prompts(ops, [TYPICAL], device, strict=True))


HOPPER = (
    HopperKernel(
        "prefill attention",
        "heads of 128 in bf16 or fp16, the cache in the same type, no soft caps, no sinks",
        _settle_prompts,
    ),
    HopperKernel(
        "gate/up projection, 1024 rows and more",
        "bf16 or fp16 weights, a SiLU or tanh GELU gate, and the kernel must be faster than cuBLAS",
        lambda ops, device: settle_gated(ops, GatedTrialShape(4096, 24576, torch.bfloat16), device, strict=True),
    ),
    HopperKernel(
        "latent attention, 32 heads and more",
        "latents of 512 + 64 in bf16 or fp16, the cache in the same type, a page size that is a power of two",
        lambda ops, device: settle_latent(
            ops, LatentTrialShape(128, 512, 64, 64, torch.bfloat16, torch.bfloat16), device, strict=True
        ),
    ),
    HopperKernel(
        "gated delta net, prefill",
        "heads of 128 × 128, a multiple of four of them, in bf16 or fp16",
        lambda ops, device: settle_delta_net(
            ops, RecurrentShape(16, 32, 128, 128, 4), torch.bfloat16, device, strict=True
        ),
    ),
    HopperKernel(
        "Kimi delta net, prefill",
        "heads of 128 × 128, a multiple of eight of them, in bf16 or fp16",
        lambda ops, device: settle_channel_delta(
            ops, RecurrentShape(32, 32, 128, 128, 4), torch.bfloat16, device, strict=True
        ),
    ),
    HopperKernel(
        "Mamba2, prefill",
        "heads of 128 × 64, a multiple of eight of them, in bf16 or fp16",
        lambda ops, device: settle_mamba(
            ops,
            MambaTrialShape(RecurrentShape(8, 128, 128, 64, 4), 8, True, (0.0, float("inf")), torch.bfloat16),
            device,
            strict=True,
        ),
    ),
)


def explain_ops(device: torch.device, kernels: str = "auto", deterministic: bool = False) -> list[Mapping[str, Any]]:
    """One entry for each row of the table that a usual dense model needs: op, implementation, reason. On a GPU each is
    tried."""
    names = [row.name for row in dense_trials(TYPICAL, device)]
    try:
        ops = (
            deterministic_ops(device.type, kernels) if deterministic else select_ops(device.type, kernels, strict=True)
        )
    except Exception as error:
        return [_entry(name, "torch", str(error)) for name in names]
    if device.type == "cpu" or ops is REFERENCE:
        why = "as configured" if kernels == "torch" else "default for a CPU"
        return [_entry(name, "torch" if ops.native is None else ops.native.isa, why) for name in names]
    return try_all(ops, TYPICAL, device) + [explain_hopper(each, ops, device, deterministic) for each in HOPPER]


def explain_hopper(kernel: HopperKernel, ops: Ops, device: torch.device, deterministic: bool) -> Mapping[str, Any]:
    """Tries the kernel on a typical model of its kind if the GPU is Hopper, and reports the result."""
    capability = torch.cuda.get_device_capability(device)
    if deterministic:
        return _entry(kernel.op, "triton", "the deterministic mode's kernel")
    if capability[0] != 9:
        return _entry(kernel.op, "triton", f"the Hopper kernel needs compute capability 9, this is {capability[0]}")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            taken = kernel.settle(ops, device) is not ops
        except QuireError as error:
            return _entry(kernel.op, "triton", error.what)
    if taken:
        return _entry(kernel.op, "hopper", f"trial passed; requirements: {kernel.needs}")
    return _entry(kernel.op, "triton", str(said[0].message) if said else "trial passed, but not faster here")


def try_all(ops: Ops, shape: TrialShape, device: torch.device) -> list[Mapping[str, Any]]:
    found = []
    for row in dense_trials(shape, device):
        error = failure(ops, row)
        if error is None:
            found.append(_entry(row.name, "triton", "trial passed"))
        else:
            found.append(_entry(row.name, "torch", f"the Triton kernel failed ({type(error).__name__}: {error})"))
    return found


def explain_libraries(device: torch.device, kernels: str = "auto") -> list[Mapping[str, Any]]:
    """Reports each attention library's version, whether it is used for prefill, and the measured rates."""
    from quire.kernels.libraries.choose import PROMPT_TOKENS, judge, pick

    judged = judge(select_ops(device.type, strict=True), TYPICAL, device, kernels)
    used, ours = pick(judged, kernels), judged[0]
    num_tokens = min(PROMPT_TOKENS, TYPICAL.max_len)
    flops = 2 * num_tokens**2 * TYPICAL.num_heads * TYPICAL.head_dim  # causal: half of all pairs, two products each
    found: list[Mapping[str, Any]] = []
    for verdict in judged[1:]:
        why = f"not used: {verdict.why}"
        if verdict.kernel is not None:
            rates = f"{flops / verdict.seconds / 1e12:.0f} TFLOP/s, our own {flops / ours.seconds / 1e12:.0f}"
            why = f"{'used' if verdict is used else 'not used'} for prefill ({rates})"
        found.append({"name": verdict.name, "installed": verdict.installed, "why": " ".join(why.split())})
    return found


def _entry(op: str, implementation: str, why: str) -> Mapping[str, Any]:
    return {"op": op, "implementation": implementation, "why": " ".join(why.split())[:200]}
