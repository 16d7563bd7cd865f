"""A kernel of a mixture, of latents or of a recurrent layer that fails where the model is built: one line, and the
reference takes its place and the model answers as ever; or a refusal, when asked to be strict. The kernels here are
stand-ins, as particular about what they are given as those on a GPU; `tests/gpu/trial_checks.py` has the real ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.kernels.angles import Angles, angle_tables, angles_from_positions
from quire.kernels.expert_types import GatedActivation, Routing
from quire.kernels.recurrent_types import ConvShape, RecurrentShape
from quire.kernels.table import REFERENCE, Ops
from quire.kernels.validation.expert_trials import ExpertsTrialShape, list_expert_trials
from quire.kernels.validation.latent_trials import LatentTrialShape, list_latent_trials
from quire.kernels.validation.recurrent_trials import MambaTrialShape, mamba_trial, short_conv_trial
from quire.kernels.validation.trials import failure, settle_ops
from quire.models.loading import loader
from quire.models.loading.kernel_trials import Trials, select_kernels
from quire.types import QuireError, SamplingParams
from tests.cpu.families.fp8_in_torch import Fp8InTorch, Kernels
from tests.cpu.families.harness import all_families, save_checkpoint
from tests.cpu.rig import CPU, load, make_engine, run

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [[7 * i * i % 250 + 3 for i in range(n)] for n in (19, 1, 6)]
COMPILER = "PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr: a page of text"


@dataclass(frozen=True)
class Own:
    """A plan in a form of its own: nobody else can read it."""

    plan: Any


def plan_own(make: Callable[..., Any]) -> Callable[..., Own]:
    return lambda *args, row_index=None: Own(make(*args))


def attend(row: Callable[..., Any]) -> Callable[..., Any]:
    """Of queries whose elements lie one behind the other."""

    def run(q: Any, other: Any, cache: Any, plan: Any, *rest: Any) -> Any:
        assert q.stride(-1) == 1 and other.is_contiguous()
        return row(q, other, cache, plan.plan, *rest)

    return run


def walk(row: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: row(*args[:-1], args[-1].plan)


def tables(angles: Angles, dtype: torch.dtype) -> Angles:
    assert angles.positions is not None and angles.frequencies is not None
    return angle_tables(angles.positions, angles.frequencies, angles.scale, dtype)


def turn_and_write(qkv: Any, q_weight: Any, k_weight: Any, eps: float, angles: Angles, *rest: Any) -> Any:
    return REFERENCE.qk_norm_rope_write(qkv, q_weight, k_weight, eps, tables(angles, qkv.dtype), *rest).contiguous()


def write_latent(q: Any, entry: Any, norm: Any, eps: float, angles: Angles, *rest: Any) -> Any:
    return REFERENCE.latent_write(q, entry, norm, eps, tables(angles, q.dtype), *rest).contiguous()


def route(*args: Any) -> Any:
    x, chosen, weights = REFERENCE.norm_route(*args)
    return x, chosen.int(), weights


def apply_experts(x: Any, experts: Any, chosen: Any, *rest: Any) -> Any:
    assert chosen.dtype == torch.int32
    return REFERENCE.run_experts(x, experts, chosen, *rest)


STAND_INS = replace(
    REFERENCE,
    rms_norm=lambda *args: REFERENCE.rms_norm(*args),
    gate_mul=lambda *args: REFERENCE.gate_mul(*args),
    norm_add=lambda x, weight, eps, stream, factor: stream.add_(REFERENCE.rms_norm(x, weight, eps), alpha=factor),
    head_product=lambda *args: torch.bmm(*args),
    plan_angles=angles_from_positions,
    qk_norm_rope_write=turn_and_write,
    plan_attention=plan_own(REFERENCE.plan_attention),
    paged_attention=attend(REFERENCE.paged_attention),
    norm_route=route,
    run_experts=apply_experts,
    latent_write=write_latent,
    latent_attention=attend(REFERENCE.latent_attention),
    plan_recurrent=plan_own(REFERENCE.plan_recurrent),
    gated_delta_net=walk(REFERENCE.gated_delta_net),
    channel_delta_net=walk(REFERENCE.channel_delta_net),
    mamba2=walk(REFERENCE.mamba2),
    short_conv=walk(REFERENCE.short_conv),
    captures=True,
    captured_work=lambda *args: None,
)


def fails(*args: Any) -> Any:
    raise RuntimeError(COMPILER)


def lying(real: Callable[..., Any]) -> Callable[..., Any]:
    def lies(*args: Any) -> Any:
        out = real(*args)
        return (*out[:-1], out[-1] * 1.5) if isinstance(out, tuple) else out * 1.5

    return lies


@dataclass(frozen=True)
class Case:
    family: str
    op: str  # that fails
    said: str
    captures: bool = False  # steps can still be captured
    stays: str | None = None  # an op that does not go with it


CASES = [
    Case("qwen3_moe", "run_experts", "experts", stays="norm_route"),
    Case("qwen3_moe", "norm_route", "router", captures=True, stays="run_experts"),
    Case("qwen3_moe", "qk_norm_rope_write", "rope", stays="run_experts"),
    Case("gpt_oss", "run_experts", "experts", stays="paged_attention"),
    Case("gpt_oss", "paged_attention", "attention", stays="run_experts"),
    Case("deepseek_v2", "latent_write", "latent write", stays="latent_attention"),
    Case("deepseek_v3", "latent_attention", "latent attention", stays="latent_write"),
    Case("deepseek_v3", "norm_route", "router", captures=True, stays="latent_write"),
    Case("deepseek_v3", "head_product", "products by head", captures=True, stays="latent_attention"),
    Case("gemma2", "norm_add", "norm of what is added", captures=True, stays="rms_norm"),
    Case("qwen3_next", "gated_delta_net", "delta net", stays="paged_attention"),
    Case("qwen3_next", "rms_norm", "norm", captures=True, stays="gated_delta_net"),
    Case("kimi_linear", "channel_delta_net", "Kimi delta net", stays="latent_attention"),
    Case("kimi_linear", "latent_attention", "latent attention", stays="channel_delta_net"),
    Case("apertus", "paged_attention", "attention"),
    Case("nemotron_h experts", "mamba2", "Mamba2", stays="run_experts"),
    Case("lfm2_moe", "short_conv", "short convolution", stays="run_experts"),
    Case("granitemoehybrid", "run_experts", "experts", stays="mamba2"),
    Case("gemma4 experts", "run_experts", "experts", stays="norm_route"),
    Case("gemma4 experts", "norm_route", "router", captures=True, stays="run_experts"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("model")
            save_checkpoint(next(family for family in all_families() if family.name == name), folders[name])
        return folders[name]

    return find


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}, {case.op}")
@pytest.mark.parametrize("how", ["raises", "lies"])
def test_a_model_whose_kernel_fails_answers_all_the_same(
    case: Case, how: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it must not be asked again: it would raise, or spoil the tokens."""
    folder = checkpoint(case.family)
    expected = run(make_engine(load(folder, kernels="torch")), PROMPTS, GREEDY)
    bad = fails if how == "raises" else lying(getattr(STAND_INS, case.op))
    ops = replace(STAND_INS, **{case.op: bad})
    monkeypatch.setattr(loader, "select_ops", lambda *args: ops)
    with pytest.warns(UserWarning) as said:
        model: Any = load(folder)
    lines = [str(line.message) for line in said if "has no family of its own" not in str(line.message)]
    assert len(lines) == 1 and f"The {case.said} kernel can't be used here (" in lines[0] and "\n" not in lines[0]
    assert ("PTXAS error" if how == "raises" else "ArithmeticError: ") in lines[0]
    assert model.ops.captures == case.captures and (model.ops.captured_work is not None) == case.captures
    assert case.stays is None or getattr(model.ops, case.stays) is getattr(STAND_INS, case.stays)
    assert run(make_engine(model), PROMPTS, GREEDY) == expected
    with pytest.raises(QuireError, match=f"The {case.said} kernel") as refused:
        load(folder, strict_kernels=True)
    assert refused.value.code == "kernel_failed" and "\n" not in str(refused.value)


ALL = ("norm", "gate_mul", "fused product", "rope", "attention")
ADDED = ("norm", "norm of what is added", *ALL[1:], *ALL[3:])  # norms behind blocks, two kinds of attention


@pytest.mark.parametrize(("family", "tried"), [
    ("llama", ALL),
    ("olmo", ALL[1:]),  # no norm of this kind
    ("gemma2", ADDED),
    ("qwen3_moe", (*ALL, "router", "experts")),
    ("mixtral", ("norm", "fused product", "rope", "attention", "router", "experts")),
    ("flex_olmo", (*ADDED[:2], "fused product", "rope", "attention", "router", "experts")),
    ("gpt_oss", ("norm", "fused product", "rope", "attention", "rope", "attention", "router", "experts")),
    ("deepseek_v3", (*ALL[:3], "latent write", "latent attention", "products by head", "router", "experts")),
    ("qwen3_next", (*ALL, "delta net", "router", "experts")),
    ("qwen3_5_text", (*ALL, "delta net")),
    ("nemotron_h experts", ("norm", "fused product", "rope", "attention", "Mamba2", "router", "experts")),
    ("gemma4 experts", (*ADDED, "router", "experts")),
    ("mamba2", ("norm", "fused product", "Mamba2")),
    ("falcon_h1", (*ALL, "Mamba2")),
    ("lfm2", (*ALL, "short convolution")),
    ("apertus", ("attention",)),  # transformers' own code
])  # fmt: skip
def test_what_a_model_uses_is_tried_and_no_more(
    family: str, tried: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the ops as they are nothing is said, and nothing changes; strict or deterministic."""
    model = build(family, STAND_INS)
    trials = Trials(model, torch.float32, CPU, 64)
    assert tuple(row.name for row in trials.rows()) == tried
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for deterministic in (False, True):
            how = {"kernels": "auto", "strict": False, "deterministic": deterministic}
            assert select_kernels(STAND_INS, trials, **how) is STAND_INS


@pytest.mark.parametrize("ops", [REFERENCE, replace(STAND_INS, native=object())], ids=["torch", "native"])
def test_nothing_is_tried_where_the_reference_or_a_cpus_library_runs(ops: Ops) -> None:
    broken = ops if ops is REFERENCE else replace(ops, run_experts=fails)
    trials = Trials(build("qwen3_moe", REFERENCE), torch.float32, CPU, 64)
    assert select_kernels(broken, trials, kernels="auto", strict=True, deterministic=False) is broken


def test_the_deterministic_mode_has_no_second_path() -> None:
    trials = Trials(build("qwen3_moe", STAND_INS), torch.float32, CPU, 64)
    with pytest.raises(QuireError, match="experts kernel") as refused:
        select_kernels(replace(STAND_INS, run_experts=fails), trials, kernels="auto", strict=False, deterministic=True)
    assert refused.value.code == "kernel_failed"


def build(name: str, ops: Ops) -> Any:
    family = next(family for family in all_families() if family.name == name)
    config = family.config().to_dict()
    return loader.build_model(config, dtype="float32", device=CPU, page_tokens=4, ops=ops)[0]


# ---------------------------------------------------------------------------------------------------------------------
# What each row sees

LATENT = LatentTrialShape(3, 32, 8, 16, torch.float32, torch.float32, 64, 12)
GPT_OSS = ExpertsTrialShape(Routing(6, 2), 24, 24, 16, GatedActivation(1.702, 1.0, 7.0), torch.float32, torch.float32,
                            True, False, True, True)  # fmt: skip
DEEPSEEK = ExpertsTrialShape(Routing(32, 4, "sigmoid", True, 2.5, 8, 2, 2, True, num_shared=2), 24, 24, 16,
                             GatedActivation(), torch.float32, torch.float32, choice_bias=True)  # fmt: skip
QWEN3_NEXT = ExpertsTrialShape(Routing(16, 3, num_shared=1, shared_gated=True), 24, 24, 16, GatedActivation(),
                               torch.float32, torch.float32)  # fmt: skip
GEMMA4 = ExpertsTrialShape(Routing(8, 3), 24, 24, 16, GatedActivation(curve="gelu_tanh"), torch.float32, torch.float32,
                           residual=False, expert_scale=True)  # fmt: skip


def row_fails(ops: Ops, row: Any) -> bool:
    return failure(ops, row) is not None


def test_a_latent_that_is_not_written_is_missed() -> None:
    def forgets(q: Any, entry: Any, norm: Any, eps: float, angles: Angles, cache: Any, *rest: Any) -> Any:
        return write_latent(q, entry, norm, eps, angles, cache.clone(), *rest)

    write, attention, products = list_latent_trials(LATENT, CPU)
    assert not row_fails(STAND_INS, write) and not row_fails(STAND_INS, attention)
    assert row_fails(replace(STAND_INS, latent_write=forgets), write)
    for first in (True, False):  # a prompt or a decode alone
        ops = replace(STAND_INS, latent_attention=lambda q, *rest, first=first: (
            STAND_INS.latent_attention(q, *rest) * (1.2 if (q.shape[1] > 1) is first else 1.0)))  # fmt: skip
        assert row_fails(ops, attention)
    assert not row_fails(STAND_INS, products)
    for first in (True, False):  # of one token or of a few
        ops = replace(STAND_INS, head_product=lambda x, weight, first=first: (
            torch.bmm(x, weight) * (1.2 if (x.shape[1] == 1) is first else 1.0)))  # fmt: skip
        assert row_fails(ops, products)
        with pytest.warns(UserWarning, match="products by head"):
            assert settle_ops(replace(ops, captures=True), [products], strict=False).captures


def test_a_cache_in_fp8_has_no_second_path() -> None:
    rows = list_latent_trials(replace(LATENT, cache_dtype=torch.float8_e4m3fn), CPU)
    for row, op in zip(rows[:2], ("latent_write", "latent_attention"), strict=True):  # products know nothing of it
        with pytest.raises(QuireError, match=row.name) as refused:
            settle_ops(replace(STAND_INS, **{op: fails}), [row], strict=False)
        assert refused.value.code == "kernel_failed" and "FP8" in refused.value.hint


@pytest.mark.parametrize("shape", [GPT_OSS, DEEPSEEK, GEMMA4, QWEN3_NEXT, replace(GPT_OSS, scaled=True)],
                         ids=["gpt_oss", "deepseek", "gemma4", "qwen3_next", "fp8"])  # fmt: skip
def test_routers_and_experts_that_forget_something(shape: ExpertsTrialShape) -> None:
    router, experts = list_expert_trials(shape, CPU)
    assert not row_fails(STAND_INS, router) and not row_fails(STAND_INS, experts)

    def other_routing(**change: Any) -> Ops:
        return replace(STAND_INS, norm_route=lambda *args: (
            route(*args[:6], replace(args[6], **change), *args[7:])))  # fmt: skip

    def without(index: int) -> Ops:
        return replace(STAND_INS, norm_route=lambda *args: route(*args[:index], None, *args[index + 1 :]))

    def other_experts(**change: Any) -> Ops:
        return replace(STAND_INS, run_experts=lambda x, experts, *rest: (
            apply_experts(x, replace(experts, **change), *rest)))  # fmt: skip

    wrong = [other_routing(score="softmax" if shape is DEEPSEEK else "sigmoid"), other_routing(scale=1.3), without(1)]
    wrong += [other_routing(num_groups=1), other_routing(normalise=False)] if shape is DEEPSEEK else []
    wrong += [without(4)] if shape.router_bias else []
    wrong += [without(7)] if shape is GEMMA4 else []
    wrong += [other_routing(num_shared=0)] if shape.routing.num_shared else []
    assert all(row_fails(ops, router) for ops in wrong)
    if shape.gate_up_bias:
        changes: list[dict[str, Any]] = [{"activation": GatedActivation()}, {"gate_up_bias": None}, {"down_bias": None}]
        assert all(row_fails(other_experts(**change), experts) for change in changes)
    if shape is GEMMA4:
        assert row_fails(other_experts(activation=GatedActivation()), experts)
    if shape.scaled:
        sizes = {"gate_up_scale": 2 * shape.inner_width, "down_scale": shape.width}
        for name, size in sizes.items():
            assert row_fails(other_experts(**{name: torch.ones(shape.routing.num_experts, size)}), experts)

    def one_row_alone(x: Any, *rest: Any) -> Any:
        return apply_experts(x, *rest) * (2.0 if len(x) == 1 else 1.0)

    def no_residual(x: Any, weights: Any, chosen: Any, shares: Any, residual: Any) -> Any:
        return apply_experts(x, weights, chosen, shares, None)

    def first_expert(x: Any, weights: Any, chosen: Any, *rest: Any) -> Any:
        return apply_experts(x, weights, chosen.clamp(max=shape.routing.num_experts - 2), *rest)

    def shared_once(x: Any, weights: Any, chosen: Any, shares: Any, residual: Any) -> Any:
        if len(x) == 2:
            shares = shares.masked_fill(torch.isin(chosen, chosen[0]) & torch.tensor([[False], [True]]), 0.0)
        return apply_experts(x, weights, chosen, shares, residual)

    for wrong_experts in (one_row_alone, no_residual, first_expert, shared_once):
        if wrong_experts is no_residual and not shape.residual:
            continue
        assert row_fails(replace(STAND_INS, run_experts=wrong_experts), experts), wrong_experts.__name__
    stray = replace(STAND_INS, norm_route=lambda *args: (route(*args)[0], route(*args)[1] + 100, route(*args)[2]))
    assert "experts that do not exist" in str(failure(stray, router))


def test_a_mamba_that_forgets_something() -> None:
    shape = MambaTrialShape(RecurrentShape(2, 4, 8, 12, 4), 2, True, (0.0, float("inf")), torch.float32)
    row = mamba_trial(shape, CPU)
    assert not row_fails(STAND_INS, row)

    def forgets(field: str, value: Any) -> Ops:
        return replace(STAND_INS, mamba2=lambda x, weights, *rest: (
            STAND_INS.mamba2(x, replace(weights, **{field: value}), *rest)))  # fmt: skip

    def keeps_state(x: Any, weights: Any, shape: Any, state: Any, plan: Any) -> Any:
        return STAND_INS.mamba2(x, weights, shape, state.clone(), plan)

    assert row_fails(forgets("conv_bias", None), row) and row_fails(forgets("norm_groups", 1), row)
    assert row_fails(forgets("dt_high", 0.1), row) and row_fails(replace(STAND_INS, mamba2=keeps_state), row)
    assert row_fails(forgets("norm", None), row) and row_fails(forgets("gate_first", False), row)
    for changes in ({"norm": False}, {"gate_first": False}):
        other = mamba_trial(replace(shape, **changes), CPU)
        assert not row_fails(STAND_INS, other) and row_fails(forgets("gate_first", True), other) == (
            "norm" not in changes
        )


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_convolution_that_forgets_something(has_bias: bool) -> None:
    row = short_conv_trial(ConvShape(24, 3), has_bias, torch.float32, CPU)
    assert not row_fails(STAND_INS, row)

    def without(change: Callable[..., Any]) -> Ops:
        return replace(STAND_INS, short_conv=lambda *args: STAND_INS.short_conv(*change(*args)))

    def oldest(x: Any, weights: Any, *rest: Any) -> Any:
        conv = weights.conv.clone()
        conv[:, :, 0] = 0
        return x, replace(weights, conv=conv), *rest

    def bias(x: Any, weights: Any, *rest: Any) -> Any:
        return x, replace(weights, bias=None), *rest

    def state(x: Any, weights: Any, shape: Any, state: Any, plan: Any) -> Any:
        return x, weights, shape, state.clone(), plan

    assert row_fails(without(oldest), row) and row_fails(without(state), row)
    assert row_fails(without(bias), row) == has_bias


def test_weights_in_fp8_have_no_second_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the scheme's kernels in torch; who asks for FP8 gets it, or a line."""
    monkeypatch.setattr(loader, "_choose_scheme", lambda *args: (torch.float32, Fp8InTorch()))
    trials = Trials(build("qwen3_moe", STAND_INS), torch.float32, CPU, 64)
    names = [row.name for row in trials.rows()]
    gated = "FP8 product with its gate"
    assert names == ["norm", "FP8 product", gated, "rope", "attention", "router", "FP8 experts"]
    assert settle_ops(STAND_INS, trials.rows(), strict=False) is STAND_INS
    for kernel in ("quantize_rows", "scaled_product", "skinny_linear"):
        with monkeypatch.context() as broken:
            broken.setattr(Kernels, kernel, fails)
            with pytest.raises(QuireError, match="FP8 product kernel") as refused:
                settle_ops(STAND_INS, trials.rows(), strict=False)
        assert refused.value.code == "kernel_failed" and "FP8 out" in refused.value.hint
    with pytest.raises(QuireError, match="FP8 experts kernel"):
        settle_ops(replace(STAND_INS, run_experts=fails), trials.rows(), strict=False)


def test_a_trial_that_runs_out_of_memory_is_no_fault_of_the_kernels() -> None:
    def too_much(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    ops = replace(STAND_INS, run_experts=too_much)
    assert settle_ops(ops, list_expert_trials(GPT_OSS, CPU), strict=True) is ops
