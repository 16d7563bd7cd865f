"""Floats quantized to GGUF's block types, against the `gguf` package's own decoder and encoder."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as reference_decode
from gguf.quants import quantize as reference_encode

from quire.kernels.formats.gguf_blocks import FORMATS, dequantize
from quire.kernels.formats.gguf_encode import ENCODERS, quantize

# Root of the weighted mean square error over that of the values, for normal values.
MOST = {
    "F32": 0.0,
    "F16": 3e-4,
    "BF16": 2e-3,
    "Q8_0": 6e-3,
    "Q6_K": 0.0178,
    "Q5_K": 0.0355,
    "Q5_0": 0.0415,
    "Q4_K": 0.0715,
    "Q4_0": 0.085,
    "Q4_1": 0.073,
    "IQ4_NL": 0.076,
    "IQ4_XS": 0.077,
}


def draw(rows: int = 24, columns: int = 512, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


@pytest.mark.parametrize("kind", ENCODERS)
def test_blocks_hold_the_values(kind: str) -> None:
    rows = draw()
    blocks = quantize(rows, kind)
    assert len(blocks) == rows.numel() // FORMATS[kind].elements * FORMATS[kind].num_bytes
    decoded = dequantize(blocks, kind).view_as(rows)
    own = gguf.GGMLQuantizationType[kind]
    raw = blocks.numpy().view(np.float32 if kind == "F32" else np.float16 if kind == "F16" else np.uint8)
    theirs = torch.from_numpy(np.ascontiguousarray(reference_decode(raw.reshape(len(rows), -1), own)))
    torch.testing.assert_close(decoded, theirs.float().view_as(rows), rtol=1e-6, atol=1e-9)
    error = (decoded - rows).square().mean().sqrt() / rows.square().mean().sqrt()
    assert error <= MOST[kind], float(error)


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_0", "Q4_1"])
def test_the_error_is_no_larger_than_the_usual_encoders(kind: str) -> None:
    rows, own = draw(seed=2), gguf.GGMLQuantizationType[kind]
    usual = torch.from_numpy(reference_decode(reference_encode(rows.numpy(), own), own))
    ours = dequantize(quantize(rows, kind), kind).view_as(rows)
    assert (ours - rows).square().mean() <= 1.0001 * (usual - rows).square().mean()


@pytest.mark.parametrize("kind", sorted(set(ENCODERS) - {"F32", "F16", "BF16", "Q8_0"}))
def test_importance_moves_the_error_to_where_it_costs_less(kind: str) -> None:
    rows = draw(seed=3)
    importance = torch.rand(512, generator=torch.Generator().manual_seed(4)) ** 4

    def weighted(blocks: torch.Tensor) -> float:
        return float((importance * (dequantize(blocks, kind).view_as(rows) - rows).square()).mean())

    assert weighted(quantize(rows, kind, importance)) < 0.95 * weighted(quantize(rows, kind))


@pytest.mark.parametrize("kind", ENCODERS)
def test_zeros_and_single_values_survive(kind: str) -> None:
    rows = torch.zeros(3, 256)
    rows[1, 17], rows[2] = -3.0, 1.0
    decoded = dequantize(quantize(rows, kind), kind).view_as(rows)
    assert torch.equal(decoded[0], rows[0])
    assert torch.isfinite(decoded).all() and abs(float(decoded[1, 17]) + 3) < 0.15
    torch.testing.assert_close(decoded[2], rows[2], rtol=0.02, atol=0)
    assert torch.equal(quantize(rows, kind, torch.zeros(256)), quantize(rows, kind)), "no column matters: all do alike"
