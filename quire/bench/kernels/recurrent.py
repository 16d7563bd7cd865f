"""Recurrent kernels for `quire bench kernels`: decode and chunked scan of the layers of Qwen3-Next, Kimi Linear and
Nemotron-H, and LFM2's short convolution.

Bytes are a lower bound: each row's state read and written once, the projection read once, the output written once;
buffers between the kernels of a scan do not count. Each layer runs the kernels that the trials select for a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from quire.bench.kernels.suite import KernelCase
    from quire.kernels.recurrent_types import RecurrentShape

DECODE_ROWS = (1, 16, 64, 256)
MAX_COPIES = 512  # copies of a small state
SCANS = ((1, 8192), (8, 1024), (2, 4096))  # rows, tokens of each


@dataclass(frozen=True, slots=True)
class _Layer:
    """One kind of layer: its op, the op's inputs, and the bytes and operations of a token."""

    name: str
    op: Callable[..., object]
    plan: Callable[..., object]
    weights: object
    shape: Any  # `RecurrentShape` or `ConvShape`
    num_inputs: int  # columns of x
    num_outputs: int
    step_elements: int  # elements of a row's state that a decode step reads and writes
    flops: int = 0  # per token of a scan


def recurrent_cases(device: torch.device) -> Iterator[KernelCase]:
    from quire.kernels.recurrent_types import RecurrentShape

    yield from _layer_cases(_heads("gated delta net", RecurrentShape(16, 32, 128, 128, 4), True, device), device)
    yield from _layer_cases(_by_channel(RecurrentShape(32, 32, 128, 128, 4), device), device)
    yield from _layer_cases(_heads("mamba2", RecurrentShape(8, 128, 128, 64, 4), False, device), device)
    yield from _layer_cases(_convolution(device), device)


def _heads(name: str, shape: RecurrentShape, delta: bool, device: torch.device) -> _Layer:
    import torch

    from quire.kernels.recurrent_types import DeltaWeights, MambaWeights
    from quire.kernels.table import select_ops
    from quire.kernels.validation.recurrent_trials import MambaTrialShape, settle_delta_net, settle_mamba

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
    else:
        trial = MambaTrialShape(shape, shape.num_groups, False, (0.0, float("inf")), bf16)
        ops = settle_mamba(ops, trial, device, strict=False)
    op: Callable[..., object] = ops.gated_delta_net if delta else ops.mamba2
    width = shape.channels + shape.values + (2 if delta else 1) * shape.num_heads
    moved = 2 * shape.matrix_elements + shape.conv_len * shape.channels  # conv ring: reads all entries but one
    return _Layer(name, op, ops.plan_recurrent, weights, shape, width, shape.values, moved, _flops(shape, delta))


def _by_channel(shape: RecurrentShape, device: torch.device) -> _Layer:
    import torch

    from quire.kernels.recurrent_types import DeltaWeights
    from quire.kernels.table import select_ops
    from quire.kernels.validation.recurrent_trials import of_one_tensor, settle_channel_delta

    bf16 = torch.bfloat16
    ops = settle_channel_delta(select_ops("cuda"), shape, bf16, device, strict=False)
    conv = torch.randn(shape.channels, 1, shape.conv_len, device=device, dtype=bf16)
    weights = DeltaWeights(
        conv,
        torch.randn(shape.num_heads, device=device),
        torch.randn(shape.keys, device=device),
        torch.ones(shape.value_dim, device=device, dtype=bf16),
        1e-6,
    )
    width = shape.channels + shape.num_heads + shape.keys + shape.values
    moved = 2 * shape.matrix_elements + shape.conv_len * shape.channels
    return _Layer(
        "Kimi delta net",
        of_one_tensor(ops.channel_delta_net),
        ops.plan_recurrent,
        weights,
        shape,
        width,
        shape.values,
        moved,
        _flops(shape, True),
    )


def _convolution(device: torch.device) -> _Layer:
    import torch

    from quire.kernels.recurrent_types import ConvShape, ConvWeights
    from quire.kernels.table import select_ops

    shape, ops = ConvShape(2048, 3), select_ops("cuda")
    weights = ConvWeights(torch.randn(shape.channels, 1, shape.conv_len, device=device, dtype=torch.bfloat16), None)
    width = 3 * shape.channels
    return _Layer(
        "short convolution",
        ops.short_conv,
        ops.plan_recurrent,
        weights,
        shape,
        width,
        shape.channels,
        shape.slot_elements,
    )


def _layer_cases(layer: _Layer, device: torch.device) -> Iterator[KernelCase]:
    import torch

    from quire.bench.kernels.suite import MIN_INPUT_BYTES, KernelCase

    slot, weights, shape = layer.shape.slot_elements, layer.weights, layer.shape
    per_token = 2 * (layer.num_inputs + layer.num_outputs)
    for num_rows in DECODE_ROWS:
        copies = max(1, min(MIN_INPUT_BYTES // (num_rows * 4 * slot), MAX_COPIES))  # more state than the L2 cache holds
        state = torch.zeros(copies * num_rows, slot, device=device)
        x = torch.randn(num_rows, layer.num_inputs, device=device, dtype=torch.bfloat16)
        positions = torch.arange(num_rows, device=device) + 9
        plans = [
            layer.plan(torch.randperm(num_rows, device=device) + i * num_rows, positions, [1] * num_rows)
            for i in range(copies)
        ]

        def decode(index: int, x: torch.Tensor = x, state: torch.Tensor = state, plans: list[Any] = plans) -> object:
            return layer.op(x, weights, shape, state, plans[index % len(plans)])

        num_bytes = num_rows * (4 * layer.step_elements + per_token)
        yield KernelCase(f"{layer.name}: step", f"{num_rows} rows", decode, num_bytes=num_bytes)
        del state
    for num_rows, tokens in SCANS:
        state = torch.zeros(num_rows, slot, device=device)
        x = torch.randn(num_rows * tokens, layer.num_inputs, device=device, dtype=torch.bfloat16)
        positions = torch.arange(tokens, device=device).repeat(num_rows)
        plan = layer.plan(torch.arange(num_rows, device=device), positions, [tokens] * num_rows)
        layer.op(x, weights, shape, state, plan)  # uploads the plan, which is not allowed during graph capture

        def scan(index: int, x: torch.Tensor = x, state: torch.Tensor = state, plan: object = plan) -> object:
            return layer.op(x, weights, shape, state, plan)

        num_bytes = num_rows * (tokens * per_token + 8 * slot)
        flops = layer.flops * num_rows * tokens
        yield KernelCase(f"{layer.name}: scan", f"{num_rows} × {tokens}", scan, num_bytes=num_bytes, flops=flops)


def _flops(shape: RecurrentShape, delta: bool) -> int:
    """Return the operations of one token in a chunked scan: scores and their products within the chunk, three (delta
    rule) or two products with the state, and for the delta rule the inverse with its two products."""
    from quire.kernels.triton.recurrent.scan import CHUNK

    key, value = shape.key_dim, shape.value_dim
    per_head = 2 * CHUNK * (key + value) + (6 if delta else 4) * key * value
    if delta:
        per_head += 2 * CHUNK * (2 * key + value) + 8 * CHUNK * CHUNK
    return per_head * shape.num_heads
