"""The one table that picks which implementation of each op a device gets. Models ask it once, when they are built.

Everything below a model calls ops through the `Ops` it was given, so a faster twin is one changed row here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from quire.kernels.activations import Curve
from quire.kernels.angles import Angles, angle_tables, angles_from_positions
from quire.kernels.deterministic import dense as fixed
from quire.kernels.deterministic import experts as fixed_experts
from quire.kernels.deterministic import latent as fixed_latent
from quire.kernels.deterministic import recurrent as fixed_recurrent
from quire.kernels.reference import attention as reference_attention
from quire.kernels.reference import experts as reference_experts
from quire.kernels.reference import latent as reference_latent
from quire.kernels.reference import recurrent as reference_recurrent
from quire.kernels.reference import small_ops as reference
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.kernels.native.library import Native

LIBRARY_NAMES = ("flash-attn", "flashinfer", "cudnn")  # of `kernels`: see `libraries.choose`
INSTRUCTION_SETS = ("avx512", "avx2", "portable")  # likewise: what the native library is compiled for


class FusedLinear(Protocol):
    """A product with its norm, gate and residual addition, where that is quicker than one after the other: in one
    kernel for few rows, the gate inside the product for many."""

    def wins(self, num_rows: int, weight: Tensor, gate: Curve | None) -> bool: ...

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        eps: float,
        gate: Curve | None,
        residual: Tensor | None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation per op, with the signature and meaning of the reference of the same name."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    gate_mul: Callable[..., Tensor]
    plan_angles: Callable[..., Angles]
    qk_norm_rope_write: Callable[..., Tensor]
    plan_attention: Callable[..., Any]  # what it returns is for the same row's `paged_attention` only
    paged_attention: Callable[..., Tensor]
    norm_route: Callable[..., tuple[Tensor, Tensor, Tensor]]
    run_experts: Callable[..., Tensor]
    latent_write: Callable[..., Tensor]
    latent_attention: Callable[..., Tensor]  # with the plan of the same row's `plan_attention`
    plan_recurrent: Callable[..., Any]  # what it returns is for the four ops below, of the same row
    gated_delta_net: Callable[..., Tensor]
    channel_delta_net: Callable[..., Tensor]
    mamba2: Callable[..., Tensor]
    short_conv: Callable[..., Tensor]
    norm_add: Callable[..., Tensor] | None = None  # see `RMSNorm.add_to`; None: one after the other
    elementwise: Callable[..., Tensor] = reference.elementwise
    head_product: Callable[[Tensor, Tensor], Tensor] = torch.bmm  # [heads, tokens, in] times [heads, in, out]
    merges_shared: bool = False  # a shared expert is quicker as one of the experts than by itself
    captures: bool = False  # attention reads permanent page tables, so that a step of decodes can be captured
    captured_work: Callable[[int, int, int], Any] | None = None  # and work lists in one place, for mixed steps
    fused_linear: FusedLinear | None = None  # where it wins, instead of norm, product and what follows it
    native: Native | None = None  # the library behind a CPU's row: it also packs weights and runs whole models


REFERENCE = Ops(
    rms_norm=reference.rms_norm,
    gate_mul=reference.gate_mul,
    plan_angles=angle_tables,
    qk_norm_rope_write=reference.qk_norm_rope_write,
    plan_attention=reference_attention.plan_attention,
    paged_attention=reference_attention.paged_attention,
    norm_route=reference_experts.norm_route,
    run_experts=reference_experts.run_experts,
    latent_write=reference_latent.latent_write,
    latent_attention=reference_latent.latent_attention,
    plan_recurrent=reference_recurrent.plan_recurrent,
    gated_delta_net=reference_recurrent.gated_delta_net,
    channel_delta_net=reference_recurrent.channel_delta_net,
    mamba2=reference_recurrent.mamba2,
    short_conv=reference_recurrent.short_conv,
)


# Same bits whatever surrounds a row; the loader knows for which models all they do is in these rows.
_FIXED_LAYERS: dict[str, Any] = {  # what has no native twin
    "norm_route": fixed_experts.norm_route,
    "run_experts": fixed_experts.run_experts,
    "elementwise": fixed.elementwise,
    "fused_linear": fixed.TiledLinear(),
}
FIXED = replace(
    REFERENCE,
    rms_norm=fixed.rms_norm,
    gate_mul=fixed.gate_mul,
    plan_angles=fixed.plan_angles,
    qk_norm_rope_write=fixed.qk_norm_rope_write,
    plan_attention=fixed.plan_attention,
    paged_attention=fixed.paged_attention,
    latent_write=fixed_latent.latent_write,
    latent_attention=fixed_latent.latent_attention,
    head_product=fixed_latent.head_product,
    plan_recurrent=fixed_recurrent.plan_recurrent,
    gated_delta_net=fixed_recurrent.gated_delta_net,
    channel_delta_net=fixed_recurrent.channel_delta_net,
    mamba2=fixed_recurrent.mamba2,
    short_conv=fixed_recurrent.short_conv,
    **_FIXED_LAYERS,
)


def select_fixed_ops(device_type: str, kernels: str = "auto") -> Ops:
    """The ops of the deterministic mode. On a CPU the native library's where it is built, which are of that kind anyway
    for models they run as a whole, and tiles of one shape elsewhere; on CUDA Triton's, and nobody else's."""
    _check_device(kernels, device_type)
    if device_type == "cuda":
        if kernels in ("auto", "triton"):
            return _fixed_triton_ops()
        what = (
            f"The deterministic mode takes no --kernels {kernels} on CUDA: only Triton's own kernels are of that kind."
        )
        raise QuireError("invalid_parameter", what, "Leave --kernels or --deterministic out.", param="kernels")
    native = _open_native(kernels)
    if native is None:
        return FIXED
    return replace(_native_ops(native), **_FIXED_LAYERS, **_native_recurrent(native, fixed_recurrent))


def select_ops(device_type: str, kernels: str = "auto", strict: bool = False) -> Ops:
    """The ops for "cpu", "cuda", ...; a device without a row of its own runs the reference, which is plain torch.
    `kernels`: "torch" wants that row anyway, "triton" no other than Triton's, an instruction set no other than
    the native library's, a library's name Triton's with that library before it (the loader sees to that); `strict`:
    no second best."""
    _check_device(kernels, device_type)
    if kernels == "torch":
        return REFERENCE
    if device_type == "cuda":
        return _triton_ops(strict or kernels in ("triton", *LIBRARY_NAMES))
    native = _open_native(kernels) if device_type == "cpu" else None
    return REFERENCE if native is None else _native_ops(native)


def _check_device(kernels: str, device_type: str) -> None:
    """What is asked for by name on a device it is not for is refused; others would compute in its place, unnoticed."""
    needed = {**dict.fromkeys(("triton", *LIBRARY_NAMES), "cuda"), **dict.fromkeys(INSTRUCTION_SETS, "cpu")}
    if needed.get(kernels, device_type) != device_type:
        what = f"kernels={kernels} needs a {'CUDA device' if needed[kernels] == 'cuda' else 'CPU'}."
        raise QuireError("invalid_parameter", what, "Use auto.", param="kernels")


def _open_native(kernels: str) -> Native | None:
    """The native library, where it was built; an instruction set that is asked for by name must be there."""
    if kernels == "torch":
        return None
    from quire.kernels.native.library import HOW_TO_BUILD, NotBuilt, open_native

    try:
        return open_native(None if kernels == "auto" else kernels, torch.get_num_threads())
    except NotBuilt as error:
        if kernels == "auto":
            return None
        what = f"kernels={kernels} can't be used: {error}."
        raise QuireError("invalid_parameter", what, f"Use auto or torch, or {HOW_TO_BUILD}.", "kernels") from None


def _native_ops(native: Native) -> Ops:
    from quire.kernels.native.ops import NativeOps

    ops = NativeOps(native)
    return replace(
        REFERENCE,
        rms_norm=ops.rms_norm,
        gate_mul=ops.gate_mul,
        plan_angles=ops.plan_angles,
        qk_norm_rope_write=ops.qk_norm_rope_write,
        plan_attention=ops.plan_attention,
        paged_attention=ops.paged_attention,
        run_experts=ops.run_experts,
        latent_write=ops.latent_write,
        latent_attention=ops.latent_attention,
        native=native,
        **_native_recurrent(native, reference_recurrent),
    )


def _native_recurrent(native: Native, torch_ops: ModuleType) -> dict[str, Any]:
    """Rows of the table. `torch_ops`: who does what the library does not take."""
    from quire.kernels.native.recurrent import NativeRecurrent

    ops = NativeRecurrent(native, torch_ops)
    names = ("plan_recurrent", "gated_delta_net", "channel_delta_net", "mamba2", "short_conv")
    return {name: getattr(ops, name) for name in names}


def _triton_ops(strict: bool) -> Ops:
    """Imported only where there is a device for it; without Triton the reference runs there too, and says so."""
    try:
        from quire.kernels.triton.attention import captured_work
        from quire.kernels.triton.attention import paged as attention
        from quire.kernels.triton.attention import rope_write as rope
        from quire.kernels.triton.experts import experts, route
        from quire.kernels.triton.latent import latent
        from quire.kernels.triton.latent import per_head as latent_heads
        from quire.kernels.triton.linear import norm, skinny
        from quire.kernels.triton.recurrent import channel_delta as recurrent_channel
        from quire.kernels.triton.recurrent import recurrent
        from quire.kernels.triton.recurrent import short_conv as recurrent_short
    except ImportError as error:
        if strict:
            what = f"Triton can't be used ({error})."
            raise QuireError("no_triton", what, "pip install triton, or use --kernels torch.") from error
        warnings.warn(f"Triton can't be used ({error}); plain torch kernels run instead, much slower.", stacklevel=3)
        return REFERENCE

    return Ops(
        rms_norm=norm.rms_norm,
        gate_mul=norm.gate_mul,
        norm_add=norm.norm_add,
        plan_angles=angles_from_positions,
        qk_norm_rope_write=rope.qk_norm_rope_write,
        plan_attention=attention.plan_attention,
        paged_attention=attention.paged_attention,
        norm_route=route.norm_route,
        run_experts=experts.run_experts,
        latent_write=latent.latent_write,
        latent_attention=latent.latent_attention,
        head_product=latent_heads.head_product,
        plan_recurrent=recurrent.plan_recurrent,
        gated_delta_net=recurrent.gated_delta_net,
        channel_delta_net=recurrent_channel.channel_delta_net,
        mamba2=recurrent.mamba2,
        short_conv=recurrent_short.short_conv,
        merges_shared=True,
        captures=True,
        captured_work=captured_work.CapturedWork,
        fused_linear=_Skinny(skinny.skinny_linear),
    )


def _fixed_triton_ops() -> Ops:
    """Those whose programs see one row each stay as they are; whatever would go by the number of rows is replaced."""
    ops = _triton_ops(strict=True)
    from quire.kernels.triton.attention import deterministic_tiles as fixed_tiles
    from quire.kernels.triton.attention import rope_write as rope
    from quire.kernels.triton.experts import deterministic as grouped
    from quire.kernels.triton.linear import deterministic as fixed_linear
    from quire.kernels.triton.recurrent import deterministic as walks

    return replace(
        ops,
        norm_route=grouped.norm_route,
        run_experts=grouped.run_experts,
        merges_shared=False,
        plan_recurrent=walks.plan_recurrent,
        gated_delta_net=walks.gated_delta_net,
        channel_delta_net=walks.channel_delta_net,
        mamba2=walks.mamba2,
        short_conv=walks.short_conv,
        qk_norm_rope_write=partial(rope.qk_norm_rope_write, heads_each=2),
        paged_attention=fixed_tiles.paged_attention,
        captured_work=fixed_tiles.CapturedTiles,
        fused_linear=fixed_linear.FixedLinear(),
    )


class _Skinny:
    """`triton.skinny` in the table's form. By measurement it beats cuBLAS at one row always, at a few but for a model's
    head, whose outputs are so many that either is busy reading, and at some more where outputs are no more than inputs
    or a gate's kernel is spared."""

    FEW_ROWS, SOME_ROWS = 16, 32
    MAX_OUTPUTS = 1 << 15  # for more than one row

    def __init__(self, skinny_linear: Callable[..., Tensor]):
        self._linear = skinny_linear

    def wins(self, num_rows: int, weight: Tensor, gate: Curve | None) -> bool:
        num_outputs, num_inputs = weight.shape
        if num_rows == 1 or gate is not None:
            return num_rows <= self.SOME_ROWS
        most = self.SOME_ROWS if num_outputs <= num_inputs else self.FEW_ROWS
        return num_rows <= most and num_outputs <= self.MAX_OUTPUTS

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        eps: float,
        gate: Curve | None,
        residual: Tensor | None,
    ) -> Tensor:
        return self._linear(x, weight, bias, norm_weight=norm_weight, eps=eps, gate=gate, residual=residual)


class FirstOf:
    """Implements `FusedLinear` by several: the first that wins does the work."""

    def __init__(self, *candidates: FusedLinear):
        self._candidates = candidates

    def wins(self, num_rows: int, weight: Tensor, gate: Curve | None) -> bool:
        return any(candidate.wins(num_rows, weight, gate) for candidate in self._candidates)

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        eps: float,
        gate: Curve | None,
        residual: Tensor | None,
    ) -> Tensor:
        winner = next(each for each in self._candidates if each.wins(len(x), weight, gate))
        return winner.run(x, weight, bias, norm_weight, eps, gate, residual)


@dataclass(frozen=True, slots=True)
class RowOps:
    """What a captured step does besides the model: gather its inputs from permanent rows, choose, append."""

    gather_rows: Callable[..., Any]
    gather_slots: Callable[..., Tensor]
    choose: Callable[..., tuple[Tensor, Tensor]]


def select_row_ops(device_type: str) -> RowOps | None:
    """None where steps can't be captured."""
    return triton_rows() if device_type == "cuda" else None


def triton_rows() -> RowOps | None:
    try:
        from quire.kernels.triton import step_inputs as rows
        from quire.kernels.triton.sampling import sample
    except ImportError:
        return None
    return RowOps(rows.gather_rows, rows.gather_slots, sample.sample_rows)


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """Logits to tokens in a few kernels, for devices where torch's passes over [samples, vocab] would be many. The
    meaning is that of `quire.sampling`; `sampling.fused` puts them in order."""

    sample_rows: Callable[..., tuple[Tensor, Tensor]]  # greedy and temperature alone
    sample_filtered: Callable[..., tuple[Tensor, Tensor]]  # ... and top-k, top-p, min-p, top-n-sigma
    copy_samples: Callable[[Tensor, Tensor], Tensor]
    add_bias: Callable[..., None]
    apply_penalties: Callable[..., None]
    forbid_stops: Callable[..., None]
    forbid_bad_words: Callable[..., None]
    score_rows: Callable[..., tuple[Tensor, ...]]


def select_sampling(device_type: str, deterministic: bool = False) -> SamplingOps | None:
    """The sampling kernels of a device; None where there are none and the sampler's own torch runs."""
    ops = triton_sampling() if device_type == "cuda" else None
    if ops is None or not deterministic:
        return ops
    from quire.kernels.triton.sampling import deterministic as fixed_sampling

    return replace(ops, sample_filtered=fixed_sampling.sample_filtered)


def triton_sampling() -> SamplingOps | None:
    try:
        from quire.kernels.triton.sampling import edits as sample_edits
        from quire.kernels.triton.sampling import filters as sample_filters
        from quire.kernels.triton.sampling import logprobs as sample_logprobs
        from quire.kernels.triton.sampling import sample
    except ImportError:
        return None
    return SamplingOps(
        sample_rows=sample.sample_rows,
        sample_filtered=sample_filters.sample_filtered,
        copy_samples=sample_edits.copy_samples,
        add_bias=sample_edits.add_bias,
        apply_penalties=sample_edits.apply_penalties,
        forbid_stops=sample_edits.forbid_stops,
        forbid_bad_words=sample_edits.forbid_bad_words,
        score_rows=sample_logprobs.score_rows,
    )


def select_choice(device_type: str, kernels: str = "auto") -> Callable[..., tuple[Tensor, Tensor]] | None:
    """A CPU's own way from logits to tokens for greedy and temperature sampling; None where there is none."""
    native = _open_native(kernels) if device_type == "cpu" else None
    if native is None:
        return None
    from quire.kernels.native.ops import NativeOps

    return NativeOps(native).choose
