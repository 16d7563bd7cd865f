"""Descriptor of a mixture of experts within a `Stack`: router, top-k choice, experts and shared expert in one call,
in place of a layer's feed-forward block.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.expert_types import Routing
from quire.kernels.native.experts import PackedExperts
from quire.kernels.native.library import MAX_MEMBERS, LinearDesc, MixtureDesc, Native
from quire.kernels.native.matrix import PackedLinear


@dataclass(frozen=True, slots=True)
class MixturePlan:
    experts: PackedExperts
    router: PackedLinear  # not quantized
    routing: Routing
    choice_bias: Tensor | None = None  # [experts] float32
    shared_up: PackedLinear | None = None
    shared_down: PackedLinear | None = None
    shared_gate: PackedLinear | None = None  # one row, not quantized

    def describe(self) -> MixtureDesc:
        routing = self.routing
        assert self.fits(routing)
        return MixtureDesc(
            self.experts.desc,
            self.router.desc,
            None if self.choice_bias is None else self.choice_bias.data_ptr(),
            _desc(self.shared_up),
            _desc(self.shared_down),
            _desc(self.shared_gate),
            routing.top_k,
            routing.num_groups,
            routing.top_groups,
            routing.group_members,
            routing.score == "sigmoid",
            routing.normalise,
            routing.scale,
        )

    @staticmethod
    def fits(routing: Routing) -> bool:
        """Whether the library supports the routing: shared experts must not be merged into the routed ones."""
        return routing.num_shared == 0 and routing.group_members <= MAX_MEMBERS


def run_mixture(native: Native, plan: MixturePlan, x: Tensor) -> Tensor:
    """Runs the mixture on x [tokens, width] float32 outside of a stack; returns [tokens, width]."""
    out = torch.zeros_like(x)
    desc = plan.describe()
    native.library.quire_mixture(native.context, byref(desc), x.data_ptr(), len(x), out.data_ptr())
    return out


def _desc(linear: PackedLinear | None) -> LinearDesc:
    return LinearDesc() if linear is None else linear.desc
