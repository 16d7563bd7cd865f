"""Matrices with an odd number of rows have zeros behind them on a GPU: products with those, of the rows that count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from quire.kernels.table import REFERENCE
from quire.layers import weights
from quire.layers.build import Build
from quire.layers.linear import Linear
from quire.layers.weights import PADDED_FROM_ROWS, empty_padded_matrix, put_weight, with_zero_rows

CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Cuda:
    """A device that says it is one, on a machine that has none."""

    type: str = "cuda"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    def zeros(*size: int, dtype: torch.dtype, device: object) -> torch.Tensor:
        return torch.full(size, 0.0, dtype=dtype)

    monkeypatch.setattr(weights.torch, "zeros", zeros)
    return lambda rows: empty_padded_matrix((rows, 16), torch.float32, _Cuda())  # type: ignore[arg-type]


def test_only_large_odd_matrices_on_a_gpu_have_some(made: Any) -> None:
    assert with_zero_rows(empty_padded_matrix((PADDED_FROM_ROWS + 1, 16), torch.float32, CPU)) is None
    whole = with_zero_rows(made(PADDED_FROM_ROWS + 1))
    assert whole is not None and whole.shape == (PADDED_FROM_ROWS + 8, 16)
    assert not whole[PADDED_FROM_ROWS + 1 :].any()


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_of_the_rows_that_count(bias: bool, made: Any) -> None:
    rows = PADDED_FROM_ROWS + 3
    linear = Linear(16, [("head", rows)], bias=bias, build=Build.plain(torch.float32, REFERENCE))
    generator = torch.Generator().manual_seed(4)
    put_weight(linear, "weight", made(rows).normal_(generator=generator))
    if bias:
        put_weight(linear, "bias", torch.empty(rows).normal_(generator=generator))
    linear.finish()
    assert linear.whole is not None and linear.whole.data_ptr() == linear.weight.data_ptr()
    x = torch.empty(5, 16).normal_(generator=generator)
    want = torch.nn.functional.linear(x, linear.weight, linear.bias)
    got = linear(x)
    assert got.is_contiguous()
    torch.testing.assert_close(got, want)
