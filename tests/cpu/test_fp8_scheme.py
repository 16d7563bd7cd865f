"""FP8 weights of any size: what the matrix units want as a multiple is padded, and nobody notices.

With the kernels of `fp8_in_torch`, which keep all bits and refuse what CUDA's would refuse.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from quire.kernels.table import REFERENCE
from quire.kernels.validation.trials import failure
from quire.layers.build import Build
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.quant import Dense, Scheme
from quire.layers.residual_join import ResidualJoin
from quire.layers.weights import iter_weights, put_weight
from quire.models.loading.kernel_trials import Trials
from tests.cpu.families.fp8_in_torch import Fp8InTorch, Kernels


def make_block(scheme: Scheme, width: int, inner_width: int) -> GatedMLP:
    build = Build.plain(torch.float32, REFERENCE, scheme)
    norm = RMSNorm("norm", width, 1e-5, build)
    block = GatedMLP("mlp", norm, width, inner_width, bias=True, build=build, join=ResidualJoin())
    generator = torch.Generator().manual_seed(3)
    for module, name, weight in list(iter_weights(block)):
        put_weight(module, name, torch.randn(weight.shape, generator=generator))
    return block


def finish(block: nn.Module) -> None:
    for module in block.modules():
        if isinstance(module, Linear):
            module.finish()


@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize(("width", "inner_width"), [(64, 96), (50, 96), (64, 40), (50, 33), (8, 5)], ids=str)
def test_widths_need_not_be_multiples(width: int, inner_width: int, num_rows: int) -> None:
    plain, scaled = make_block(Dense(REFERENCE), width, inner_width), make_block(Fp8InTorch(), width, inner_width)
    finish(scaled)
    stream = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(num_rows))
    want: Tensor = plain(stream.clone())
    got: Tensor = scaled(stream.clone())
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize(("width", "inner_width"), [(64, 96), (64, 40), (50, 33)], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_their_products_are_tried_with_the_gate_that_is_used(width: int, inner_width: int, activation: str) -> None:
    block = GatedMLP("mlp", None, width, inner_width, bias=False,
                     build=Build.plain(torch.float32, REFERENCE, Fp8InTorch()), activation=activation)  # fmt: skip
    trials = Trials(nn.ModuleList([block]), torch.float32, torch.device("cpu"), 64)
    rows = list(trials._norms_and_products())
    assert [row.name for row in rows] == ["FP8 product", "FP8 product with its gate"]
    assert [failure(REFERENCE, row) for row in rows] == [None, None]
    skinny = Kernels.skinny_linear
    with patch.object(Kernels, "skinny_linear", lambda x, weight, *args, **how: skinny(x, weight, *args, **how) * 1.5):
        if inner_width != 33:  # what is padded does without that kernel
            assert all(isinstance(failure(REFERENCE, row), ArithmeticError) for row in rows)
