"""Native matrices against plain torch: packing loses nothing, and products equal those over decoded weights."""

from __future__ import annotations

import os
import random

import gguf
import pytest
import torch
from torch import Tensor

from quire.kernels.formats.gguf_blocks import FORMATS, dequantize
from quire.kernels.formats.random_blocks import random_blocks
from quire.kernels.native.library import BYTE_FORMS, FLOAT_FORMS, Native, unit_columns
from quire.kernels.native.library import FORMS as ALL_FORMS
from quire.kernels.native.matrix import PackedLinear, PackedMatrix, pack_blocks, pack_floats
from quire.kernels.reference import small_ops as reference

SEED = int(os.environ.get("TEST_SEED", "5"))
FORMS = tuple(form for form in ALL_FORMS if form not in BYTE_FORMS)  # `test_native_w8a8` has the others
BLOCKS = tuple(form for form in FORMS if form not in FLOAT_FORMS)
ENCODED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # what `gguf` writes


def make_matrix(native: Native, form: str, rows: int, columns: int) -> tuple[PackedMatrix, Tensor]:
    """A random matrix as `gguf` encodes it, or of random blocks, packed from its bytes, and what those stand for."""
    dense = torch.randn(rows, columns)
    if form in BLOCKS and form not in ENCODED:
        count = rows * columns // FORMATS[form].elements
        blocks = random_blocks(form, count, torch.default_generator, std=0.5)
        return pack_blocks(native, form, rows, columns, blocks), dequantize(blocks, form).view(rows, columns)
    if form in BLOCKS:
        encoded = torch.from_numpy(gguf.quants.quantize(dense.numpy(), gguf.GGMLQuantizationType[form])).reshape(-1)
        return pack_blocks(native, form, rows, columns, encoded), dequantize(encoded, form).view(rows, columns)
    packed = pack_floats(native, form, rows, columns, lambda first, count: dense[first : first + count])
    return packed, {"F16": dense.half(), "BF16": dense.bfloat16()}.get(form, dense).float()


def rounded(x: Tensor) -> Tensor:
    """Activations as the block products see them: 16 bits, a scale for every 32."""
    blocks = x.view(len(x), -1, 32)
    scale = (blocks.abs().amax(-1, keepdim=True) / (127 * 256)).clamp(min=1e-30)
    return ((blocks / scale).round() * scale).view(x.shape)


@pytest.mark.parametrize("form", FORMS)
def test_packing_keeps_every_value(native: Native, form: str) -> None:
    torch.manual_seed(1)
    times = unit_columns(form) // 32 if form in BLOCKS else 1
    for rows, columns in ((1, 32), (7, 64), (16, 96), (35, 32), (128 // times, 160)):
        columns *= times
        packed, dense = make_matrix(native, form, rows, columns)
        ids = torch.randint(rows, (2 * rows,))
        torch.testing.assert_close(packed.rows(ids), dense[ids], rtol=1e-6, atol=1e-7)


def test_packing_takes_rows_in_any_order(native: Native) -> None:
    _, dense = make_matrix(native, "Q4_1", 40, 64)
    encoded = torch.from_numpy(gguf.quants.quantize(dense.numpy(), gguf.GGMLQuantizationType.Q4_1)).reshape(-1)
    order = torch.randperm(40)
    packed = pack_blocks(native, "Q4_1", 40, 64, encoded, order)
    torch.testing.assert_close(packed.rows(torch.arange(40)), dequantize(encoded, "Q4_1").view(40, 64)[order])


@pytest.mark.parametrize("form", FORMS)
def test_products(native: Native, form: str) -> None:
    """Odd numbers of rows, columns and tokens; the rounding of activations is part of what is compared."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    torch.manual_seed(SEED)
    for num_tokens in (1, 2, 3, 4, 5, 7, 8, 9, 17, 40):
        unit = max(32, unit_columns(form))
        rows, columns = rng.randint(1, 90), unit * rng.randint(1, 9 if unit == 32 else 3)
        if form not in BLOCKS:
            columns -= rng.randint(0, 31)
        packed, dense = make_matrix(native, form, rows, columns)
        x = torch.randn(num_tokens, columns)
        want = (rounded(x) if form in BLOCKS else x).double() @ dense.double().T
        got = PackedLinear([packed])(x)
        assert all(torch.equal(PackedLinear([packed])(x[i : i + 1])[0], got[i]) for i in range(num_tokens))
        torch.testing.assert_close(got, want.float(), rtol=2e-4, atol=4e-4)
        torch.testing.assert_close(got, (x.double() @ dense.double().T).float(), rtol=1e-3, atol=2e-3)


def test_what_stands_around_a_product(native: Native) -> None:
    """Parts of different forms one below the other, bias, norm, SiLU-mul and residual, for one token and several."""
    torch.manual_seed(2)
    for num_tokens in (1, 6):
        parts = [make_matrix(native, form, rows, 96) for form, rows in (("Q4_1", 33), ("F32", 5), ("Q8_0", 16))]
        bias, norm, residual = torch.randn(54), torch.randn(96), torch.randn(num_tokens, 54)
        linear = PackedLinear([packed for packed, _ in parts], bias)
        x = torch.randn(num_tokens, 96)
        normed = reference.rms_norm(x, norm, 1e-5)
        got = linear(x, norm_weight=norm, eps=1e-5, residual=residual)
        torch.testing.assert_close(got, by_hand(parts, normed) + bias + residual, rtol=2e-4, atol=2e-4)
        gate_up = torch.randn(num_tokens, 192)
        got = linear(gate_up, silu_mul=True)
        torch.testing.assert_close(got, by_hand(parts, reference.gate_mul(gate_up)) + bias, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("form", BLOCKS)
def test_a_matrix_takes_no_more_than_its_file(native: Native, form: str) -> None:
    """Whole tiles within 3%: what was six bits for a scale may be eight."""
    packed, _ = make_matrix(native, form, 64, 512)
    bytes_of_file = 64 * 512 // FORMATS[form].elements * FORMATS[form].num_bytes
    assert len(packed.memory) - 64 <= 1.03 * bytes_of_file


@pytest.mark.parametrize("form", [form for form in BLOCKS if unit_columns(form) == 256])
def test_every_bit_of_a_block_counts(native: Native, form: str) -> None:
    """Fully random bytes but for the factors of scales: every value of sub-scales and their halves occurs."""
    rows, columns = 64, 512
    blocks = random_blocks(form, 128, torch.default_generator, std=1.0).view(128, -1)
    blocks[:, 4:16] = torch.randint(256, (128, 12), dtype=torch.uint8)
    packed = pack_blocks(native, form, rows, columns, blocks.view(-1))
    dense = dequantize(blocks.view(-1), form).view(rows, columns)
    torch.testing.assert_close(packed.rows(torch.arange(rows)), dense, rtol=1e-5, atol=1e-5)
    x = torch.randn(3, columns)
    want = (rounded(x).double() @ dense.double().T).float()
    torch.testing.assert_close(PackedLinear([packed])(x), want, rtol=2e-4, atol=2e-5 * dense.norm().item())


def by_hand(parts: list[tuple[PackedMatrix, Tensor]], x: Tensor) -> Tensor:
    columns = [(rounded(x) if packed.form in BLOCKS else x) @ dense.T for packed, dense in parts]
    return torch.cat(columns, dim=1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", FORMS)
def test_a_bad_activation_shows(native: Native, form: str, value: float) -> None:
    """What is not finite must reach the logits of its own row, and of no other."""
    packed, _ = make_matrix(native, form, 20, 256)
    x = torch.randn(3, 256)
    x[1, 40] = value
    got = PackedLinear([packed])(x)
    assert not got[1].isfinite().any() and got[0].isfinite().all() and got[2].isfinite().all()


def test_extreme_activations(native: Native) -> None:
    """Zeros, the smallest and large numbers: no NaN out of nothing."""
    for form in FORMS:
        packed, _ = make_matrix(native, form, 20, 256)
        x = torch.stack([torch.zeros(256), torch.full((256,), 1e-38), torch.full((256,), 1e30), -torch.ones(256)])
        got = PackedLinear([packed])(x)
        assert got.isfinite().all(), form


@pytest.mark.parametrize(("form", "bound"), [("Q8_0", 0.006), ("Q4_0", 0.11), ("F16", 0.0005), ("F32", 0.0)])
def test_rounding_floats_to_a_form(native: Native, form: str, bound: float) -> None:
    """At most so much of a matrix's own size is lost when it is quantized at load, and no more than `gguf` loses."""
    torch.manual_seed(3)
    dense = torch.randn(70, 256)
    packed = pack_floats(native, form, 70, 256, lambda first, count: dense[first : first + count])
    lost = (packed.rows(torch.arange(70)) - dense).norm() / dense.norm()
    assert lost <= bound
    if form in BLOCKS:
        kind = gguf.GGMLQuantizationType[form]
        theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(dense.numpy(), kind), kind))
        assert lost <= (theirs - dense).norm() / dense.norm() * 1.001
