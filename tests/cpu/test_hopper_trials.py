"""Which kernel prompts, latents, delta nets and Mamba2 get: Hopper's own if it is right there, else the one for
all cards, in one line. No GPU is needed to decide that."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from quire.kernels.explain import TYPICAL
from quire.kernels.recurrent_types import RecurrentShape
from quire.kernels.table import REFERENCE, Ops, deterministic_ops
from quire.kernels.validation import latent_trials as trial_latent
from quire.kernels.validation import prefill_trial as trial_prompts
from quire.kernels.validation import recurrent_trials as trial_recurrent
from quire.kernels.validation.latent_trials import LatentTrialShape, settle_latent, try_latent
from quire.kernels.validation.prefill_trial import settle_prompts, try_prompts
from quire.kernels.validation.recurrent_trials import (
    MambaTrialShape,
    settle_channel_delta,
    settle_delta_net,
    settle_mamba,
    try_delta_net,
    walk_steps,
)
from quire.kernels.validation.trials import TrialShape, try_attention
from quire.types import QuireError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
LATENTS = LatentTrialShape(128, 512, 64, 16, torch.bfloat16, torch.bfloat16)
DELTA_NET = RecurrentShape(16, 32, 128, 128, 4)
CHANNELS = RecurrentShape(32, 32, 128, 128, 4)
MAMBA = MambaTrialShape(RecurrentShape(8, 128, 128, 64, 4), 8, True, (0.0, float("inf")), torch.bfloat16)


def table() -> Ops:
    """The reference, in the clothes of Triton's table."""
    from quire.kernels.triton.recurrent import channel_delta as recurrent_channel
    from quire.kernels.triton.recurrent import recurrent

    return replace(
        REFERENCE, captures=True, plan_attention=lambda *args, row_index=None: REFERENCE.plan_attention(*args),
        gated_delta_net=recurrent.gated_delta_net, channel_delta_net=recurrent_channel.channel_delta_net,
        mamba2=recurrent.mamba2,
    )  # fmt: skip


def settle_net(ops: Ops, shape: tuple[RecurrentShape, torch.dtype], device: torch.device, *, strict: bool) -> Ops:
    return settle_delta_net(ops, *shape, device, strict=strict)


def settle_channels(ops: Ops, shape: tuple[RecurrentShape, torch.dtype], device: torch.device, *,
                    strict: bool) -> Ops:  # fmt: skip
    return settle_channel_delta(ops, *shape, device, strict=strict)


@dataclass(frozen=True)
class Kernel:
    row: str  # of the table
    said: str  # of it, when it can't be used
    trial: ModuleType
    attempt: str  # what the trial calls
    settle: Callable[..., Ops]
    shape: Any  # that gains by it
    others: tuple[Any, ...]  # that do too
    unfit: tuple[Any, ...]


KERNELS = (
    Kernel("latent_attention", "latent kernel", trial_latent, "try_latent", settle_latent, LATENTS,
           (replace(LATENTS, num_heads=32, page_tokens=8),),
           tuple(replace(LATENTS, **change) for change in (
               {"num_heads": 31}, {"rank": 256}, {"rope_dim": 32}, {"page_tokens": 24}, {"page_tokens": 4},
               {"cache_dtype": torch.float8_e4m3fn}, {"dtype": torch.float32, "cache_dtype": torch.float32}))),
    Kernel("gated_delta_net", "delta net's walk", trial_recurrent, "try_delta_net", settle_net,
           (DELTA_NET, torch.bfloat16),
           ((replace(DELTA_NET, num_groups=1, num_heads=4, conv_len=3), torch.float16),
            (replace(DELTA_NET, num_groups=4, num_heads=12, conv_len=2), torch.bfloat16)),
           ((DELTA_NET, torch.float32), *((replace(DELTA_NET, **change), torch.bfloat16) for change in (
               {"key_dim": 64}, {"value_dim": 64}, {"num_heads": 6, "num_groups": 2}, {"conv_len": 5},
               {"conv_len": 1}, {"beta_top": 2.0})))),
    Kernel("channel_delta_net", "Kimi delta net's walk", trial_recurrent, "try_channel_delta", settle_channels,
           (CHANNELS, torch.bfloat16),
           ((replace(CHANNELS, num_groups=8, num_heads=8, conv_len=3), torch.float16),
            (replace(CHANNELS, beta_top=2.0, conv_len=2), torch.bfloat16)),
           ((CHANNELS, torch.float32), *((replace(CHANNELS, **change), torch.bfloat16) for change in (
               {"key_dim": 64}, {"value_dim": 64}, {"num_groups": 16}, {"num_groups": 12, "num_heads": 12},
               {"conv_len": 5}, {"conv_len": 1})))),
    Kernel("mamba2", "Mamba2's walk", trial_recurrent, "try_mamba", settle_mamba, MAMBA,
           (replace(MAMBA, dtype=torch.float16, state=replace(MAMBA.state, num_heads=24, num_groups=1, conv_len=2)),
            replace(MAMBA, norm=False, conv_bias=False), replace(MAMBA, gate_first=False)),
           (replace(MAMBA, dtype=torch.float32), *(replace(MAMBA, state=replace(MAMBA.state, **change)) for change in (
               {"key_dim": 256}, {"value_dim": 128}, {"num_heads": 12, "num_groups": 1}, {"conv_len": 5},
               {"conv_len": 1})))),
)  # fmt: skip


@pytest.fixture(params=KERNELS, ids=lambda kernel: kernel.row)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return request.param


@pytest.fixture
def hopper(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """A Hopper card with Triton 3.6; returns a way to say what a trial does there."""
    import triton

    from quire.kernels.triton import launch

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(launch, "num_multiprocessors", lambda index: 132)
    monkeypatch.setattr(kernel.trial, kernel.attempt, lambda *args: None)
    return lambda attempt: monkeypatch.setattr(kernel.trial, kernel.attempt, attempt)


def settled(kernel: Kernel, shape: Any, strict: bool = False) -> bool:
    """Whether the kernel was taken, without a word, and nothing else."""
    ops = table()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = kernel.settle(ops, shape, CUDA, strict=strict)
    assert found is ops or found == replace(ops, **{kernel.row: getattr(found, kernel.row)})
    return found is not ops


def test_it_is_taken_where_it_is_right(kernel: Kernel, hopper: Any) -> None:
    assert settled(kernel, kernel.shape) and settled(kernel, kernel.shape, strict=True)
    assert all(settled(kernel, shape) for shape in kernel.others)


def test_other_shapes_are_left_alone(kernel: Kernel, hopper: Any) -> None:
    hopper(lambda *args: pytest.fail("nothing is tried"))
    assert not any(settled(kernel, shape) for shape in kernel.unfit)


def test_other_cards_are_left_alone(kernel: Kernel, hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert not settled(kernel, kernel.shape)
    assert kernel.settle(REFERENCE, kernel.shape, CUDA, strict=True) is REFERENCE


def test_a_kernel_that_fails_gives_way_in_one_line(kernel: Kernel, hopper: Any) -> None:
    def attempt(*args: Any) -> None:
        raise RuntimeError("PassManager::run failed\nand a page of text")

    hopper(attempt)
    ops = table()
    with pytest.warns(UserWarning, match=rf"{kernel.said} .*PassManager::run failed") as said:
        assert kernel.settle(ops, kernel.shape, CUDA, strict=False) is ops
    assert len(said) == 1 and "\n" not in str(said[0].message)
    with pytest.raises(QuireError, match=kernel.said) as refused:
        kernel.settle(ops, kernel.shape, CUDA, strict=True)
    assert refused.value.code == "kernel_failed"


def test_memory_that_runs_out_is_not_the_kernels_fault(kernel: Kernel, hopper: Any) -> None:
    def attempt(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    hopper(attempt)
    assert not settled(kernel, kernel.shape), "it was not tried, so it is not used; nobody is blamed"
    assert not settled(kernel, kernel.shape, strict=True)


def test_an_unknown_triton_is_not_tried(kernel: Kernel, hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", "3.8.0")
    hopper(lambda *args: pytest.fail("it might never come back"))
    ops = table()
    with pytest.warns(UserWarning, match=r"made for Triton 3\.6 and 3\.7, this is 3\.8\.0"):
        assert kernel.settle(ops, kernel.shape, CUDA, strict=False) is ops
    with pytest.raises(QuireError, match=r"made for Triton 3\.6 and 3\.7, this is 3\.8\.0") as refused:
        kernel.settle(ops, kernel.shape, CUDA, strict=True)
    assert refused.value.code == "kernel_failed"


def with_prompts(**rows: Any) -> tuple[Ops, list[bool]]:
    """Triton's table, as far as prompts are concerned: whether its plans may take the kernel for Hopper is noted."""
    asked: list[bool] = []

    def plan(*args: Any, row_index: Any = None, hopper: bool = True) -> Any:
        asked.append(hopper)
        return REFERENCE.plan_attention(*args)

    return replace(table(), plan_attention=plan, **rows), asked


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A Hopper card with Triton 3.6; returns a way to get another one."""
    import triton

    def put(version: str = "3.6.0", capability: int = 9) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (capability, 0))
        monkeypatch.setattr(triton, "__version__", version)

    put()
    return put


def test_prompts_go_without_their_kernel_where_it_fails_and_decodes_stay(
    card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all attention is tried with next is the kernel for all cards, not torch."""
    ops, asked = with_prompts()
    tried: list[list[TrialShape]] = []
    monkeypatch.setattr(trial_prompts, "try_prompts", lambda ops, shapes, device: tried.append(shapes))
    shapes = [TYPICAL, replace(TYPICAL, head_dim=64), replace(TYPICAL, window=64, cache_dtype=torch.float8_e4m3fn)]
    assert settle_prompts(ops, shapes, CUDA, strict=True) is ops and tried == [[shapes[0], shapes[2]]]
    unfit = [replace(TYPICAL, **change) for change in (
        {"head_dim": 64}, {"softcap": 30.0}, {"sinks": True}, {"page_tokens": 4}, {"cache_dtype": torch.float16},
        {"dtype": torch.float32, "cache_dtype": torch.float32})]  # fmt: skip
    assert settle_prompts(ops, unfit, CUDA, strict=True) is ops and len(tried) == 1
    monkeypatch.setattr(trial_prompts, "try_prompts", lambda *args: (_ for _ in ()).throw(RuntimeError("no good")))
    with pytest.warns(UserWarning, match=r"prompt attention for Hopper .*no good.* the portable Triton kernel") as said:
        found = settle_prompts(ops, shapes, CUDA, strict=False)
    assert len(said) == 1 and found == replace(ops, plan_attention=found.plan_attention)
    try_attention(found, replace(TYPICAL, dtype=torch.float32, cache_dtype=torch.float32), CPU)
    assert asked == [False, False], "a prompt and a decode, neither on that kernel"
    with pytest.raises(QuireError, match="no good"):
        settle_prompts(ops, shapes, CUDA, strict=True)


def test_the_prompts_trial_sees_what_is_wrong() -> None:
    shape = replace(TYPICAL, dtype=torch.float32, cache_dtype=torch.float32)
    ops, asked = with_prompts()
    try_prompts(ops, [shape, shape], CPU)
    assert asked == [True, True], "prompts alone"
    off, _ = with_prompts(paged_attention=lambda *args: REFERENCE.paged_attention(*args) * 1.1)
    with pytest.raises(ArithmeticError):
        try_prompts(off, [shape], CPU)


def test_every_model_that_attends_is_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.models.loading import kernel_trials as trials
    from tests.cpu.rig import load
    from tests.cpu.tiny_models import make_tiny

    asked: list[TrialShape] = []
    monkeypatch.setattr(trials, "settle_prompts", lambda ops, shapes, *_, **__: asked.extend(shapes) or ops)
    load(make_tiny("qwen3", tmp_path)[1])
    assert len(asked) == 1 and asked[0].qk_norm


def test_a_plan_without_it_lists_tiles_for_all_cards(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps that are launched and in those that are captured."""
    from quire.kernels.triton.attention import captured_work
    from quire.kernels.triton.attention import paged as attention

    for module in (attention, captured_work):
        monkeypatch.setattr(module, "supports_gluon", lambda index: True)
        monkeypatch.setattr(module, "num_multiprocessors", lambda index: 4)
    q = torch.zeros(8, 4, 128, dtype=torch.bfloat16)
    cache = torch.zeros(4, 16, 2, 128, dtype=torch.bfloat16)
    pages, positions = torch.ones(1, 2, dtype=torch.int32), torch.arange(8)
    for hopper in (True, False):
        plan = attention.plan_attention(pages, positions, [8], [8], 16, None, q.dtype, hopper=hopper)
        assert (attention._prepare(plan, q, cache, True).items is not None) is hopper
        work = captured_work.CapturedWork(8, 0, 1)
        assert (work.prepare(plan, q, cache, True).items is not None) is hopper


def test_prompts_go_without_gluon_where_its_triton_is_unknown(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not compile there, or wait forever: decodes must not suffer for it."""
    from quire.kernels.triton.launch import supports_gluon

    ops, _ = with_prompts()
    monkeypatch.setattr(trial_prompts, "try_prompts", lambda *args: None)
    for version in ("3.6.0", "3.7.0", "3.7.1"):
        card(version)
        assert supports_gluon.__wrapped__(0) and settle_prompts(ops, [TYPICAL], CUDA, strict=True) is ops
    card("3.8.0")
    assert not supports_gluon.__wrapped__(0)
    with pytest.warns(UserWarning, match=r"for Triton 3\.6 and 3\.7, this is 3\.8\.0.*; the portable Triton kernel"):
        assert settle_prompts(ops, [TYPICAL], CUDA, strict=False) is not ops
    with pytest.raises(QuireError, match=r"for Hopper .*made for Triton 3\.6 and 3\.7, this is 3\.8\.0") as refused:
        settle_prompts(ops, [TYPICAL], CUDA, strict=True)
    assert refused.value.code == "kernel_failed"
    for version in ("3.6.0", "3.8.0"):
        card(version, 8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not supports_gluon.__wrapped__(0) and settle_prompts(ops, [TYPICAL], CUDA, strict=True) is ops


@pytest.mark.parametrize("kernel", KERNELS[1:], ids=lambda kernel: kernel.row)
def test_the_deterministic_modes_recurrences_are_left_alone(kernel: Kernel, hopper: Any) -> None:
    """Its order of sums is the point of it. The loader does not even ask."""
    ops = deterministic_ops("cuda")
    assert ops.captures and kernel.settle(ops, kernel.shape, CUDA, strict=True) is ops


@pytest.mark.parametrize("kernel", KERNELS[:1], ids=["all"])
def test_the_doctor_lists_them_with_what_each_needs(
    kernel: Kernel, hopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a card is one for them, whether they are right and quick there, and for which models."""
    import triton

    from quire.kernels import explain
    from quire.kernels.validation import gated_trial as trial_gated
    from quire.kernels.validation import recurrent_trials as trial_recurrent

    right = {"try_gated": trial_gated, "try_delta_net": trial_recurrent, "try_channel_delta": trial_recurrent,
             "try_mamba": trial_recurrent, "try_prompts": trial_prompts}  # fmt: skip
    for name, module in right.items():
        monkeypatch.setattr(module, name, lambda *args: None)
    monkeypatch.setattr(trial_gated, "is_quicker", lambda *args: False)
    ops = table()

    def told(deterministic: bool = False) -> dict[str, tuple[str, str]]:
        entries = [explain.explain_hopper(each, ops, CUDA, deterministic) for each in explain.HOPPER]
        return {str(entry["op"]).partition(",")[0]: (entry["implementation"], entry["why"]) for entry in entries}

    found = told()
    assert [where for where, _ in found.values()] == ["hopper", "triton", *["hopper"] * 4]
    assert "heads of 128 × 128" in found["gated delta net"][1] and "not faster" in found["gate/up projection"][1]
    hopper(lambda *args: (_ for _ in ()).throw(RuntimeError("PassManager::run failed")))
    assert "PassManager::run failed" in told()["latent attention"][1]
    assert {where for where, _ in told(deterministic=True).values()} == {"triton"}
    monkeypatch.setattr(triton, "__version__", "3.8.0")
    assert all(where == "triton" and "this is 3.8.0" in why for where, why in told().values())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert all(where == "triton" and "this is 8" in why for where, why in told().values())


def test_the_latents_trial_sees_what_is_wrong() -> None:
    shape = replace(LATENTS, num_heads=3, rank=32, rope_dim=8, dtype=torch.float32, cache_dtype=torch.float32)
    try_latent(table(), shape, CPU)
    off = replace(table(), latent_attention=lambda *args: REFERENCE.latent_attention(*args) * 1.1)
    with pytest.raises(ArithmeticError):
        try_latent(off, shape, CPU)


def test_the_delta_nets_trial_sees_what_is_wrong() -> None:
    """In what comes out, and in what stays behind."""
    shape = RecurrentShape(1, 2, 16, 24, 4)
    try_delta_net(REFERENCE, shape, torch.float32, CPU)

    def off(*args: Any) -> torch.Tensor:
        return REFERENCE.gated_delta_net(*args) * 1.1

    def forgets_rings(*args: Any) -> torch.Tensor:
        rings = shape.rings(args[3])
        before = rings.clone()
        out = REFERENCE.gated_delta_net(*args)
        rings.copy_(before)
        return out

    for wrong in (off, forgets_rings):
        with pytest.raises(ArithmeticError):
            try_delta_net(replace(REFERENCE, gated_delta_net=wrong), shape, torch.float32, CPU)


def test_the_walk_is_tried_as_it_is_compiled() -> None:
    """A head to a program and half of one: else a request would wait for the compiler."""
    from quire.kernels.triton.recurrent.hopper.gated_delta import halves_per_program

    for heads in (1, 3, 16, 32, 48, 66):
        steps = [counts for each in walk_steps(heads, 132) for counts in each]
        tried = {halves_per_program(heads * sum(count > 1 for count in counts), 132) for counts in steps}
        assert tried == {1, 2}, heads
    assert halves_per_program(2 * 32, 132) == 1 and halves_per_program(3 * 32, 132) == 2
    assert len(walk_steps(32, 132)[-1][0]) == 3, "no more rows than it takes"


def test_a_recurrent_steps_programs_are_all_at_work_at_once() -> None:
    from quire.kernels.triton.recurrent.step import StepTuning, tune

    def forms(heads: int, value_block: int, delta: bool, *rows: int) -> list[tuple[int, int]]:
        found = [tune(heads * num, 128, value_block, 132, delta) for num in rows]
        return [(tuning.value_block, tuning.num_warps) for tuning in found]

    assert forms(32, 128, True, 1, 12) == [(128, 16)] * 2, "a whole head at a time"
    assert forms(32, 128, True, 13, 28, 29, 33, 34, 57, 58, 66, 67, 256) == [
        (16, 2), (16, 2), (16, 1), (16, 1), (8, 1), (8, 1), (16, 1), (16, 1), (8, 1), (8, 1)]  # fmt: skip
    assert forms(128, 64, False, 3, 4, 5, 8, 9, 64) == [(64, 8), (16, 2), (16, 1), (16, 1), (8, 1), (8, 1)]
    assert tune(4096, 64, 4, 132, True) == StepTuning(4, 1), "no more rows than there are, and a warp"


def test_shares_fill_the_card_and_no_more() -> None:
    from quire.kernels.triton.latent.many_heads import MAX_SPLITS, num_splits

    assert num_splits(16, 8192, 132) == 8  # one round of 128 programs
    assert num_splits(128, 4096, 132) == num_splits(512, 1024, 132) == 1
    assert num_splits(2, 100, 132) == 1, "a row of one span is not split"
    for programs in range(1, 132):
        assert 1 <= num_splits(programs, 1 << 17, 132) <= MAX_SPLITS
