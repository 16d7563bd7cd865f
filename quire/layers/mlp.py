"""Feed-forward blocks of dense models: with gate/up projections (`GatedMLP`) and without a gate (`PlainMLP`)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from quire.kernels.activations import CURVES, Curve
from quire.layers.build import Build
from quire.layers.linear import Linear
from quire.layers.norm import Norm, fuse_norm
from quire.layers.residual_join import ResidualJoin
from quire.types import QuireError

ACTIVATIONS: dict[str, Curve] = {  # keys: names in config.json
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def check_activation(name: str) -> str:
    """Returns the name of a supported activation; raises `unsupported_model` for any other."""
    if name not in ACTIVATIONS:
        what = f"Activation {name!r} is not supported."
        raise QuireError("unsupported_model", what, f"Supported are {', '.join(ACTIVATIONS)}.")
    return name


@dataclass(frozen=True, slots=True)
class MLPNames:
    """The names of a block's projections in a checkpoint.

    `up`: gate and up; or the fused gate/up tensor; or up alone, in a block without a gate.
    """

    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


class GatedMLP(nn.Module):
    """stream + down(act(gate(norm(stream))) * up(norm(stream)))."""

    def __init__(
        self,
        prefix: str,
        norm: Norm | None,
        width: int,
        inner_width: int,
        *,
        bias: bool,
        build: Build,
        activation: str = "silu",
        names: MLPNames | None = None,
        join: ResidualJoin | None = None,
        reduces: bool = True,
    ):
        """`reduces`: whether the block sums its output over the ranks; False: the caller does."""
        super().__init__()
        names = names or MLPNames()
        rows = 2 * inner_width // len(names.up)
        self.norm = norm
        span = build.span(inner_width)
        up, down = [(f"{prefix}.{name}", rows) for name in names.up], [(f"{prefix}.{names.down}", width)]
        self.gate_up = Linear(width, up, bias=bias, build=build, split=build.split_outputs([(inner_width, span)] * 2))
        self.down = Linear(inner_width, down, bias=bias, build=build, split=build.split_inputs(span, reduces=reduces))
        self.curve = ACTIVATIONS[activation]
        self.join = join or ResidualJoin()

    def forward(self, stream: Tensor, onto: Tensor | None = None) -> Tensor:
        """Returns the residual stream, or `onto`, plus this block's output. stream [tokens, width]"""
        x, norm = fuse_norm(self.norm, stream)
        x = self.gate_up(x, norm=norm, gate=self.curve)
        return self.join(self.down, x, stream if onto is None else onto)


class PlainMLP(nn.Module):
    """stream + down(act(up(norm(stream))))."""

    def __init__(
        self,
        prefix: str,
        norm: Norm | None,
        width: int,
        inner_width: int,
        *,
        bias: bool,
        build: Build,
        activation: str,
        names: MLPNames,
        join: ResidualJoin | None = None,
    ):
        super().__init__()
        self.norm = norm
        span = build.span(inner_width)
        up, down = [(f"{prefix}.{names.up[0]}", inner_width)], [(f"{prefix}.{names.down}", width)]
        self.up = Linear(width, up, bias=bias, build=build, split=build.split_outputs([(inner_width, span)]))
        self.down = Linear(inner_width, down, bias=bias, build=build, split=build.split_inputs(span))
        self.activate = CURVES[ACTIVATIONS[activation]]
        self.join = join or ResidualJoin()

    def forward(self, stream: Tensor, onto: Tensor | None = None) -> Tensor:
        """As `GatedMLP.forward`."""
        x, norm = fuse_norm(self.norm, stream)
        return self.join(self.down, self.activate(self.up(x, norm=norm)), stream if onto is None else onto)
