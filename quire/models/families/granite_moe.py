"""The mixtures of Granite 3 and 4: all experts of a layer in two tensors, and optionally a shared block. Their outputs
are scaled, which is multiplied into their last matrices while loading. `moe` and `granite_hybrid` use them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.layers.build import Build
from quire.layers.experts import ExpertNames, Experts, MoEShape
from quire.layers.mlp import GatedMLP, MLPNames
from quire.layers.moe import MoE
from quire.layers.norm import Norm
from quire.layers.weights import ScaleTensor, add_other_names, set_forms

# Relative to a layer: names in Granite's files, and names in files of the models with windows.
EXPERT_NAMES = ExpertNames(
    "block_sparse_moe", router="router.layer", two=("input_linear.weight", "output_linear.weight")
)
LATER_NAMES = ExpertNames("block_sparse_moe", router="router", two=("experts.gate_up_proj", "experts.down_proj"))
SHARED_NAMES = MLPNames(("input_linear",), "output_linear")
OTHER_NAMES = ("gate_proj", "up_proj")  # GGUF names of what is one tensor here


@dataclass(frozen=True, slots=True)
class _Flat:
    """A form: stacks all experts' matrices along rows, scaled."""

    scale: ScaleTensor | None

    def __call__(self, weight: Tensor) -> Tensor:
        return (weight if self.scale is None else self.scale(weight)).flatten(0, 1)


def granite_mixture(
    layer: str,
    names: ExpertNames,
    norm: Norm | None,
    shape: MoEShape,
    scale: ScaleTensor | None,
    build: Build,
) -> MoE:
    """Builds a mixture. `names` include the layer."""
    apart = (names.stacked("gate"), names.stacked("up"))
    experts = Experts.from_two(*names.of_two(), shape, build, _Flat(scale), apart)
    shared = None
    if shape.shared_width:
        shared = granite_shared(layer, None, shape.width, shape.shared_width, scale, build, reduces=False)
    return MoE(names, norm, shape, build=build, experts=experts, shared=shared)


def granite_shared(
    layer: str,
    norm: Norm | None,
    width: int,
    inner_width: int,
    scale: ScaleTensor | None,
    build: Build,
    reduces: bool = True,
) -> GatedMLP:
    """Builds a shared block. `reduces`: see `GatedMLP`."""
    prefix = f"{layer}.shared_mlp"
    block = GatedMLP(prefix, norm, width, inner_width, bias=False, build=build, names=SHARED_NAMES, reduces=reduces)
    add_other_names(block.gate_up, *(f"{prefix}.{name}" for name in OTHER_NAMES))
    set_forms(block.down, (scale,))
    return block
