"""cuDNN's attention as a row of the ops table, without cuDNN: torch's attention on a CPU stands in for it. What it is
given, what it is not, and that it has to be asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quire.kernels.libraries import choose, cudnn
from quire.kernels.libraries.choose import choose_library, judge
from quire.kernels.libraries.cudnn import CudnnAttention
from quire.kernels.libraries.seam import LibraryPlan, with_library
from quire.kernels.table import REFERENCE, Ops
from quire.kernels.validation.trials import TrialShape
from quire.models.loading import loader
from quire.models.loading.kernel_trials import Trials, select_library
from quire.types import QuireError
from tests.gpu.library_checks import check_fresh
from tests.gpu.where import Where

SCALE = 0.2
NUM_LAYERS = 3
CPU = torch.device("cpu")
SHAPE = TrialShape(num_heads=4, num_kv_heads=2, head_dim=64, page_tokens=16, window=None,
                   qk_norm=False, dtype=torch.float16, cache_dtype=torch.float16, max_len=64)  # fmt: skip


@pytest.fixture(autouse=True)
def small_steps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "MIN_TOKENS", 16)


def refuse() -> Tensor:
    raise RuntimeError("No available kernel")


class Library:
    """Counts its calls and computes, or does what it is told instead."""

    def __init__(self, instead: Callable[[Tensor], Tensor] | None = None):
        self.num_calls = 0
        self._instead = instead

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.num_calls += 1
        assert q.shape[::2] == k.shape[::2] and k.shape == v.shape and q.shape[3] == k.shape[3]
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out if self._instead is None else self._instead(out)


class Steps:
    """Prompts of 20 tokens, two in a step, over pages in no order."""

    def __init__(self, ops: Ops, dtype: torch.dtype = torch.float16):
        self.ops, self.dtype = ops, dtype
        self.table = torch.tensor([[4, 2], [1, 3]], dtype=torch.int32)
        self.caches = torch.randn(2, 5, 16, 2, 64).to(dtype)
        self.q = torch.randn(40, 4, 64).to(dtype)

    def run(self, *, window: int | None = None, counts: tuple[int, ...] = (20, 20), starts: tuple[int, ...] = (0, 0),
            **extra: Any) -> Any:  # fmt: skip
        """One step, which must come to the reference's result in every layer."""
        bounds = [start + count for start, count in zip(starts, counts, strict=True)]
        positions = torch.cat([torch.arange(s, b) for s, b in zip(starts, bounds, strict=True)])
        args = (self.table, positions, list(counts), bounds, 16, window, self.dtype)
        plan, wanted = self.ops.plan_attention(*args), REFERENCE.plan_attention(*args)
        for _ in range(NUM_LAYERS):
            q = self.q[: sum(counts)]
            got = self.ops.paged_attention(q, *self.caches, plan, SCALE, **extra)
            torch.testing.assert_close(
                got, REFERENCE.paged_attention(q, *self.caches, wanted, SCALE, **extra), rtol=2e-2, atol=2e-2
            )
        return plan


def row(library: Library) -> Steps:
    return Steps(with_library(REFERENCE, CudnnAttention(library)))


def test_fresh_prompts_of_one_length_are_its_own() -> None:
    library = Library()
    assert row(library).run().fits and library.num_calls == NUM_LAYERS


@pytest.mark.parametrize("options", [
    {"window": 7},
    {"counts": (20, 19)},
    {"counts": (20, 1)},
    {"counts": (12, 12), "starts": (8, 8)},  # behind something cached
    {"softcap": 3.0},
    {"sinks": torch.zeros(4)},
    {"counts": (7, 7)},  # too few to be worth it
])  # fmt: skip
def test_other_steps_never_ask_for_it(options: dict[str, Any]) -> None:
    library = Library()
    plan = row(library).run(**options)
    assert isinstance(plan, LibraryPlan) and not plan.fits and library.num_calls == 0


def test_a_cache_of_another_type_and_captured_steps_stay_with_our_own() -> None:
    library = Library()
    steps = row(library)
    steps.dtype, steps.q = torch.float32, steps.q.float()
    steps.caches = steps.caches.float()
    assert not steps.run().fits and library.num_calls == 0
    captured: list[Any] = []
    inner = replace(REFERENCE, plan_attention=lambda *args, **kwargs: captured.append(kwargs))
    ops = with_library(inner, CudnnAttention(library))
    ops.plan_attention(steps.table, torch.arange(40), [], [], 16, None, torch.float16, work="lists")
    assert captured == [{"work": "lists"}]


def test_prompts_behind_decodes_are_its_own() -> None:
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    kernel = CudnnAttention(Library())
    check_fresh(REFERENCE, kernel, Where("cpu", False, (torch.float16,), seed))


def known(attend: Library) -> list[choose.Library]:
    (library,) = [library for library in choose.LIBRARIES if library.setting == "cudnn"]
    return [replace(library, open=lambda device: [CudnnAttention(attend)])]


def timer(launch: Callable[[], object]) -> float:
    launch()
    return 1.0


def chosen(kernels: str, attend: Library, shape: TrialShape = SHAPE) -> Ops:
    return choose_library(REFERENCE, shape, CPU, kernels, timer=timer, libraries=known(attend))


def test_nobody_gets_it_without_asking_and_nobody_who_asks_gets_a_wrong_one() -> None:
    """It takes nothing of the first trial; the prompt that is timed must be right as well."""
    assert chosen("auto", Library()) is REFERENCE
    (_, verdict) = judge(REFERENCE, SHAPE, CPU, "auto", known(Library()), timer)
    assert verdict.kernel is None and "--kernels cudnn" in verdict.why
    assert chosen("cudnn", Library()) is not REFERENCE
    for wrong in (lambda out: out * 1.2, lambda out: out * torch.nan, lambda out: refuse()):
        with pytest.raises(QuireError, match="kernels=cudnn can't be used"):
            chosen("cudnn", Library(wrong))


@pytest.mark.parametrize(("change", "why"), [
    ({"head_dim": 256}, "prompts of 64 tokens with heads of 256 in float16"),
    ({"window": 8}, "and a window of 8"),
    ({"dtype": torch.float32, "cache_dtype": torch.float32}, "in float32"),
    ({"max_len": 8}, "prompts of 8 tokens"),
    ({"cache_dtype": torch.float8_e4m3fn}, "a KV cache of another type than the model's"),
])  # fmt: skip
def test_who_asks_for_it_in_vain_is_told(change: dict[str, Any], why: str) -> None:
    """It would never be asked, and nobody would notice."""
    library, shape = Library(), replace(SHAPE, **change)
    with pytest.raises(QuireError, match=why) as refused:
        chosen("cudnn", library, shape)
    assert library.num_calls == 0 and "\n" not in str(refused.value) and refused.value.param == "kernels"
    assert chosen("auto", library, shape) is REFERENCE


def test_a_library_that_was_not_asked_for_is_not_even_opened() -> None:
    """`quire doctor --kernels cudnn` must not have another one compile for minutes."""
    (cudnn_row,) = known(Library())
    other = replace(
        cudnn_row, name="Other", setting="flashinfer", opt_in_reason=None, open=lambda device: pytest.fail()
    )
    judged = judge(REFERENCE, SHAPE, CPU, "cudnn", [cudnn_row, other], timer)
    assert [verdict.kernel is not None for verdict in judged] == [False, True, False]
    used = choose.pick(judged, "cudnn")
    assert used is not None and used.name == "cuDNN" and "selects another library" in judged[2].why


@pytest.mark.parametrize(("fields", "has_attention", "why"), [
    ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, True, "soft caps or sinks"),
    ({"model_type": "llama"}, False, "Triton's attention, which can't be used"),
    ({"model_type": "mamba2", "num_heads": 4, "head_dim": 32, "n_groups": 2}, True, "this kind of model"),
])  # fmt: skip
def test_a_model_without_work_for_a_library_refuses_it(fields: dict[str, Any], has_attention: bool, why: str) -> None:
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
              "intermediate_size": 128, "vocab_size": 256, **fields}  # fmt: skip
    model, _ = loader.build_model(config, dtype="float32", device=CPU, page_tokens=16, ops=REFERENCE)
    ops = replace(REFERENCE, plan_attention=lambda *args: None) if has_attention else REFERENCE
    trials = Trials(model, torch.bfloat16, torch.device("cuda"), 64)
    with pytest.raises(QuireError, match=why) as refused:
        select_library(ops, trials, "cudnn")
    assert "kernels=cudnn can't be used" in str(refused.value)
    assert select_library(ops, trials, "auto") is ops
