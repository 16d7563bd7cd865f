"""Every GGUF format against the `gguf` package, on random bytes and on quantized numbers."""

from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest
import torch

from quire.kernels.formats.gguf_blocks import FORMATS, dequantize
from quire.types import QuireError


def random_blocks(type_name: str, num_blocks: int, seed: int) -> np.ndarray:
    """Random bytes, except that scales must be finite: any float16 or float32 field gets no all-ones exponent."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (num_blocks, FORMATS[type_name].num_bytes), dtype=np.uint8)
    # Clearing the second-highest bit of every byte would touch values too; small scale bytes at known places do not.
    for place in SCALE_PLACES[type_name]:
        data[:, place + 1] &= 0xBF  # the exponent's top bit: keeps the number below 2 in float16, finite in all
    return data


SCALE_PLACES = {
    "F32": (2,), "F16": (0,), "BF16": (0,), "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2),
    "MXFP4": (-1,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_S": (0,), "IQ1_M": (54,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


@pytest.mark.parametrize("type_name", sorted(FORMATS))
def test_random_bytes_decode_as_the_gguf_package_does(type_name: str) -> None:
    data = random_blocks(type_name, num_blocks=512, seed=7)
    want = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type_name]).reshape(-1)
    got = dequantize(torch.from_numpy(data).view(-1), type_name).numpy()
    assert got.dtype == np.float32
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_numbers_come_back_close(type_name: str) -> None:
    values = np.random.default_rng(3).standard_normal((16, 64)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_name])
    got = dequantize(torch.from_numpy(data).view(-1), type_name).view(16, 64).numpy()
    assert np.abs(got - values).max() < (0.02 if type_name == "Q8_0" else 0.4)


def test_block_sizes_are_the_packages() -> None:
    for name, form in FORMATS.items():
        assert (form.elements, form.num_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


def some_mxfp4() -> np.ndarray:
    """Random numbers under scales as models have them, and a block of zeros, whose scale packers leave at nothing."""
    data = random_blocks("MXFP4", num_blocks=256, seed=5)
    data[:, 0] = np.random.default_rng(6).integers(110, 130, 256)
    data[7] = 0
    return data


def test_mxfp4_is_exact() -> None:
    data = some_mxfp4()
    want = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.MXFP4).reshape(-1)
    assert np.array_equal(dequantize(torch.from_numpy(data).view(-1), "MXFP4").numpy(), want)


def test_grids_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    with pytest.raises(QuireError, match="IQ2_XS are decoded by the package gguf, which is not installed"):
        dequantize(torch.zeros(74, dtype=torch.uint8), "IQ2_XS")
