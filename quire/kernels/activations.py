"""Activation functions by name, in plain torch: the oracle for kernels that apply one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor
from torch.nn import functional

Curve = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


def _relu2(x: Tensor) -> Tensor:
    return functional.relu(x).square_()


CURVES: dict[Curve, Callable[[Tensor], Tensor]] = {  # each returns a new tensor, which callers may overwrite
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": _relu2,
}
