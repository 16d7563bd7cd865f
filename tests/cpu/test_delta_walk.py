"""Which catch-ups of delta nets and of Mamba2 are for Hopper's own kernels, and who does the others. No GPU is
needed to decide that."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.recurrent_types import MambaWeights, RecurrentShape

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
SHAPE = RecurrentShape(2, 4, 128, 128, 4)
WIDTH = SHAPE.channels + SHAPE.values + 2 * SHAPE.num_heads
WHOLE = torch.zeros(3 * (WIDTH + 8) + 8, dtype=torch.bfloat16)
STATE = torch.zeros(2, SHAPE.slot_elements)


def projected(pad: int, offset: int = 0) -> Tensor:
    """Three tokens, with columns that nobody reads behind each."""
    return WHOLE[offset:].as_strided((3, WIDTH), (WIDTH + pad, 1))


@pytest.mark.parametrize(("change", "fits"), [
    ({}, True), ({"num_heads": 12, "num_groups": 4}, True), ({"num_groups": 4}, True), ({"conv_len": 2}, True),
    ({"conv_len": 5}, False), ({"conv_len": 1}, False), ({"key_dim": 64}, False), ({"value_dim": 64}, False),
    ({"num_heads": 6}, False), ({"beta_top": 2.0}, False),
])  # fmt: skip
def test_shapes(change: dict[str, Any], fits: bool) -> None:
    from quire.kernels.triton.recurrent.scan import fits_delta_walk

    shape = replace(SHAPE, **change)
    assert fits_delta_walk(shape, torch.bfloat16) is fits_delta_walk(shape, torch.float16) is fits
    assert not fits_delta_walk(shape, torch.float32)


CASES = [
    (projected(0), SHAPE, STATE, True),
    (projected(8), SHAPE, STATE, True),
    (projected(8, offset=8), SHAPE, STATE, True),
    (projected(4), SHAPE, STATE, False),  # rows that do not begin at 16 bytes
    (projected(8, offset=4), SHAPE, STATE, False),  # none of them does
    (projected(0).t().contiguous().t(), SHAPE, STATE, False),
    (projected(0).float(), SHAPE, STATE, False),
    (projected(0), replace(SHAPE, conv_len=5), STATE, False),
    (projected(0), replace(SHAPE, beta_top=2.0), STATE, False),
    (projected(0), SHAPE, torch.zeros(SHAPE.slot_elements, 2).t(), False),
]


@pytest.mark.parametrize(("x", "shape", "state", "supported"), CASES, ids=range(len(CASES)))
def test_what_does_not_fit_goes_to_the_kernels_for_all_cards(x: Tensor, shape: RecurrentShape, state: Tensor,
                                                            supported: bool, monkeypatch: pytest.MonkeyPatch
                                                            ) -> None:  # fmt: skip
    from quire.kernels.triton.recurrent import recurrent
    from quire.kernels.triton.recurrent.hopper import gated_delta as recurrent_walk

    assert x.data_ptr() % 16 == 0 or not supported
    called: list[Any] = []
    monkeypatch.setattr(recurrent, "run_delta_net", lambda *args: called.append(args[-1]))
    recurrent_walk.gated_delta_net(x, None, shape, state, None)  # type: ignore[arg-type]
    assert called == [recurrent_walk.scan if supported else recurrent._scan_and_norm]
    assert recurrent_walk.supports(x, shape, state) is supported


# ---------------------------------------------------------------------------------------------------------------------
# Kimi delta nets

CHANNELS = RecurrentShape(8, 8, 128, 128, 4)
INPUTS = (CHANNELS.channels + CHANNELS.num_heads, CHANNELS.keys, CHANNELS.values)  # x, decays, gate
CHANNEL_STATE = torch.zeros(2, CHANNELS.slot_elements)


def apart(pad: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Three tokens, with columns that nobody reads behind those of x."""
    sizes = (INPUTS[0] + pad, *INPUTS[1:])
    return [torch.zeros(3, size, dtype=dtype)[:, :width] for size, width in zip(sizes, INPUTS, strict=True)]


@pytest.mark.parametrize(("inputs", "shape", "state", "supported"), [
    (apart(), CHANNELS, CHANNEL_STATE, True),
    (apart(8), CHANNELS, CHANNEL_STATE, True),
    (apart(dtype=torch.float16), replace(CHANNELS, beta_top=2.0, conv_len=2), CHANNEL_STATE, True),
    (apart(4), CHANNELS, CHANNEL_STATE, False),  # rows that do not begin at 16 bytes
    ([*apart()[:2], torch.zeros(3, INPUTS[2] + 1, dtype=torch.bfloat16)[:, 1:]], CHANNELS, CHANNEL_STATE, False),
    ([apart()[0], apart()[1].t().contiguous().t(), apart()[2]], CHANNELS, CHANNEL_STATE, False),
    ([apart()[0], apart()[1].half(), apart()[2]], CHANNELS, CHANNEL_STATE, False),
    ([*apart()[:2], apart()[2].half()], CHANNELS, CHANNEL_STATE, False),
    (apart(), replace(CHANNELS, num_groups=4, num_heads=4), CHANNEL_STATE, False),
    (apart(dtype=torch.float32), CHANNELS, CHANNEL_STATE, False),
    (apart(), replace(CHANNELS, conv_len=5), CHANNEL_STATE, False),
    (apart(), CHANNELS, torch.zeros(CHANNELS.slot_elements, 2).t(), False),
], ids=range(12))  # fmt: skip
def test_what_of_channels_does_not_fit_goes_to_the_kernels_for_all_cards(
    inputs: list[Tensor], shape: RecurrentShape, state: Tensor, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.kernels.triton.recurrent import channel_delta as recurrent_channel
    from quire.kernels.triton.recurrent.hopper import channel_delta as channel_walk

    called: list[Any] = []
    monkeypatch.setattr(recurrent_channel, "run_channel_delta", lambda *args: called.append(args[-1]))
    channel_walk.channel_delta_net(*inputs, None, shape, state, None)  # type: ignore[call-arg, arg-type]
    assert called == [channel_walk.scan if supported else recurrent_channel.scan]


# ---------------------------------------------------------------------------------------------------------------------
# Mamba2

MAMBA = RecurrentShape(2, 8, 128, 64, 4)
MAMBA_WIDTH = MAMBA.channels + MAMBA.values + MAMBA.num_heads
MAMBA_WHOLE = torch.zeros(3 * (MAMBA_WIDTH + 8) + 8, dtype=torch.bfloat16)
MAMBA_STATE = torch.zeros(2, MAMBA.slot_elements)


def mamba_weights(dtype: torch.dtype, **changes: Any) -> MambaWeights:
    conv, heads = torch.zeros(MAMBA.channels, 1, 4, dtype=dtype), torch.zeros(MAMBA.num_heads)
    weights = MambaWeights(conv, None, heads, heads, heads, torch.ones(MAMBA.values), 1e-5, 2, 0.0, 1.0)
    return replace(weights, **changes)


@pytest.mark.parametrize(("change", "fits"), [
    ({}, True), ({"num_heads": 24, "num_groups": 1}, True), ({"conv_len": 2}, True), ({"conv_len": 5}, False),
    ({"conv_len": 1}, False), ({"key_dim": 256}, False), ({"value_dim": 128}, False), ({"num_heads": 12}, False),
])  # fmt: skip
def test_mamba_shapes(change: dict[str, Any], fits: bool) -> None:
    from quire.kernels.triton.recurrent.scan import fits_mamba_walk

    shape = replace(MAMBA, **change)
    assert fits_mamba_walk(shape, torch.bfloat16) is fits_mamba_walk(shape, torch.float16) is fits
    assert not fits_mamba_walk(shape, torch.float32)


@pytest.mark.parametrize(("pad", "offset", "dtype", "supported"), [
    (0, 0, torch.bfloat16, True), (8, 0, torch.bfloat16, True), (8, 8, torch.bfloat16, True),
    (0, 0, torch.float16, True), (4, 0, torch.bfloat16, False), (8, 4, torch.bfloat16, False),
    (0, 0, torch.float32, False),
])  # fmt: skip
@pytest.mark.parametrize("change", [{}, {"norm": None}, {"gate_first": False}], ids=str)
def test_what_of_mamba_does_not_fit_goes_to_the_kernels_for_all_cards(
    pad: int, offset: int, dtype: torch.dtype, supported: bool, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the output is gated follows from who makes it, and never comes before a norm that is to be first; nor, in
    float16, before one at all: it may be beyond its range."""
    from quire.kernels.triton.recurrent import recurrent
    from quire.kernels.triton.recurrent import scan as recurrent_scan
    from quire.kernels.triton.recurrent.hopper import mamba as mamba_walk

    x = MAMBA_WHOLE[offset:].as_strided((3, MAMBA_WIDTH), (MAMBA_WIDTH + pad, 1)).to(dtype)
    weights = mamba_weights(torch.bfloat16 if dtype == torch.float32 else dtype, **change)
    called: list[Any] = []
    monkeypatch.setattr(recurrent, "run_mamba", lambda *args, gated: called.append((args[-1], gated)))
    mamba_walk.mamba2(x, weights, MAMBA, MAMBA_STATE, None)  # type: ignore[arg-type]
    early = weights.norm is None or (weights.gate_first and dtype == torch.bfloat16)
    expected = (mamba_walk.scan, early) if supported else (recurrent_scan.mamba_scan, weights.norm is None)
    assert called == [expected]
