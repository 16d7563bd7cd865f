"""Self-test of the ops before the first request: small fixed inputs against stored golden results.

`assemble` calls `check_ops` with a model's ops. It takes milliseconds and catches a device, library or build with wrong
results, which would otherwise show only as wrong replies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.kernels.table import Ops
from quire.types import QuireError

WIDTH, HEADS, KV_HEADS, HEAD_DIM, PAGE = 64, 4, 2, 64, 16
# Computed once with the reference in float64 and stored, so that a wrong library is not compared with itself.
GOLDEN: dict[str, tuple[float, ...]] = {
    "rms_norm": (0.0000000, 0.1711833, 1.1610257, 1.4088857, 0.7827723, -0.3560970, 0.8999795),
    "gate_mul": (0.0000000, 0.0756185, -0.0865626, 0.2025165, 0.0897124, -0.0970021, 0.1768369),
    "rope": (
        0.0000000,
        0.1020425,
        0.8658877,
        0.9130740,
        0.2043961,
        -0.6730988,
        0.6306599,
        0.4548648,
        0.4908879,
        -0.9361772,
        0.9087926,
        -0.3690041,
        0.0303303,
        0.6271990,
    ),
    "attention": (-0.6505668, 0.5433654, 0.6468800, 0.5567750, 0.5921389, -0.9358316, 0.6044126),
}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def check_ops(ops: Ops, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Raises `selftest_failed` if the results of an op differ from the golden ones."""
    found = results(ops, device, dtype)
    for name, golden in GOLDEN.items():
        worst = max(abs(a - b) for a, b in zip(found[name], golden, strict=True))
        if not worst < TOLERANCE[dtype] or not all(map(math.isfinite, found[name])):
            what = f"The op {name} gives wrong results on this machine (they are off by {worst:.2e})."
            raise QuireError("selftest_failed", what, "Check torch, the driver and the device.")


def results(ops: Ops, device: torch.device, dtype: torch.dtype) -> dict[str, tuple[float, ...]]:
    """Returns samples of each op's results on the fixed inputs."""

    def wave(*shape: int, speed: float) -> Tensor:
        """Returns values between -1 and 1 that are the same on every machine."""
        count = math.prod(shape)
        steps = torch.arange(count, dtype=torch.float64) * speed
        return torch.sin(steps).view(shape).to(device=device, dtype=dtype)

    x = wave(5, WIDTH, speed=0.7)
    weight = 1 + 0.1 * wave(WIDTH, speed=1.3)
    qkv = wave(5, (HEADS + 2 * KV_HEADS) * HEAD_DIM, speed=0.37)
    caches = torch.zeros(2, 3, PAGE, KV_HEADS, HEAD_DIM, device=device, dtype=dtype)
    positions = torch.tensor([0, 1, 2, 3, 0], device=device)
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float32, device=device) / HEAD_DIM)
    angles = ops.plan_angles(positions, frequencies, 1.0, dtype)
    slots = torch.tensor([PAGE, PAGE + 1, PAGE + 2, PAGE + 3, 2 * PAGE], device=device)
    q = ops.qk_norm_rope_write(qkv, None, None, 0.0, angles, caches[0], caches[1], slots, HEADS)
    table = torch.tensor([[1, 0], [2, 0]], dtype=torch.int32, device=device)
    plan = ops.plan_attention(table, positions, [4, 1], [4, 1], PAGE, None, dtype)
    return {
        "rms_norm": _sample(ops.rms_norm(x, weight, 1e-5)),
        "gate_mul": _sample(ops.gate_mul(wave(5, 2 * WIDTH, speed=0.9))),
        "rope": _sample(q) + _sample(caches[0, 1, :4]),
        "attention": _sample(ops.paged_attention(q, caches[0], caches[1], plan, HEAD_DIM**-0.5)),
    }


def _sample(tensor: Tensor, count: int = 6) -> tuple[float, ...]:
    flat = tensor.reshape(-1).double().cpu()
    places = torch.linspace(0, len(flat) - 1, count).long()
    return (*flat[places].tolist(), float(flat.abs().mean()))
