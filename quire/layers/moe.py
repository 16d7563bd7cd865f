"""The mixture of experts that replaces a feed-forward block: router, top-k experts, shared expert.

Family files describe a mixture with a `MoEShape` and the checkpoint's tensor names (`ExpertNames`), both in `experts`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from quire.kernels.activations import Curve
from quire.layers.build import Build
from quire.layers.expert_exchange import ExpertExchange, ExpertPlaces
from quire.layers.experts import ExpertNames, Experts, MoEShape, num_merged_experts
from quire.layers.linear import Linear
from quire.layers.norm import Norm, fuse_norm
from quire.layers.quant import Dense
from quire.layers.residual_join import ResidualJoin
from quire.layers.weights import Part, Weight, scale_by, set_forms


class SharedExpert(nn.Module):
    """The expert that every token passes through, as a block of its own."""

    def __init__(self, names: ExpertNames, shape: MoEShape, build: Build):
        super().__init__()
        inner, (gate_name, up_name, down_name) = shape.shared_width, names.of_shared()
        span = build.span(inner)
        split = build.split_outputs([(inner, span)] * 2)
        self.gate_up = Linear(shape.width, [(gate_name, inner), (up_name, inner)], build=build, split=split)
        split_down = build.split_inputs(span, reduces=False)  # the mixture sums over ranks, with the routed experts
        self.down = Linear(inner, [(down_name, shape.width)], build=build, split=split_down)
        set_forms(self.down, (scale_by(shape.shared_scale),))
        self.curve: Curve = "silu"
        self.ops = build.ops
        self.gate = None
        if shape.shared_gated:
            gate = [(f"{names.prefix}.{names.shared_gate}", 1)]
            self.gate = Linear(shape.width, gate, build=build.with_scheme(Dense(build.ops)))

    def forward(self, x: Tensor, stream: Tensor) -> Tensor:
        """Returns the residual stream plus this expert's output. x: the normed stream; both [tokens, width]"""
        inner = self.gate_up(x, gate=self.curve)
        if self.gate is None:
            return self.down(inner, residual=stream)
        return self.ops.elementwise(_add_gated, stream, self.down(inner), self.gate(x))


def _add_gated(stream: Tensor, out: Tensor, gate: Tensor) -> Tensor:
    return torch.addcmul(stream, out, gate.sigmoid())


class MoE(nn.Module):
    """One mixture block: norm, router, top-k experts and shared expert."""

    router: Tensor  # [logits, width]; never quantized, since small differences decide the choice of experts
    router_bias: Tensor | None
    choice_bias: Tensor | None

    def __init__(
        self,
        names: ExpertNames,
        norm: Norm | None,
        shape: MoEShape,
        *,
        build: Build,
        experts: Experts | None = None,
        shared: nn.Module | None = None,
        join: ResidualJoin | None = None,
    ):
        """`experts`: the experts, for checkpoint layouts that `names` can't describe. `shared`: the shared expert, for
        such layouts; it is called like a `SharedExpert`. `join`: adds the sum of all outputs to the residual stream.
        """
        super().__init__()
        self.norm = norm
        self.ops = build.ops
        num_merged = 0 if build.exchanges_experts else num_merged_experts(shape, build.ops)
        self.experts = experts or Experts.from_names(names, shape, build, num_merged)
        merged = self.experts.num_shared
        self.routing = replace(shape.routing, num_shared=merged, shared_gated=merged > 0 and shape.shared_gated)
        num, router = shape.routing.num_experts, f"{names.prefix}.{names.router}"
        rows = [(f"{router}.weight", num)]
        if self.routing.shared_gated:
            rows.append((f"{names.prefix}.{names.shared_gate}.weight", 1))
        self.router = Weight.stacked(rows, (shape.width,), build.dtype)
        self.router_bias = Weight.whole(f"{router}.bias", (num,), build.dtype) if shape.router_bias else None
        self.choice_bias = None
        if shape.choice_bias:
            size = (num,) if names.choice_bias_rows is None else (names.choice_bias_rows, num)
            line = Part(f"{names.prefix}.{names.choice_bias}", size, 0, num, form=torch.flatten)
            self.choice_bias = Weight((num,), torch.float32, (line,))
        self.shared = shared
        if shared is None and shape.shared_width and not merged:
            self.shared = SharedExpert(names, shape, build)
        self.join = join or ResidualJoin()
        self.communicator = build.communicator
        self.exchange: ExpertExchange | None = None
        if build.exchanges_experts:
            self.exchange = ExpertExchange(build.communicator, ExpertPlaces.in_order(num, build.communicator.size))

    @property
    def experts_add(self) -> bool:
        """Whether the routed experts' kernel adds to a tensor: the residual stream or the shared expert's output."""
        return self.join.is_plain or self.shared is not None

    def forward(self, stream: Tensor, onto: Tensor | None = None) -> Tensor:
        """Returns the residual stream, or `onto`, plus the experts' output. stream [tokens, width]"""
        x, norm = fuse_norm(self.norm, stream)
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        x, chosen, weights = self.ops.norm_route(
            x, weight, eps, self.router, self.router_bias, self.choice_bias, self.routing
        )
        onto = stream if onto is None else onto
        if self.exchange is not None:
            total = self.exchange.run(x, chosen, weights, self._run_here)
            if self.shared is not None:  # every rank has a share of it
                total = total + self.communicator.all_reduce(self.shared(x, torch.zeros_like(x)))
            return self.join.add(total, onto)
        if self.communicator.size > 1:
            return self.join.add(self.communicator.all_reduce(self._shares(x, chosen, weights, None)), onto)
        if self.join.is_plain:
            return self._shares(x, chosen, weights, onto)
        return self.join.add(self._shares(x, chosen, weights, None), onto)

    def _run_here(self, x: Tensor, experts: Tensor) -> Tensor:
        """Returns the outputs of this rank's experts. x [rows, width], experts [rows]: index on this rank"""
        ones = torch.ones(len(x), 1, dtype=torch.float32, device=x.device)
        return self.ops.run_experts(x.contiguous(), self.experts.weights(), experts.unsqueeze(1), ones, None)

    def _shares(self, x: Tensor, chosen: Tensor, weights: Tensor, onto: Tensor | None) -> Tensor:
        """Returns the sum of all experts' outputs, plus `onto` if given. x: the normed stream, [tokens, width]"""
        if self.shared is not None:
            # The result may take the memory of `onto`. Without a norm that is also x, which the experts still read.
            room = torch.zeros_like(x) if onto is None else onto.clone() if onto is x else onto
            onto = self.shared(x, room)
        return self.ops.run_experts(x, self.experts.weights(), chosen, weights, onto)


def moe_activations(shape: MoEShape) -> int:
    """Elements of activations alive at one time per token, including FP8 copies between the products."""
    num_sent = shape.routing.top_k + -(-shape.shared_width // shape.inner_width)  # with a merged shared expert
    of_experts = shape.inner_width + shape.inner_width // 2 + shape.width
    return num_sent * of_experts + 3 * shape.shared_width + 2 * shape.width
