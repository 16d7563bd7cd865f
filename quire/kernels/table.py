"""The ops table: selects the implementation of each op for a device, once, when a model is built.

All layers call ops through the `Ops` of their model, so a faster implementation is one changed field here.
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

from quire.kernels import four_bits as reference_four_bits
from quire.kernels import training
from quire.kernels.activations import Curve
from quire.kernels.angles import Angles, angle_tables, angles_from_positions
from quire.kernels.cache_forms import PackedPlane
from quire.kernels.deterministic import dense as deterministic_dense
from quire.kernels.deterministic import experts as deterministic_experts
from quire.kernels.deterministic import latent as deterministic_latent
from quire.kernels.deterministic import recurrent as deterministic_recurrent
from quire.kernels.reference import attention as reference_attention
from quire.kernels.reference import experts as reference_experts
from quire.kernels.reference import latent as reference_latent
from quire.kernels.reference import recurrent as reference_recurrent
from quire.kernels.reference import small_ops as reference
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.kernels.native.library import Native

LIBRARY_NAMES = ("flash-attn", "flashinfer", "cudnn")  # values of `kernels` that name a library: `libraries.choose`
# Values of `kernels` that name a build of the native library.
INSTRUCTION_SETS = ("avx512", "avx2", "i8mm", "dotprod", "portable")


class FusedLinear(Protocol):
    """A linear layer fused with its norm, gate and residual addition, used where the fusion is faster.

    Implementations fuse all of it into one kernel for few rows, or the gate into the GEMM's epilogue for many."""

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


def split_planes(cache: Tensor) -> tuple[Tensor, ...]:
    """Returns the K and the V plane of each layer in turn, [pages, page_tokens, kv_heads, head_dim] each."""
    return cache.flatten(0, 1).unbind(0)


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation per op, with the signature and semantics of the reference function of the same name."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    gate_mul: Callable[..., Tensor]
    plan_angles: Callable[..., Angles]
    qk_norm_rope_write: Callable[..., Tensor]
    plan_attention: Callable[..., Any]  # its result is valid only for the `paged_attention` of the same table
    paged_attention: Callable[..., Tensor]
    norm_route: Callable[..., tuple[Tensor, Tensor, Tensor]]
    run_experts: Callable[..., Tensor]
    latent_write: Callable[..., Tensor]
    latent_attention: Callable[..., Tensor]  # takes the plan of the same table's `plan_attention`
    plan_recurrent: Callable[..., Any]  # its result is valid only for the four recurrent ops of the same table
    gated_delta_net: Callable[..., Tensor]
    channel_delta_net: Callable[..., Tensor]
    mamba2: Callable[..., Tensor]
    short_conv: Callable[..., Tensor]
    planes: Callable[[Tensor], tuple[Any, ...]] = split_planes  # keys and values of each layer, as attention takes them
    norm_add: Callable[..., Tensor] | None = None  # fused `RMSNorm.add_to`; None: norm and addition run separately
    elementwise: Callable[..., Tensor] = reference.elementwise
    four_bit_linear: Callable[..., Tensor] = reference_four_bits.four_bit_linear  # takes `FourBits`
    head_product: Callable[[Tensor, Tensor], Tensor] = torch.bmm  # [heads, tokens, in] times [heads, in, out]
    merges_shared: bool = False  # whether a shared expert is faster as one of the routed experts than on its own
    captures: bool = False  # whether attention reads permanent page tables, as CUDA graphs of decode steps need
    captured_work: Callable[[int, int, int], Any] | None = None  # fixed work lists for captured mixed steps
    fused_linear: FusedLinear | None = None  # replaces norm, GEMM and epilogue where its `wins` says so
    native: Native | None = None  # the CPU library behind this table, which also packs weights and runs whole models


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


# Ops that gradients flow through, as far as dense models without a scale or a layer norm after a block need them.
TRAIN = replace(
    REFERENCE,
    gate_mul=training.gate_mul,
    qk_norm_rope_write=training.qk_norm_rope_write,
    plan_attention=training.plan_attention,
    paged_attention=training.paged_attention,
    planes=training.fresh_planes,
    norm_add=training.norm_add,
    fused_linear=training.DifferentiableLinear(),
)


# Deterministic ops: results are bitwise independent of the rest of the batch. The loader decides which models need no
# other ops than these.
_DETERMINISTIC_LAYERS: dict[str, Any] = {  # ops that the native library does not have
    "norm_route": deterministic_experts.norm_route,
    "run_experts": deterministic_experts.run_experts,
    "elementwise": deterministic_dense.elementwise,
    "fused_linear": deterministic_dense.TiledLinear(),
}
DETERMINISTIC = replace(
    REFERENCE,
    rms_norm=deterministic_dense.rms_norm,
    gate_mul=deterministic_dense.gate_mul,
    plan_angles=deterministic_dense.plan_angles,
    qk_norm_rope_write=deterministic_dense.qk_norm_rope_write,
    plan_attention=deterministic_dense.plan_attention,
    paged_attention=deterministic_dense.paged_attention,
    latent_write=deterministic_latent.latent_write,
    latent_attention=deterministic_latent.latent_attention,
    head_product=deterministic_latent.head_product,
    plan_recurrent=deterministic_recurrent.plan_recurrent,
    gated_delta_net=deterministic_recurrent.gated_delta_net,
    channel_delta_net=deterministic_recurrent.channel_delta_net,
    mamba2=deterministic_recurrent.mamba2,
    short_conv=deterministic_recurrent.short_conv,
    **_DETERMINISTIC_LAYERS,
)


def deterministic_ops(device_type: str, kernels: str = "auto") -> Ops:
    """Returns the ops table of the deterministic mode.

    On a CPU it is the native library's if it is built (its kernels are deterministic for the models that it runs as a
    whole), otherwise torch in tiles of one shape. On CUDA it is Triton's; libraries are refused."""
    _check_device(kernels, device_type)
    if device_type == "cuda":
        if kernels in ("auto", "triton"):
            return _deterministic_triton_ops()
        what = f"The deterministic mode takes no --kernels {kernels} on CUDA: only Triton's kernels are deterministic."
        raise QuireError("invalid_parameter", what, "Leave --kernels or --deterministic out.", param="kernels")
    native = _open_native(kernels)
    if native is None:
        return DETERMINISTIC
    return replace(_native_ops(native), **_DETERMINISTIC_LAYERS, **_native_recurrent(native, deterministic_recurrent))


def select_ops(device_type: str, kernels: str = "auto", strict: bool = False) -> Ops:
    """Returns the ops table for "cpu", "cuda", ...; devices without kernels of their own run the torch reference.

    `kernels`: "torch" forces the reference, "triton" forces Triton, an instruction set forces that native build, and an
    attention library's name selects Triton's table, into which the loader puts the library. `strict`: raise instead of
    falling back."""
    _check_device(kernels, device_type)
    if kernels == "torch":
        return REFERENCE
    if device_type == "cuda":
        return _triton_ops(strict or kernels in ("triton", *LIBRARY_NAMES))
    native = _open_native(kernels) if device_type == "cpu" else None
    return REFERENCE if native is None else _native_ops(native)


def _check_device(kernels: str, device_type: str) -> None:
    """Refuses kernels that do not fit the device, because falling back to others would go unnoticed."""
    needed = {**dict.fromkeys(("triton", *LIBRARY_NAMES), "cuda"), **dict.fromkeys(INSTRUCTION_SETS, "cpu")}
    if needed.get(kernels, device_type) != device_type:
        what = f"kernels={kernels} needs a {'CUDA device' if needed[kernels] == 'cuda' else 'CPU'}."
        raise QuireError("invalid_parameter", what, "Use auto.", param="kernels")


def _open_native(kernels: str) -> Native | None:
    """Opens the native library; returns None if it is not built, unless `kernels` names an instruction set."""
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
    """Returns the table's recurrent fields. `torch_ops` is the fallback for shapes the library does not support."""
    from quire.kernels.native.recurrent import NativeRecurrent

    ops = NativeRecurrent(native, torch_ops)
    names = ("plan_recurrent", "gated_delta_net", "channel_delta_net", "mamba2", "short_conv")
    return {name: getattr(ops, name) for name in names}


def _triton_ops(strict: bool) -> Ops:
    """Returns Triton's table; if Triton can't be imported, warns and returns the reference, or raises if `strict`."""
    try:
        from quire.kernels.triton.attention import captured_work, paged, rope_write
        from quire.kernels.triton.experts import experts, route
        from quire.kernels.triton.latent import latent, per_head
        from quire.kernels.triton.linear import four_bits, norm, skinny
        from quire.kernels.triton.recurrent import channel_delta, recurrent, short_conv
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
        qk_norm_rope_write=rope_write.qk_norm_rope_write,
        plan_attention=paged.plan_attention,
        paged_attention=paged.paged_attention,
        norm_route=route.norm_route,
        run_experts=experts.run_experts,
        latent_write=latent.latent_write,
        latent_attention=latent.latent_attention,
        four_bit_linear=four_bits.four_bit_linear,
        head_product=per_head.head_product,
        plan_recurrent=recurrent.plan_recurrent,
        gated_delta_net=recurrent.gated_delta_net,
        channel_delta_net=channel_delta.channel_delta_net,
        mamba2=recurrent.mamba2,
        short_conv=short_conv.short_conv,
        merges_shared=True,
        captures=True,
        captured_work=captured_work.CapturedWork,
        fused_linear=_SkinnyLinear(skinny.skinny_linear),
    )


def with_packed_cache(ops: Ops) -> Ops:
    """Returns Triton's table with ops that read and write packed caches, beside those for the layers that stay whole.
    Their steps can't be captured."""
    from quire.kernels.triton.attention import packed

    def choose(plain: Callable[..., Any], other: Callable[..., Any], place: int) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            is_packed = isinstance(args[place], PackedPlane) or args[place] is torch.uint8
            return (other if is_packed else plain)(*args, **options)

        return run

    return replace(
        ops,
        qk_norm_rope_write=choose(ops.qk_norm_rope_write, packed.qk_norm_rope_write, 5),
        plan_attention=choose(ops.plan_attention, packed.plan_attention, 6),
        paged_attention=choose(ops.paged_attention, packed.paged_attention, 1),
        captures=False,
        captured_work=None,
    )


def _deterministic_triton_ops() -> Ops:
    """Returns Triton's table with every kernel replaced whose tiling depends on the number of rows."""
    ops = _triton_ops(strict=True)
    from quire.kernels.triton.attention import deterministic_tiles, rope_write
    from quire.kernels.triton.experts import deterministic as triton_experts
    from quire.kernels.triton.linear import deterministic as triton_linear
    from quire.kernels.triton.recurrent import deterministic as triton_recurrent

    return replace(
        ops,
        norm_route=triton_experts.norm_route,
        run_experts=triton_experts.run_experts,
        merges_shared=False,
        plan_recurrent=triton_recurrent.plan_recurrent,
        gated_delta_net=triton_recurrent.gated_delta_net,
        channel_delta_net=triton_recurrent.channel_delta_net,
        mamba2=triton_recurrent.mamba2,
        short_conv=triton_recurrent.short_conv,
        qk_norm_rope_write=partial(rope_write.qk_norm_rope_write, heads_each=2),
        paged_attention=deterministic_tiles.paged_attention,
        captured_work=deterministic_tiles.CapturedTiles,
        fused_linear=triton_linear.DeterministicLinear(),
    )


class _SkinnyLinear:
    """Implements `FusedLinear` with `triton.linear.skinny`.

    Measured against cuBLAS it always wins at one row; up to FEW_ROWS except for an LM head, where both are bound by
    reading the weight; and up to SOME_ROWS where there are no more outputs than inputs or a gate is fused."""

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


class FirstWinner:
    """Implements `FusedLinear` with several candidates, of which the first that wins runs."""

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
    """Ops of a captured step outside the model: gather inputs from permanent rows, sample, append the token."""

    gather_rows: Callable[..., Any]
    gather_slots: Callable[..., Tensor]
    choose: Callable[..., tuple[Tensor, Tensor]]


def select_row_ops(device_type: str) -> RowOps | None:
    """Returns the row ops of a device; None if its steps can't be captured as CUDA graphs."""
    return triton_rows() if device_type == "cuda" else None


def triton_rows() -> RowOps | None:
    try:
        from quire.kernels.triton import step_inputs
        from quire.kernels.triton.sampling import sample
    except ImportError:
        return None
    return RowOps(step_inputs.gather_rows, step_inputs.gather_slots, sample.sample_rows)


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """Fused sampling kernels, which replace torch's many passes over [samples, vocab].

    Their semantics are those of `quire.sampling`; `sampling.fused` calls them in order."""

    sample_rows: Callable[..., tuple[Tensor, Tensor]]  # greedy and temperature only
    sample_filtered: Callable[..., tuple[Tensor, Tensor]]  # with top-k, top-p, min-p and top-n-sigma
    copy_samples: Callable[[Tensor, Tensor], Tensor]
    add_bias: Callable[..., None]
    apply_penalties: Callable[..., None]
    forbid_stops: Callable[..., None]
    forbid_bad_words: Callable[..., None]
    score_rows: Callable[..., tuple[Tensor, ...]]


def select_sampling(device_type: str, deterministic: bool = False) -> SamplingOps | None:
    """Returns the sampling kernels of a device; None if there are none and the sampler runs in torch."""
    ops = triton_sampling() if device_type == "cuda" else None
    if ops is None or not deterministic:
        return ops
    from quire.kernels.triton.sampling import deterministic as triton_deterministic

    return replace(ops, sample_filtered=triton_deterministic.sample_filtered)


def triton_sampling() -> SamplingOps | None:
    try:
        from quire.kernels.triton.sampling import edits, filters, logprobs, sample
    except ImportError:
        return None
    return SamplingOps(
        sample_rows=sample.sample_rows,
        sample_filtered=filters.sample_filtered,
        copy_samples=edits.copy_samples,
        add_bias=edits.add_bias,
        apply_penalties=edits.apply_penalties,
        forbid_stops=edits.forbid_stops,
        forbid_bad_words=edits.forbid_bad_words,
        score_rows=logprobs.score_rows,
    )


def select_choice(device_type: str, kernels: str = "auto") -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Returns the native library's greedy and temperature sampling for CPUs; None if there is none."""
    native = _open_native(kernels) if device_type == "cpu" else None
    if native is None:
        return None
    from quire.kernels.native.ops import NativeOps

    return NativeOps(native).choose
