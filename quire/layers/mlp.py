"""Feed-forward blocks of dense models: gated, stream + down(act(gate(norm(stream))) * up(norm(stream))), and plain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.layers.join import Join
from quire.layers.linear import Linear
from quire.layers.norm import Norm, fuse_norm
from quire.layers.quant.scheme import Scheme
from quire.types import QuireError


def _relu2(x: Tensor) -> Tensor:
    return functional.relu(x).square_()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": _relu2,
}


def check_activation(name: str) -> str:
    if name not in ACTIVATIONS:
        what = f"Activation {name!r} is not supported."
        raise QuireError("unsupported_model", what, f"Supported are {', '.join(ACTIVATIONS)}.")
    return name


@dataclass(frozen=True, slots=True)
class MLPNames:
    """What a checkpoint calls a block's projections. `up`: gate and up, both in one, or, without a gate, up alone."""

    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


class GatedMLP(nn.Module):
    def __init__(self, prefix: str, norm: Norm | None, width: int, inner_width: int, *, bias: bool,
                 dtype: torch.dtype, scheme: Scheme, activation: str = "silu", names: MLPNames | None = None,
                 join: Join | None = None):  # fmt: skip
        super().__init__()
        names = names or MLPNames()
        rows = 2 * inner_width // len(names.up)
        self.norm = norm
        self.gate_up = Linear(width, [(f"{prefix}.{name}", rows) for name in names.up], bias=bias, dtype=dtype,
                              scheme=scheme)  # fmt: skip
        self.down = Linear(inner_width, [(f"{prefix}.{names.down}", width)], bias=bias, dtype=dtype, scheme=scheme)
        self.activate = None if activation in ("silu", "swish") else ACTIVATIONS[activation]
        self.join = join or Join()

    def forward(self, stream: Tensor, onto: Tensor | None = None) -> Tensor:
        """stream [tokens, width] -> the stream, or `onto`, with this block's share added"""
        x, norm = fuse_norm(self.norm, stream)
        if self.activate is None:
            x = self.gate_up(x, norm=norm, silu_mul=True)
        else:
            gate, up = self.gate_up(x, norm=norm).chunk(2, dim=-1)
            x = self.activate(gate) * up
        return self.join(self.down, x, stream if onto is None else onto)


class PlainMLP(nn.Module):
    """Without a gate: stream + down(act(up(norm(stream))))."""

    def __init__(self, prefix: str, norm: Norm | None, width: int, inner_width: int, *, bias: bool,
                 dtype: torch.dtype, scheme: Scheme, activation: str, names: MLPNames,
                 join: Join | None = None):  # fmt: skip
        super().__init__()
        self.norm = norm
        self.up = Linear(width, [(f"{prefix}.{names.up[0]}", inner_width)], bias=bias, dtype=dtype, scheme=scheme)
        self.down = Linear(inner_width, [(f"{prefix}.{names.down}", width)], bias=bias, dtype=dtype, scheme=scheme)
        self.activate = ACTIVATIONS[activation]
        self.join = join or Join()

    def forward(self, stream: Tensor, onto: Tensor | None = None) -> Tensor:
        """As `GatedMLP.forward`."""
        x, norm = fuse_norm(self.norm, stream)
        return self.join(self.down, self.activate(self.up(x, norm=norm)), stream if onto is None else onto)
