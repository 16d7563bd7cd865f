"""Recurrent layers for `quire bench kernels`: a decode step and a chunked scan of Qwen3-Next's and Nemotron-H's layers.

Bytes are the floor: every row's state read and written once, the projection read and the output written once. What a
scan keeps between its kernels is not in it. Each kind runs through the kernels that a model would be given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from quire.bench.kernels import Work

DECODE_ROWS = (1, 16, 64, 256)
SCANS = ((1, 8192), (8, 1024), (2, 4096))  # rows, tokens of each


def recurrent_work(device: torch.device) -> Iterator[Work]:
    from quire.kernels.recurrent import RecurrentShape

    yield from _layer_work("gated delta net", RecurrentShape(16, 32, 128, 128, 4), True, device)
    yield from _layer_work("mamba2", RecurrentShape(8, 128, 128, 64, 4), False, device)


def _layer_work(name: str, shape: object, delta: bool, device: torch.device) -> Iterator[Work]:
    import torch

    from quire.bench.kernels import ENOUGH_BYTES, Work
    from quire.kernels.recurrent import DeltaWeights, MambaWeights, RecurrentShape
    from quire.kernels.table import select_ops
    from quire.kernels.trial_recurrent import settle_delta_net

    assert isinstance(shape, RecurrentShape)
    bf16 = torch.bfloat16
    conv = torch.randn(shape.channels, 1, shape.conv_len, device=device, dtype=bf16)
    heads = torch.randn(shape.num_heads, device=device)
    weights: DeltaWeights | MambaWeights
    if delta:
        weights = DeltaWeights(conv, heads, heads, torch.ones(shape.value_dim, device=device, dtype=bf16), 1e-6)
    else:
        norm = torch.ones(shape.values, device=device, dtype=bf16)
        weights = MambaWeights(conv, None, heads, heads, heads, norm, 1e-5, shape.num_groups, 0.0, float("inf"))
    ops = select_ops("cuda")
    if delta:
        ops = settle_delta_net(ops, shape, bf16, device, strict=False)
    op: Callable[..., object] = ops.gated_delta_net if delta else ops.mamba2
    width = shape.channels + shape.values + (2 if delta else 1) * shape.num_heads
    per_token = 2 * (width + shape.values)
    for num_rows in DECODE_ROWS:
        state_bytes = 4 * (2 * shape.matrix_elements + shape.conv_len * shape.channels)  # the ring: but one entry read
        copies = max(1, ENOUGH_BYTES // (num_rows * 4 * shape.slot_elements))  # of the state: no cache holds them all
        state = torch.zeros(copies * num_rows, shape.slot_elements, device=device)
        x = torch.randn(num_rows, width, device=device, dtype=bf16)
        positions = torch.arange(num_rows, device=device) + 9
        plans = [
            ops.plan_recurrent(torch.randperm(num_rows, device=device) + i * num_rows, positions, [1] * num_rows)
            for i in range(copies)
        ]

        def decode(index: int, x: torch.Tensor = x, state: torch.Tensor = state, plans: list = plans) -> object:
            return op(x, weights, shape, state, plans[index % len(plans)])

        yield Work(f"{name}: step", f"{num_rows} rows", decode, num_bytes=num_rows * (state_bytes + per_token))
        del state
    for num_rows, tokens in SCANS:
        state = torch.zeros(num_rows, shape.slot_elements, device=device)
        x = torch.randn(num_rows * tokens, width, device=device, dtype=bf16)
        positions = torch.arange(tokens, device=device).repeat(num_rows)
        plan = ops.plan_recurrent(torch.arange(num_rows, device=device), positions, [tokens] * num_rows)
        op(x, weights, shape, state, plan)  # uploads the plan, which a capture may not

        def scan(index: int, x: torch.Tensor = x, state: torch.Tensor = state, plan: object = plan) -> object:
            return op(x, weights, shape, state, plan)

        num_bytes = num_rows * (tokens * per_token + 8 * shape.slot_elements)
        flops = _flops(shape, delta) * num_rows * tokens
        yield Work(f"{name}: scan", f"{num_rows} × {tokens}", scan, num_bytes=num_bytes, flops=flops)


def _flops(shape: object, delta: bool) -> int:
    """Of one token in a chunked scan: scores and their products within the chunk, three or two products with the state,
    and for the delta rule the inverse with its two products."""
    from quire.kernels.recurrent import RecurrentShape
    from quire.kernels.triton.recurrent_scan import CHUNK

    assert isinstance(shape, RecurrentShape)
    key, value = shape.key_dim, shape.value_dim
    per_head = 2 * CHUNK * (key + value) + (6 if delta else 4) * key * value
    if delta:
        per_head += 2 * CHUNK * (2 * key + value) + 8 * CHUNK * CHUNK
    return per_head * shape.num_heads
