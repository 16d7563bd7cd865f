"""Gated delta net (Qwen3-Next, Qwen3.5, OLMo Hybrid): projection, convolution, delta rule, gated norm, projection.

Everything between the two projections is one op, so that a decode step can be one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.kernels.recurrent_types import DeltaWeights, RecurrentShape
from quire.layers.build import Build
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.recurrent.state import RecurrentLayersPlan
from quire.layers.recurrent.weights import conv_taps, conv_taps_apart, log_decay
from quire.layers.weights import Form, Part, Reorder, Weight, set_forms


@dataclass(frozen=True, slots=True)
class DeltaLayout:
    """The layout of a layer's tensors in a checkpoint."""

    by_group: bool = False  # one QKVZ tensor ordered by group of heads; False: separate QKV and Z (Qwen3.5)
    gates_by_group: bool = False  # one tensor of both gates, ordered by group; False: a tensor per gate
    tiled: bool = False  # value heads ordered by index in their group: the first of every group, ... (GGUF files)
    apart: bool = False  # separate queries, keys, values and gates, named as in attention (OLMo)


@dataclass(frozen=True, slots=True)
class UntileHeads:
    """A form that reorders tiled heads by group; the first `start` rows stay in place."""

    num_groups: int
    head_dim: int
    start: int = 0

    def order(self, num_rows: int) -> Tensor:
        """Returns, for each row of the weight, its index in the checkpoint's tensor, [rows] int64."""
        rows = torch.arange(num_rows)
        heads = rows[self.start :].view(-1, self.num_groups, self.head_dim)
        return torch.cat((rows[: self.start], heads.transpose(0, 1).flatten()))

    def __call__(self, weight: Tensor) -> Tensor:
        return weight[self.order(len(weight)).to(weight.device)]


@dataclass(frozen=True, slots=True)
class UntileHeadColumns:
    """A form that reorders the columns of the output projection, whose input has tiled heads."""

    rows: UntileHeads

    def __call__(self, weight: Tensor) -> Tensor:
        return weight[:, self.rows.order(weight.shape[1]).to(weight.device)]


class GatedDeltaNet(nn.Module):
    """One gated delta net block."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    gated_norm: Tensor

    def __init__(
        self,
        prefix: str,
        norm: RMSNorm,
        width: int,
        shape: RecurrentShape,
        cache_index: int,
        *,
        layout: DeltaLayout,
        build: Build,
        gated_eps: float | None = None,
    ):
        """`gated_eps`: epsilon of the gated norm; None: that of `norm`."""
        super().__init__()
        self.norm = norm
        self.shape = shape
        self.cache_index = cache_index
        self.ops = build.ops
        self.gated_eps = norm.eps if gated_eps is None else gated_eps
        heads = shape.num_heads
        tensors = _tensors(shape, layout)
        sources = [(f"{prefix}.{name}", rows) for name, (rows, _) in tensors.items()]
        self.project = Linear(width, sources, build=build)
        set_forms(self.project, [form for _, form in tensors.values()])
        values, each, channels = _head_forms(shape, layout)
        if layout.apart:
            self.conv = conv_taps_apart(prefix, (shape.keys, shape.keys, shape.values), shape.conv_len, build.dtype)
        else:
            self.conv = conv_taps(f"{prefix}.conv1d", shape.channels, shape.conv_len, build.dtype, channels)
        self.a_log = log_decay(f"{prefix}.A", heads, each)
        self.dt_bias = Weight((heads,), torch.float32, (Part(f"{prefix}.dt_bias", (heads,), 0, heads, form=each),))
        norm_name, out_name = ("o_norm", "o_proj") if layout.apart else ("norm", "out_proj")
        self.gated_norm = Weight.whole(f"{prefix}.{norm_name}.weight", (shape.value_dim,), build.dtype)
        self.out = Linear(shape.values, [(f"{prefix}.{out_name}", width)], build=build)
        set_forms(self.out, (None if values is None else UntileHeadColumns(values),))

    def forward(self, stream: Tensor, plan: RecurrentLayersPlan) -> Tensor:
        """Returns the residual stream plus this layer's output. stream [tokens, width]"""
        x = self.project(stream, norm=self.norm)
        weights = DeltaWeights(self.conv, self.a_log, self.dt_bias, self.gated_norm, self.gated_eps)
        out = self.ops.gated_delta_net(x, weights, self.shape, plan.states[self.cache_index], plan.kernel)
        return self.out(out, residual=stream)


def _tensors(shape: RecurrentShape, layout: DeltaLayout) -> dict[str, tuple[int, Form | None]]:
    """Returns the checkpoint tensors of the input projection: name -> (rows, form)."""
    heads, groups = shape.num_heads, shape.num_groups
    per_group, values = heads // groups, shape.values // groups
    of_values, each, channels = _head_forms(shape, layout)
    if layout.apart:
        rows = {"q": shape.keys, "k": shape.keys, "v": shape.values, "g": shape.values, "b": heads, "a": heads}
        return {f"{name}_proj": (count, None) for name, count in rows.items()}
    tensors: dict[str, tuple[int, Form | None]] = {
        "qkv": (shape.channels, channels),
        "z": (shape.values, of_values),
        "b": (heads, each),
        "a": (heads, each),
    }
    if layout.by_group:
        qkvz = ungroup(groups, (shape.key_dim, shape.key_dim, values, values))
        tensors = {"qkvz": (shape.channels + shape.values, qkvz), "b": tensors["b"], "a": tensors["a"]}
    if layout.gates_by_group:
        del tensors["b"], tensors["a"]
        tensors["ba"] = (2 * heads, ungroup(groups, (per_group, per_group)))
    return {f"in_proj_{name}": tensor for name, tensor in tensors.items()}


def _head_forms(
    shape: RecurrentShape, layout: DeltaLayout
) -> tuple[UntileHeads | None, UntileHeads | None, UntileHeads | None]:
    """Returns the forms of value rows, of tensors with one row per head, and of convolution channels."""
    if not layout.tiled:
        return None, None, None
    groups = shape.num_groups
    return (
        UntileHeads(groups, shape.value_dim),
        UntileHeads(groups, 1),
        UntileHeads(groups, shape.value_dim, start=2 * shape.keys),
    )


def ungroup(num_groups: int, sizes: tuple[int, ...]) -> Reorder:
    """Returns the form that reorders rows from one group after the other, each with blocks of these sizes, to one block
    of all groups after the other.
    """

    def form(rows: Tensor) -> Tensor:
        blocks = rows.unflatten(0, (num_groups, sum(sizes))).split(sizes, dim=1)
        return torch.cat([block.flatten(0, 1) for block in blocks])

    return Reorder(form)
