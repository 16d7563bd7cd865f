"""A gated delta net (Qwen3-Next, Qwen3.5, OLMo Hybrid): projection, convolution, delta rule, gated norm, output, on the
stream.

What lies between the two projections is one op, so that a step of single tokens can be one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.kernels.recurrent_types import DeltaWeights, RecurrentShape
from quire.kernels.table import Ops
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.quant.scheme import Scheme
from quire.layers.recurrent.state import RecurrentLayersPlan
from quire.layers.recurrent.weights import conv_taps, conv_taps_apart, log_decay
from quire.layers.weights import Form, Part, Reorder, Weight, set_forms


@dataclass(frozen=True, slots=True)
class DeltaLayout:
    """How a checkpoint keeps a layer."""

    by_group: bool = False  # one tensor with all that belongs to a group side by side, not one per purpose (Qwen3.5)
    gates_by_group: bool = False  # likewise, of the two gates that each head has
    tiled: bool = False  # the first head of every group, then the second of every group, ... (GGUF files)
    apart: bool = False  # queries, keys, values and gate in tensors of their own, named as in attention (OLMo)


@dataclass(frozen=True, slots=True)
class Untiled:
    """A form: heads that lie tiled become group by group, after `start` rows that stay where they are."""

    num_groups: int
    head_dim: int
    start: int = 0

    def order(self, num_rows: int) -> Tensor:
        rows = torch.arange(num_rows)
        heads = rows[self.start :].view(-1, self.num_groups, self.head_dim)
        return torch.cat((rows[: self.start], heads.transpose(0, 1).flatten()))

    def __call__(self, weight: Tensor) -> Tensor:
        return weight[self.order(len(weight)).to(weight.device)]


@dataclass(frozen=True, slots=True)
class UntiledColumns:
    """A form: likewise, of a matrix that reads the heads."""

    rows: Untiled

    def __call__(self, weight: Tensor) -> Tensor:
        return weight[:, self.rows.order(weight.shape[1]).to(weight.device)]


class GatedDeltaNet(nn.Module):
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
        dtype: torch.dtype,
        ops: Ops,
        scheme: Scheme,
        gated_eps: float | None = None,
    ):
        """`gated_eps`: of the norm before the output's gate; None: as of `norm`."""
        super().__init__()
        self.norm = norm
        self.shape = shape
        self.cache_index = cache_index
        self.ops = ops
        self.gated_eps = norm.eps if gated_eps is None else gated_eps
        heads = shape.num_heads
        tensors = _tensors(shape, layout)
        sources = [(f"{prefix}.{name}", rows) for name, (rows, _) in tensors.items()]
        self.project = Linear(width, sources, dtype=dtype, scheme=scheme)
        set_forms(self.project, [form for _, form in tensors.values()])
        values, each, channels = _head_forms(shape, layout)
        if layout.apart:
            self.conv = conv_taps_apart(prefix, (shape.keys, shape.keys, shape.values), shape.conv_len, dtype)
        else:
            self.conv = conv_taps(f"{prefix}.conv1d", shape.channels, shape.conv_len, dtype, channels)
        self.a_log = log_decay(f"{prefix}.A", heads, each)
        self.dt_bias = Weight((heads,), torch.float32, (Part(f"{prefix}.dt_bias", (heads,), 0, heads, form=each),))
        norm_name, out_name = ("o_norm", "o_proj") if layout.apart else ("norm", "out_proj")
        self.gated_norm = Weight.whole(f"{prefix}.{norm_name}.weight", (shape.value_dim,), dtype)
        self.out = Linear(shape.values, [(f"{prefix}.{out_name}", width)], dtype=dtype, scheme=scheme)
        set_forms(self.out, (None if values is None else UntiledColumns(values),))

    def forward(self, stream: Tensor, plan: RecurrentLayersPlan) -> Tensor:
        """stream [tokens, width] -> the stream with this layer's share added"""
        x = self.project(stream, norm=self.norm)
        weights = DeltaWeights(self.conv, self.a_log, self.dt_bias, self.gated_norm, self.gated_eps)
        out = self.ops.gated_delta_net(x, weights, self.shape, plan.states[self.cache_index], plan.kernel)
        return self.out(out, residual=stream)


def _tensors(shape: RecurrentShape, layout: DeltaLayout) -> dict[str, tuple[int, Form | None]]:
    """What the projection is made of: (rows, form) by name."""
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


def _head_forms(shape: RecurrentShape, layout: DeltaLayout) -> tuple[Untiled | None, Untiled | None, Untiled | None]:
    """Of values, of what each head has one of, and of the convolution's channels."""
    if not layout.tiled:
        return None, None, None
    groups = shape.num_groups
    return (
        Untiled(groups, shape.value_dim),
        Untiled(groups, 1),
        Untiled(groups, shape.value_dim, start=2 * shape.keys),
    )


def ungroup(num_groups: int, sizes: tuple[int, ...]) -> Reorder:
    """For rows that lie group by group, each with blocks of these sizes: every block of all groups together instead."""

    def form(rows: Tensor) -> Tensor:
        blocks = rows.unflatten(0, (num_groups, sum(sizes))).split(sizes, dim=1)
        return torch.cat([block.flatten(0, 1) for block in blocks])

    return Reorder(form)
