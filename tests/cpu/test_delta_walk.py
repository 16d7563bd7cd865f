"""Which catch-ups of gated delta nets are for Hopper's own kernels, and who does the others. No GPU is needed to decide
that."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.recurrent import RecurrentShape

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
    from quire.kernels.triton.recurrent_scan import fits_walk

    shape = replace(SHAPE, **change)
    assert fits_walk(shape, torch.bfloat16) is fits_walk(shape, torch.float16) is fits
    assert not fits_walk(shape, torch.float32)


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
    from quire.kernels.triton import recurrent, recurrent_walk

    assert x.data_ptr() % 16 == 0 or not supported
    called: list[Any] = []
    monkeypatch.setattr(recurrent, "run_delta_net", lambda *args: called.append(args[-1]))
    recurrent_walk.gated_delta_net(x, None, shape, state, None)  # type: ignore[arg-type]
    assert called == [recurrent_walk.scan if supported else recurrent._scan_and_norm]
    assert recurrent_walk.supports(x, shape, state) is supported
