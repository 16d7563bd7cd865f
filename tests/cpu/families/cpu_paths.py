"""The ways a CPU can run a family beside its usual one: plain torch, and matrices in blocks by the native kernels.

`test_families` runs these with those of `checks`. Blocks are compared with plain torch over the very same blocks
decoded. Product by product next to nothing may differ; the whole may differ by what rounding activations alone does to
it, which is worked out in plain torch: some positions of some of these random models make much of a last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quire.kernels.activations import Curve
from quire.kernels.expert_types import ExpertWeights
from quire.kernels.native.library import BLOCK, ISAS, NotBuilt, open_native
from quire.kernels.reference import experts as reference_experts
from quire.kernels.table import REFERENCE, Ops
from quire.layers.experts import Experts
from quire.layers.linear import Linear
from quire.layers.quant.dense import Dense
from quire.layers.quant.scheme import apply_epilogue, apply_norm
from tests.cpu.families.decoded import decode_into, held_bytes
from tests.cpu.families.harness import PAGE_TOKENS, Case, relative_error
from tests.cpu.native_isas import open_or_skip
from tests.cpu.rig import load, load_whole

QUANTS = ("q8_0", "q4_0")
# What the largest magnitude in a block of 32 activations becomes: in `quantize` of rows.inl, and otherwise about as
# fine, to see how far a position goes that may fall to one side or the other.
LEVELS = (127 * 256, 32000, 31000, 30000)


def check_torch(case: Case) -> None:
    """`--kernels torch`: logits of the longest prompt as transformers has them."""
    model = load(case.folder, PAGE_TOKENS, kernels="torch")
    want = case.reference_logits(case.prompts[-1])
    assert relative_error(case.logits(model, 7), want) <= 1e-4


def check_quantized(case: Case) -> None:
    """`--quant`: every linear layer and every expert in blocks, and the logits those blocks stand for."""
    open_or_skip("portable")
    for quant in QUANTS:
        check_blocks(case, quant)


def check_isas(case: Case) -> None:
    """`--kernels`: each instruction set this machine has, the portable one included, in float32 and in blocks."""
    want = case.reference_logits(case.prompts[-1])
    found = [isa for isa in ISAS if _can_open(isa)]
    if not found:
        pytest.skip("the native kernels were not built")
    for isa in found:
        assert relative_error(case.logits(load(case.folder, PAGE_TOKENS, kernels=isa), 7), want) <= 1e-4, isa
        check_blocks(case, "q4_0", kernels=isa)


def check_blocks(case: Case, quant: str, **how: str) -> None:
    loaded = load_whole(case.folder, PAGE_TOKENS, quant=quant, **how)
    kept: Any = loaded.model
    assert loaded.weights_bytes == held_bytes(kept), "what the memory plan goes by"
    exact: Any = load(case.folder, PAGE_TOKENS, kernels="torch")
    forms = decode_into(exact, kept)
    assert quant.upper() in forms and forms <= {quant.upper(), "Q8_0", "F32"}
    want, by_sevens = case.logits(exact, 7), case.logits(kept, 7)
    if getattr(kept, "stack", None) is not None:  # a whole model in one call: other steps, the same bits
        assert torch.equal(case.logits(kept, 3).view(torch.int32), by_sevens.view(torch.int32))
    with rounding(exact, kept, LEVELS[0]):
        check_products(case, kept, exact)
    moved = []  # by rounding alone: of each position, [positions]
    for levels in LEVELS:
        with rounding(exact, kept, levels):
            moved.append(errors_at(case.logits(exact, 7), want))
    for got in (by_sevens, case.logits(kept, 2)):
        errors = errors_at(got, want)
        said = f"{quant} {how}: {errors.median():.1e}, at most {errors.max():.1e}; rounding explains"
        assert errors.median() <= 1e-5 + 1.5 * moved[0].median(), f"{said} {moved[0].median():.1e}"
        assert errors.max() <= 1e-4 + 4 * max(one.max() for one in moved), f"{said} {[one.max() for one in moved]}"


def _can_open(isa: str) -> bool:
    try:
        open_native(isa, 1)
    except NotBuilt:
        return False
    return True


def check_products(case: Case, kept: nn.Module, exact: nn.Module) -> None:
    """Layer by layer, on the inputs each really gets: a product of blocks gives what the blocks decoded give."""
    kept.__dict__["stack"] = None  # all layers in one call would hide them
    watched, handles = [], []
    for ours, theirs in zip(kept.modules(), exact.modules(), strict=True):
        if isinstance(ours, Linear) or isinstance(getattr(ours, "experts", None), Experts):
            watch = _Watch(theirs)
            watched.append(watch)
            handles.append(ours.register_forward_pre_hook(watch.before, with_kwargs=True))
            handles.append(ours.register_forward_hook(watch.after))
    case.logits(kept, 7)
    for handle in handles:
        handle.remove()
    del kept.__dict__["stack"]
    assert all(watch.calls for watch in watched)


class _Watch:
    """Runs a layer's twin on what the layer is given, and compares."""

    def __init__(self, twin: nn.Module):
        self.calls = 0
        self._twin = twin
        self._want = torch.empty(0)

    def before(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        cloned = {name: value.clone() if isinstance(value, Tensor) else value for name, value in named.items()}
        self._want = self._twin(*(value.clone() for value in args), **cloned)

    def after(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        self.calls += 1
        error = relative_error(out, self._want)
        assert error <= 1e-4, f"{type(module).__name__} {tuple(out.shape)}: {error:.1e}"


@contextmanager
def rounding(exact: nn.Module, kept: nn.Module, levels: int) -> Iterator[None]:
    """Meanwhile the products of `exact` take activations rounded as the native kernels round them."""
    linears = [
        theirs
        for ours, theirs in zip(kept.modules(), exact.modules(), strict=True)
        if isinstance(ours, Linear) and isinstance(ours.weight, list)
    ]
    before = [linear.scheme for linear in linears]
    for linear in linears:
        linear.scheme = _RoundedInputs(REFERENCE, levels)
    try:
        with patch.object(reference_experts, "_apply_expert", partial(_apply_rounded_expert, levels)):
            yield
    finally:
        for linear, scheme in zip(linears, before, strict=True):
            linear.scheme = scheme


class _RoundedInputs(Dense):
    def __init__(self, ops: Ops, levels: int):
        super().__init__(ops)
        self._levels = levels

    def apply(self, linear: Linear, x: Tensor, norm: Any, gate: Curve | None, residual: Tensor | None) -> Tensor:
        x = round_activations(apply_norm(self.ops, x, norm), self._levels)
        return apply_epilogue(self.ops, functional.linear(x, linear.weight, linear.bias), gate, residual)


def _apply_rounded_expert(levels: int, x: Tensor, experts: ExpertWeights, expert: int) -> Tensor:
    biases = [None if bias is None else bias[expert] for bias in (experts.gate_up_bias, experts.down_bias)]
    inner = functional.linear(round_activations(x, levels), experts.gate_up[expert], biases[0])
    inner = reference_experts.gated(inner, experts.activation)
    return functional.linear(round_activations(inner, levels), experts.down[expert], biases[1])


def round_activations(x: Tensor, levels: int) -> Tensor:
    """With a scale for each block of 32. Matrices whose columns are no whole blocks are kept as floats, and so is what
    they are multiplied with."""
    if x.shape[-1] % BLOCK:
        return x
    blocks = x.unflatten(-1, (-1, BLOCK))
    step = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / levels
    return ((blocks / step).round() * step).flatten(-2)


def errors_at(got: Tensor, want: Tensor) -> Tensor:
    """Of each position, as a share of the largest logit, [positions]."""
    return (got - want).abs().amax(1) / want.abs().max()


CPU_CHECKS: dict[str, Callable[[Case], None]] = {
    "plain torch": check_torch,
    "quantized": check_quantized,
    "instruction sets": check_isas,
}
# By default one family of each kind; of the others the usual path alone is run, the rest is slow.
BY_DEFAULT = {
    "plain torch": ("llama", "gemma2", "phi"),
    "instruction sets": ("llama", "gemma2", "phi"),
    "quantized": ("llama", "gemma2", "phi", "olmo2", "mixtral", "deepseek_v3", "nemotron_h"),
}
