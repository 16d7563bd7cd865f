"""The experts of a mixture: their shape, their names in a checkpoint, and their weights. `moe` is the layer.

All experts of a layer are stacked in two tensors (gate/up and down), whatever the layout of the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quire.kernels.expert_types import ExpertWeights, GatedActivation, Routing
from quire.kernels.table import Ops
from quire.layers.build import Build
from quire.layers.split import cannot_split, share_out
from quire.layers.weights import Form, Part, Share, Weight, put_weight
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.kernels.native.experts import PackedExperts

SCALED_AT_ONCE = 1 << 24  # elements; bounds the memory that quantizing takes


@runtime_checkable
class PacksExperts(Protocol):
    """A scheme that stores experts in packed form."""

    def pack_experts(self, weight: Weight, num_experts: int) -> None: ...


@runtime_checkable
class ScalesExperts(Protocol):
    """A scheme that stores experts in a smaller type with per-row scales."""

    expert_dtype: torch.dtype

    def scale_rows(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the quantized rows and their scales. [rows, columns] -> [rows, columns], [rows] float32"""


@dataclass(frozen=True, slots=True)
class MoEShape:
    """The sizes of a mixture layer. Raises `bad_config` for sizes that contradict each other."""

    width: int
    inner_width: int  # of one expert
    routing: Routing
    activation: GatedActivation = field(default_factory=GatedActivation)
    shared_width: int = 0  # inner width of the shared expert; 0: no shared expert
    shared_scale: float = 1.0  # factor of the shared expert's output, applied to its down projection while loading
    shared_gated: bool = False  # the shared expert's output has a sigmoid gate
    router_bias: bool = False  # bias of the router's logits
    choice_bias: bool = False  # bias of the scores for the top-k choice only, not for the weights

    def __post_init__(self) -> None:
        routing = self.routing
        if self.shared_width < 0:
            raise _bad(f"the width {self.shared_width} of the shared expert is negative")
        if not 1 <= routing.top_k <= routing.num_experts:
            raise _bad(f"the router can't choose {routing.top_k} experts per token from {routing.num_experts}")
        if routing.num_experts % routing.num_groups:
            raise _bad(f"{routing.num_experts} experts can't be divided into {routing.num_groups} groups of equal size")
        members = routing.num_experts // routing.num_groups
        if not 1 <= routing.top_groups <= routing.num_groups or routing.top_groups * members < routing.top_k:
            what = f"{routing.top_groups} of {routing.num_groups} groups of {members} experts"
            raise _bad(f"{what} have fewer than the {routing.top_k} experts chosen per token")
        if routing.num_groups > 1 and members < routing.group_members:
            raise _bad(f"groups of {members} experts can't be scored by their best {routing.group_members}")


def _bad(what: str) -> QuireError:
    return QuireError("bad_config", f"{what}.", "Check config.json.")


ACTIVATIONS = {  # keys: names in config.json
    "silu": GatedActivation(),
    "swish": GatedActivation(),
    "gelu_new": GatedActivation(curve="gelu_tanh"),
    "gelu_pytorch_tanh": GatedActivation(curve="gelu_tanh"),
}


def expert_activation(name: str) -> GatedActivation:
    """Returns the activation of this name in config.json; raises `unsupported_model` for an unknown one."""
    if name not in ACTIVATIONS:
        what = f"Activation {name!r} is not supported in experts."
        raise QuireError("unsupported_model", what, f"Supported are {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of a mixture layer's tensors in a checkpoint, all below `prefix`."""

    prefix: str
    router: str = "gate"
    choice_bias: str = "gate.e_score_correction_bias"
    choice_bias_rows: int | None = None  # first dimension of its tensor; None: the tensor has one dimension
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    two: tuple[str, str] | None = None  # (gate/up, down) of checkpoints with one tensor each for all experts
    in_columns: bool = False  # the matrices in `two` are transposed
    shared: str = "shared_expert"
    shared_matrices: tuple[str, str, str] | None = None  # gate, up and down; None: named like those of other experts
    shared_gate: str = "shared_expert_gate"

    def below(self, layer: str) -> ExpertNames:
        """Returns these names with the layer's name in front."""
        return replace(self, prefix=f"{layer}.{self.prefix}")

    def expert(self, index: int, matrix: str) -> str:
        """Returns the name of one expert's matrix."""
        return f"{self.prefix}.experts.{index}.{matrix}.weight"

    def stacked(self, matrix: str) -> str:
        """Returns the name of the tensor with this matrix of all experts, in GGUF files."""
        return f"{self.prefix}.experts.{matrix}_proj.weight"

    def of_two(self) -> tuple[str, str]:
        """Returns the full names of `two`."""
        assert self.two is not None
        return f"{self.prefix}.{self.two[0]}", f"{self.prefix}.{self.two[1]}"

    def of_shared(self) -> tuple[str, str, str]:
        """Returns the names of the shared expert's gate, up and down."""
        gate, up, down = self.shared_matrices or (self.gate, self.up, self.down)
        prefix = f"{self.prefix}.{self.shared}"
        return f"{prefix}.{gate}", f"{prefix}.{up}", f"{prefix}.{down}"


def num_merged_experts(shape: MoEShape, ops: Ops) -> int:
    """Returns the number of routed-size experts that the shared expert is stored as, after the routed ones.

    One kernel then computes routed and shared experts. 0: the shared expert is a block of its own, because the ops do
    not merge it or its shape or activation does not fit.
    """
    fits = shape.activation.is_silu_mul and shape.shared_width % shape.inner_width == 0
    fits = fits and not (shape.router_bias and shape.shared_gated)  # no bias of a merged gate
    return shape.shared_width // shape.inner_width if fits and ops.merges_shared else 0


@dataclass(frozen=True, slots=True)
class RowSlice:
    """A form that takes a range of rows."""

    start: int
    stop: int

    def __call__(self, weight: Tensor) -> Tensor:
        return weight[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class ColumnSlice:
    """A form that takes a range of columns and scales it."""

    start: int
    stop: int
    by: float = 1.0

    def __call__(self, weight: Tensor) -> Tensor:
        columns = weight[:, self.start : self.stop]
        return columns if self.by == 1.0 else columns * self.by


@dataclass(frozen=True, slots=True)
class ZeroForm:
    """A form that has the shape of another form's result, and no value of it."""

    inner: Form | None

    def __call__(self, weight: Tensor) -> Tensor:
        return torch.zeros_like(weight if self.inner is None else self.inner(weight))


class Experts(nn.Module):
    """The weights of all experts of a layer."""

    gate_up: Tensor  # [experts * 2 * inner, width]; or a list of packed matrices in that order
    down: Tensor  # [experts * width, inner]; or a list of packed matrices in that order
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    gate_up_scale: Tensor | None  # [experts * 2 * inner] float32, if the scheme has per-row scales
    down_scale: Tensor | None  # [experts * width] float32, if the scheme has per-row scales

    def __init__(
        self,
        gate_up: Weight,
        down: Weight,
        gate_up_bias: Weight | None,
        down_bias: Weight | None,
        num_entries: int,
        activation: GatedActivation,
        build: Build,
        num_shared: int = 0,
    ):
        """`num_entries`: number of experts, including the last `num_shared`, which form the shared expert."""
        super().__init__()
        scheme = build.schemes.of_all(part.name for weight in (gate_up, down) for part in weight.parts)
        if isinstance(scheme, PacksExperts):
            scheme.pack_experts(gate_up, num_entries)
            scheme.pack_experts(down, num_entries)
        if isinstance(scheme, ScalesExperts):
            gate_up.store_scaled(scheme.expert_dtype)
            down.store_scaled(scheme.expert_dtype)
        self.scheme = scheme
        self.gate_up_scale = self.down_scale = None
        self.num_shared = num_shared
        self.activation = activation
        if build.exchanges_experts:
            assert num_shared == 0, "a merged shared expert has no rank of its own"
            start, stop = share_out(num_entries, build.communicator.size)[build.communicator.rank]
            if num_entries < build.communicator.size:
                raise cannot_split(f"{num_entries} experts", build.communicator.size)

            def take(weight: Weight) -> Weight:
                rows = weight.shape[0] // num_entries
                return weight.cut(Share(((start * rows, stop * rows),)))

            self.gate_up, self.down = take(gate_up), take(down)
            self.gate_up_bias = None if gate_up_bias is None else take(gate_up_bias)
            self.down_bias = None if down_bias is None else take(down_bias)
            self.num_entries = stop - start
            return
        inner = down.shape[1]
        span = build.span(inner)
        rows = [(inner, span)] * (2 * num_entries)
        self.gate_up = build.cut_rows(gate_up, rows)
        self.down = down if build.communicator.size == 1 else down.cut(Share(columns=span))
        self.gate_up_bias = None if gate_up_bias is None else build.cut_rows(gate_up_bias, rows)
        self.down_bias = down_bias
        if down_bias is not None and build.communicator.rank > 0:  # the sum over ranks has it once
            down_bias.parts = tuple(replace(part, form=ZeroForm(part.form)) for part in down_bias.parts)
        self.num_entries = num_entries

    @classmethod
    def from_names(cls, names: ExpertNames, shape: MoEShape, build: Build, num_shared: int = 0) -> Experts:
        """Returns experts whose checkpoint has a tensor per expert and matrix, per matrix (GGUF), or two in all.

        The slices of a merged shared expert follow the routed experts, unless the checkpoint has two tensors.
        """
        if names.two is not None:
            return (cls.from_columns if names.in_columns else cls.from_two)(*names.of_two(), shape, build)
        num, inner, width = shape.routing.num_experts, shape.inner_width, shape.width
        total = num + num_shared
        matrices = (names.gate, names.up)
        first = "up" if names.gate == names.up else "gate"  # no gate projection: up takes its place
        gate_up, down = _shared_parts(names, shape, num_shared)
        one_by_one = [(names.expert(e, matrix), inner) for e in range(num) for matrix in matrices]
        gate_ups = Weight(
            (total * 2 * inner, width),
            build.dtype,
            (*Weight.stacked(one_by_one, (width,), build.dtype).parts, *gate_up),
        )
        stacked = (
            Part(names.stacked(matrix), (num, inner, width), start, start + inner, index=e)
            for e in range(num)
            for matrix, start in ((first, 2 * e * inner), ("up", (2 * e + 1) * inner))
        )
        gate_ups.others = ((*stacked, *gate_up),)
        one_by_one = [(names.expert(e, names.down), width) for e in range(num)]
        downs = Weight(
            (total * width, inner), build.dtype, (*Weight.stacked(one_by_one, (inner,), build.dtype).parts, *down)
        )
        downs.others = ((Part(names.stacked("down"), (num, width, inner), 0, num * width), *down),)
        return cls(gate_ups, downs, None, None, total, shape.activation, build, num_shared)

    @classmethod
    def from_two(
        cls,
        gate_up: str,
        down: str,
        shape: MoEShape,
        build: Build,
        down_form: Form | None = None,
        apart: tuple[str, str] | None = None,
    ) -> Experts:
        """Returns experts whose checkpoint has two tensors, with an expert's gate rows before its up rows.

        `apart`: names of the gate and the up tensor in checkpoints that separate them.
        """
        num, inner, width = shape.routing.num_experts, shape.inner_width, shape.width
        above = Part(gate_up, (num, 2 * inner, width), 0, num * 2 * inner)
        below = Part(down, (num, width, inner), 0, num * width, form=down_form)
        others = tuple(
            Part(name, (num, inner, width), start, start + inner, index=e)
            for e in range(num)
            for name, start in zip(apart or (), (2 * e * inner, (2 * e + 1) * inner), strict=False)
        )
        gate_ups = Weight((num * 2 * inner, width), build.dtype, (above,), (others,) if others else ())
        downs = Weight((num * width, inner), build.dtype, (below,))
        return cls(gate_ups, downs, None, None, num, shape.activation, build)

    @classmethod
    def from_columns(cls, gate_up: str, down: str, shape: MoEShape, build: Build) -> Experts:
        """As `from_two`, for transposed tensors: [experts, width, 2 * inner] and [experts, inner, width]."""
        num, inner, width = shape.routing.num_experts, shape.inner_width, shape.width

        def matrices(name: str, rows: int, columns: int) -> Weight:
            parts = (
                Part(name, (num, columns, rows), e * rows, (e + 1) * rows, index=e, form=torch.t) for e in range(num)
            )
            return Weight((num * rows, columns), build.dtype, tuple(parts))

        gate_ups, downs = matrices(gate_up, 2 * inner, width), matrices(down, width, inner)
        return cls(gate_ups, downs, None, None, num, shape.activation, build)

    @property
    def is_scaled(self) -> bool:
        """Whether the experts have per-row scales."""
        return isinstance(self.scheme, ScalesExperts)

    def finish(self) -> None:
        """Quantizes the experts if the scheme does. Called by the loader once the weights are loaded."""
        if isinstance(self.scheme, ScalesExperts):
            self._scale("gate_up", self.scheme)
            self._scale("down", self.scheme)

    def _scale(self, name: str, scheme: ScalesExperts) -> None:
        """Quantizes one weight in chunks of rows, so that little memory is held in both types at once."""
        plain = getattr(self, name).data
        scaled = torch.empty(plain.shape, dtype=scheme.expert_dtype, device=plain.device)
        scales = torch.empty(len(plain), dtype=torch.float32, device=plain.device)
        step = max(1, SCALED_AT_ONCE // plain.shape[1])
        for first in range(0, len(plain), step):
            rows = slice(first, first + step)
            scaled[rows], scales[rows] = scheme.scale_rows(plain[rows])
        put_weight(self, name, scaled)
        setattr(self, f"{name}_scale", scales)

    def weights(self) -> ExpertWeights | PackedExperts:
        """Returns the weights as the expert kernels take them."""
        num = self.num_entries
        if isinstance(self.gate_up, list):
            return self._packed
        return ExpertWeights(
            self.gate_up.view(num, -1, self.gate_up.shape[1]),
            self.down.view(num, -1, self.down.shape[1]),
            self._by_expert(self.gate_up_bias),
            self._by_expert(self.down_bias),
            self.activation,
            self._by_expert(self.gate_up_scale),
            self._by_expert(self.down_scale),
        )

    def _by_expert(self, line: Tensor | None) -> Tensor | None:
        return None if line is None else line.view(self.num_entries, -1)

    @cached_property
    def _packed(self) -> PackedExperts:
        from quire.kernels.native.experts import PackedExperts
        from quire.kernels.native.matrix import PackedLinear

        num = self.num_entries

        def linears(matrices: Any, bias: Tensor | None) -> list[PackedLinear]:
            count = len(matrices) // num
            biases: Any = [None] * num if bias is None else bias.view(num, -1)
            return [PackedLinear(matrices[e * count : (e + 1) * count], biases[e]) for e in range(num)]

        return PackedExperts(
            linears(self.gate_up, self.gate_up_bias), linears(self.down, self.down_bias), self.activation
        )


def _shared_parts(names: ExpertNames, shape: MoEShape, num_shared: int) -> tuple[list[Part], list[Part]]:
    """Returns the parts of the gate/up and of the down weight that hold the shared expert in slices of routed size.

    The shared expert has tensors of its own in every checkpoint layout.
    """
    num, inner, width = shape.routing.num_experts, shape.inner_width, shape.width
    gate_name, up_name, down_name = (f"{name}.weight" for name in names.of_shared())
    gate_up, down = [], []
    for index in range(num_shared):
        cut = (index * inner, (index + 1) * inner)
        start = (num + index) * 2 * inner
        for place, name in ((start, gate_name), (start + inner, up_name)):
            rows = None if num_shared == 1 else RowSlice(*cut)
            gate_up.append(Part(name, (shape.shared_width, width), place, place + inner, form=rows))
        columns = None if num_shared == 1 and shape.shared_scale == 1.0 else ColumnSlice(*cut, shape.shared_scale)
        place = (num + index) * width
        down.append(Part(down_name, (width, shape.shared_width), place, place + width, form=columns))
    return gate_up, down
