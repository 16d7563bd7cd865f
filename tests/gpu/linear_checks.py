"""Products of few rows and quantized weights against their reference in float64; run as `kernel_checks` are."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch.nn import functional

from quire.kernels.activations import CURVES
from quire.kernels.reference import small_ops as reference
from tests.gpu.where import NotHere, Where, close, need_hopper


def check_skinny(where: Where) -> None:
    from quire.kernels.triton.linear.skinny import skinny_linear

    small = [(64, 48), (72, 33)]
    # Whole rows of a weight at once, and in a loop; blocks of every size that is chosen.
    large = [(1024, 4096), (512, 6144), (3072, 512), (4096, 768), (576, 960), (2560, 1280), (2048, 2048), (2048, 512),
             (8192, 1024), (10240, 2048)]  # fmt: skip
    for dtype in where.dtypes:
        for in_features, out_features in large if where.large else small:
            weight = where.normal(2 * out_features, in_features, dtype=dtype)
            light = weight / 8  # no square is beyond float16
            bias = where.normal(2 * out_features, dtype=dtype)
            norm_weight = where.normal(in_features, dtype=dtype)
            where.settle()
            for rows in (1, 2, 8, 16, 17, 32) if where.large else (1, 3, 18):
                x = where.normal(rows, in_features, dtype=dtype)
                where.poison()
                name = f"skinny_linear {rows} x {in_features} x {out_features}"
                close(skinny_linear(x, weight), x.double() @ weight.double().T, dtype, name)
                residual = where.normal(rows, 2 * out_features, dtype=dtype)
                normed = reference.rms_norm(x.double(), norm_weight.double(), 1e-6)
                plain = normed @ weight.double().T + bias.double()
                out = skinny_linear(x, weight, bias, norm_weight=norm_weight, eps=1e-6, residual=residual)
                close(out, plain + residual.double(), dtype, name + " with norm, bias and residual")
                plain = normed @ light.double().T + bias.double()
                for curve in CURVES if rows == 1 else ("silu", "gelu_tanh") if where.large else ("silu",):
                    out = skinny_linear(x, light, bias, norm_weight=norm_weight, eps=1e-6, gate=curve)
                    close(out, reference.gate_mul(plain, curve), dtype, f"{name} with norm, bias and {curve}")


def check_four_bits(where: Where) -> None:
    """Groups of several sizes, with and without least values, and sizes that fill no tile."""
    from quire.kernels.four_bits import FourBits
    from quire.kernels.triton.linear.four_bits import four_bit_linear

    sizes = [(4096, 4096, 128), (2048, 11008, 32)] if where.large else []
    for dtype in where.dtypes:
        for in_features, out_features, group in [(64, 80, 32), (96, 33, 32), (256, 64, 128), *sizes]:
            shape = (out_features, in_features // group)
            numbers = torch.randint(0, 256, (out_features, in_features // 2), device=where.device, dtype=torch.uint8)
            scales = where.normal(*shape, dtype=torch.float16) / 16
            for least in (None, where.normal(*shape, dtype=torch.float16) / 4):
                weight, bias = FourBits(numbers, scales, least), where.normal(out_features, dtype=dtype)
                where.settle()
                for rows in (1, 16, 17, 130) if where.large else (1, 18):
                    x = where.normal(rows, in_features, dtype=dtype)
                    where.poison()
                    plain = x.double() @ weight.decode().double().T + bias.double()
                    name = f"four bits {rows} x {in_features} x {out_features}, groups of {group}"
                    close(four_bit_linear(x, weight, bias), plain, dtype, name)


def check_gated(where: Where) -> None:
    """Rows and weights of random sizes, less and more than fill the card once, and rows with something in between."""
    need_hopper(where)
    from quire.kernels.triton.linear.gated_hopper import gated_linear

    rng = where.random
    sizes = [(1, 320, 128), (128, 320, 128), (1024, 4096, 12288)]
    sizes += [(rng.randint(1, 3000), 64 * rng.randint(5, 40), 128 * rng.randint(1, 40)) for _ in range(12)]
    for dtype in (dtype for dtype in where.dtypes if dtype != torch.float32):
        for num_rows, in_features, width in sizes:
            padding = rng.choice([0, 8, 64, 3])  # 3: rows the copy engine can't fetch where they lie
            x = where.normal(num_rows, in_features + padding, dtype=dtype)[:, :in_features]
            weight = (where.normal(2 * width, in_features) * in_features**-0.5).to(dtype)
            curve = rng.choice(["silu", "gelu_tanh"])
            plain = reference.gate_mul(x.double() @ weight.double().T, curve)
            torch.full(
                (num_rows, width), torch.nan, dtype=dtype, device=where.device
            )  # freed: the memory of the result
            name = f"gated_linear {curve} {num_rows} x {in_features} x {width}, {padding} between"
            close(gated_linear(x, weight, curve), plain, dtype, name)


def check_gated_row(where: Where) -> None:
    """As the table has it: with norm, bias and residual, one after the other, and the same again bit by bit."""
    need_hopper(where)
    from quire.kernels.triton.linear import norm
    from quire.kernels.triton.linear.gated_hopper import GatedLinear

    for dtype in (dtype for dtype in where.dtypes if dtype != torch.float32):
        weight = (where.normal(2 * 1536, 1024) / 32).to(dtype)
        x, residual, bias = (where.normal(*size, dtype=dtype) for size in ((1500, 1024), (1500, 1536), (2 * 1536,)))
        norm_weight = where.normal(1024, dtype=dtype)
        where.settle()
        row = GatedLinear((2 * 1536, 1024), "silu", norm.rms_norm, norm.gate_mul)
        assert row.wins(len(x), weight, "silu") and not row.wins(len(x), weight, "gelu_tanh")
        product = reference.rms_norm(x.double(), norm_weight.double(), 1e-6) @ weight.double().T
        where.poison()
        out = row.run(x, weight, None, norm_weight, 1e-6, "silu", None)
        close(out, reference.gate_mul(product), dtype, "gated row with norm")
        for _ in range(20):
            assert torch.equal(out, row.run(x, weight, None, norm_weight, 1e-6, "silu", None))
        out = row.run(x, weight, None, norm_weight, 1e-6, "silu", residual)
        close(out, reference.gate_mul(product) + residual.double(), dtype, "gated row with norm and residual")
        out = row.run(x, weight, bias, norm_weight, 1e-6, "silu", None)
        close(out, reference.gate_mul(product + bias.double()), dtype, "gated row with norm and bias")


def check_skinny_fp8(where: Where) -> None:
    from quire.kernels.triton.linear.skinny import skinny_linear

    large = [(1024, 4096), (4096, 1024), (12288, 1024), (5120, 2048)]
    for in_features, out_features in large if where.large else [(64, 48)]:
        weight = where.normal(out_features, in_features) * in_features**-0.5
        scale = weight.abs().amax(1) / 448
        stored = (weight / scale[:, None]).to(torch.float8_e4m3fn)
        norm_weight = where.normal(in_features, dtype=where.dtypes[-1])
        where.settle()
        for rows in (1, 4):
            x = where.normal(rows, in_features, dtype=where.dtypes[-1])
            wide = stored.double() * scale.double()[:, None]
            close(
                skinny_linear(x, stored, weight_scale=scale), x.double() @ wide.T, where.dtypes[-1], "skinny_linear fp8"
            )
            out = skinny_linear(x, stored, weight_scale=scale, norm_weight=norm_weight, eps=1e-6, gate="gelu_tanh")
            plain = reference.rms_norm(x.double(), norm_weight.double(), 1e-6) @ wide.T
            close(out, reference.gate_mul(plain, "gelu_tanh"), where.dtypes[-1], "skinny_linear fp8 with norm and gate")


def check_fp8_linear(where: Where) -> None:
    from quire.kernels.triton.linear.fp8 import fp8_linear, quantize_rows

    for in_features, out_features in [(1024, 4096), (4096, 1024)] if where.large else [(64, 48)]:
        weight = where.normal(out_features, in_features, dtype=where.dtypes[-1])
        stored, scale = quantize_rows(weight)
        close(stored.float() * scale[:, None], weight, torch.float8_e4m3fn, "quantize_rows")
        where.settle()
        for rows in (1, 16, 17, 300) if where.large else (1, 3):  # beyond 16, torch's product, which needs a GPU
            x = where.normal(rows, in_features, dtype=where.dtypes[-1])
            expected = x.double() @ weight.double().T
            close(fp8_linear(x, stored, scale), expected, torch.float8_e4m3fn, f"fp8_linear {rows} rows", 0.1)


def check_fp8_quantize(where: Where) -> None:
    """With the norm before it and with a gate before it; widths are filled up with zeros."""
    from quire.kernels.triton.linear.fp8 import MULTIPLE, quantize_rows

    for rows, width in [(300, 4096), (3, 1000), (2, 5)] if where.large else [(3, 40), (2, 32)]:
        x = where.normal(rows, 2 * width, dtype=where.dtypes[-1])
        weight = where.normal(2 * width, dtype=where.dtypes[-1])
        for options, expected in (
            ({"norm_weight": weight, "eps": 1e-6}, reference.rms_norm(x.double(), weight.double(), 1e-6)),
            ({"gate": "silu"}, reference.gate_mul(x.double())),
            ({"gate": "gelu_tanh"}, reference.gate_mul(x.double(), "gelu_tanh")),
        ):
            where.poison()
            stored, scale = quantize_rows(x, **options)
            expected = functional.pad(expected, (0, -expected.shape[1] % MULTIPLE))
            assert stored.shape == expected.shape
            close(stored.float() * scale[:, None], expected, torch.float8_e4m3fn, f"quantize_rows {options.keys()}")


def check_fp8_scheme(where: Where) -> None:
    """Layers of sizes that the matrix units do not take, by one row and by several."""
    from quire.kernels.table import REFERENCE
    from quire.layers.build import Build
    from quire.layers.linear import Linear
    from quire.layers.quant import Fp8
    from quire.layers.weights import own_weights, put_weight

    if not where.large:
        raise NotHere("torch's scaled product needs a GPU")
    for dtype, (in_features, out_features) in itertools.product(
        where.dtypes, [(1024, 512), (1000, 512), (1024, 498), (100, 37), (5, 3)]
    ):
        build = Build.plain(dtype, REFERENCE, Fp8(REFERENCE))
        linear = Linear(in_features, [("matrix", out_features)], bias=True, build=build)
        for name, weight in own_weights(linear):
            put_weight(linear, name, where.normal(*weight.shape, dtype=dtype))
        assert linear.bias is not None
        matrix, bias = linear.weight.double(), linear.bias.double()
        linear.finish()
        where.settle()
        for rows in (1, 2, 70):
            x = where.normal(rows, in_features, dtype=dtype)
            where.poison()
            expected = x.double() @ matrix.T + bias
            close(linear(x), expected, torch.float8_e4m3fn, f"FP8 {rows} x {in_features} x {out_features}", 0.1)


def check_dequantize_pages(where: Where) -> None:
    shapes = [(200, (16, 8, 128)), (50, (64, 8, 128))] if where.large else [(5, (8, 2, 32)), (5, (64, 3, 96))]
    for num_pages, shape in shapes:
        _check_pages(where, num_pages, shape)


def _check_pages(where: Where, num_pages: int, shape: tuple[int, int, int]) -> None:
    from quire.kernels.triton.linear.fp8 import dequantize_pages

    caches = [where.normal(num_pages, *shape, dtype=torch.float32).to(torch.float8_e4m3fn) for _ in range(2)]
    table = torch.randperm(num_pages, device=where.device).int().view(5, -1)
    rows, columns = (torch.arange(num_pages, device=where.device).int() % 5 for _ in range(2))
    columns = columns % table.shape[1]
    outs = [
        torch.full((num_pages, *shape), float("nan"), dtype=where.dtypes[-1], device=where.device) for _ in range(2)
    ]
    dequantize_pages(*caches, table, rows, columns, *outs, 0.5, 2.0)
    pages = table[rows.long(), columns.long()].long()
    for cache, out, scale in zip(caches, outs, (0.5, 2.0), strict=True):
        assert torch.equal(out.float(), cache.float()[pages] * scale)


CHECKS: dict[str, Callable[[Where], None]] = {
    "skinny": check_skinny,
    "four_bits": check_four_bits,
    "gated": check_gated,
    "gated_row": check_gated_row,
    "skinny_fp8": check_skinny_fp8,
    "fp8_linear": check_fp8_linear,
    "fp8_quantize": check_fp8_quantize,
    "fp8_scheme": check_fp8_scheme,
    "dequantize_pages": check_dequantize_pages,
}
