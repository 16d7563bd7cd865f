"""Sampling kernels, and those of captured steps, that fail: at the start where every request needs them, later where
only some do. One line, torch does their part, and the tokens are torch's; or a refusal, for who needs them. The kernels
here are stand-ins; `tests/gpu/trial_checks.py` and `tests/gpu/test_trials.py` have the real ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import quire.startup.assemble as assemble
from quire.engine.workers import DeviceLost
from quire.kernels.table import RowOps, SamplingOps
from quire.kernels.validation import failures
from quire.runtime import graphs
from quire.runtime.row_trial import settle_row_ops
from quire.sampling.edits import apply_mask
from quire.sampling.logprobs import score
from quire.sampling.noise import Noise
from quire.sampling.sampler import Sampler
from quire.sampling.trial import settle_sampling
from quire.types import CacheSpec, QuireError, SamplingParams
from tests.cpu.rig import CPU, load, make_engine, make_request, run_deltas
from tests.cpu.sampling_cases import Case, resolved, set_up
from tests.cpu.tiny_models import make_tiny

COMPILER = "at 12:8:\n    tl.no_such_thing(x)\n    ^\nno such instruction"
PROMPTS = [[(7 * i + j) % 200 for j in range(9 + 3 * i)] for i in range(3)]
LENGTH: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
PLAIN = [SamplingParams(temperature=0.0, **LENGTH), SamplingParams(temperature=0.9, seed=4, **LENGTH)]


class CompilationError(Exception):
    """Triton's is no RuntimeError either."""


def fails(*args: Any, **options: Any) -> Any:
    raise CompilationError(COMPILER)


def sample_rows(logits: Tensor, key: Tensor, positions: Tensor, inv_temperature: Tensor, *, mask: Tensor | None = None,
                edited: tuple[Tensor, Tensor] | None = None, append_to: Any = None,
                out: Any = None) -> Any:  # fmt: skip
    wide = logits.float().clone()
    if edited is not None:
        there = edited[1] >= 0
        wide[there] = edited[0][edited[1][there].long()]
    if mask is not None:
        apply_mask(wide, mask)
    bad = ~wide.amax(1).isfinite()
    drawn = wide * inv_temperature[:, None] + Noise(wide.shape[1], wide.device).gumbel(key, positions)
    tokens = torch.where(inv_temperature[:, None] == 0, wide, drawn).max(1).indices.masked_fill(bad, 0)
    if append_to is not None:
        rows, row_tokens, computed = append_to
        row_tokens[rows[rows >= 0], computed[rows[rows >= 0]]] = tokens[rows >= 0].int()
    if out is not None:
        out[0].copy_(tokens)
        out[1].copy_(bad)
    return tokens, bad


def score_rows(logits: Tensor, samples: Tensor | None, tokens: Tensor, num_top: int) -> tuple[Tensor, ...]:
    some = slice(None) if samples is None else samples
    return score(logits[some].float(), tokens[some], num_top).parts()


# What no test needs fails, and would be said.
STAND_INS = SamplingOps(sample_rows, fails, lambda logits, samples: logits[samples].float(), fails, fails, fails, fails,
                        score_rows)  # fmt: skip


def unless(given: str) -> Callable[..., Any]:
    """A kernel that is another with a mask, or with edits, and doesn't compile for them."""
    return lambda *args, **options: (fails if options.get(given) is not None else sample_rows)(*args, **options)


@dataclass(frozen=True)
class Late:
    said: str
    asked: SamplingParams
    ops: SamplingOps
    same_bits: bool = False  # torch's are the kernel's


LATE = {
    "filters": Late("filtered sampling", SamplingParams(temperature=0.8, top_p=0.9, seed=1, **LENGTH), STAND_INS),
    "top_k": Late("filtered sampling", SamplingParams(temperature=0.8, top_k=9, seed=2, **LENGTH), STAND_INS),
    "penalties": Late(
        "logit edits", SamplingParams(temperature=0.7, repetition_penalty=1.3, seed=1, **LENGTH), STAND_INS, True
    ),
    "bias": Late("logit edits", SamplingParams(temperature=0.0, logit_bias=((5, 9.0),), **LENGTH), STAND_INS, True),
    "copies": Late(
        "logit edits", SamplingParams(temperature=0.0, presence_penalty=0.5, **LENGTH),
        replace(STAND_INS, copy_samples=fails), True,
    ),
    "edited": Late(
        "edited sampling", SamplingParams(temperature=0.6, frequency_penalty=0.4, seed=3, **LENGTH),
        replace(STAND_INS, apply_penalties=lambda *args: None, sample_rows=unless("edited")),
    ),
    "logprobs": Late(
        "logprobs", SamplingParams(temperature=0.8, seed=1, logprobs=3, **LENGTH), replace(STAND_INS, score_rows=fails)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(make_tiny("llama", Path(tmp_path_factory.mktemp("llama")))[1], kernels="torch")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[[SamplingOps], None]:
    """An engine's sampling kernels."""
    monkeypatch.setattr(assemble, "select_choice", lambda *args: None)
    return lambda ops: monkeypatch.setattr(assemble, "select_sampling", lambda *args: ops)


@contextmanager
def lines() -> Iterator[list[str]]:
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
        said += [str(each.message) for each in caught if "can't be used here" in str(each.message)]


def answers(model: Any, params: list[SamplingParams], **knobs: Any) -> list[Any]:
    deltas = run_deltas(make_engine(model, **knobs), PROMPTS, params)
    return [[(d.token_ids, [r.top_ids for r in d.logprobs or []]) for d in each] for each in deltas]


@pytest.mark.parametrize("case", LATE.values(), ids=LATE)
def test_a_kernel_that_only_some_requests_need(case: Late, tiny: Any, given: Any) -> None:
    params = [PLAIN[0], case.asked, PLAIN[1]]
    expected = answers(tiny, params, kernels="torch")
    given(case.ops)
    with lines() as said:
        assert answers(tiny, params) == expected
    assert said == [f"The {case.said} kernel can't be used here (CompilationError: no such instruction); plain torch "
                    "runs instead, more slowly."]  # fmt: skip
    for mode in ("strict_kernels", "deterministic"):
        if mode == "deterministic" and case.same_bits:
            with lines() as said:
                assert answers(tiny, params, deterministic=True) == expected
            assert len(said) == 1
            continue
        engine, errors, tokens = make_engine(tiny, **{mode: True}), {}, {}
        for index, (prompt, p) in enumerate(zip(PROMPTS, params, strict=True)):
            engine.add(make_request(f"r{index}", prompt, p))
        with lines() as said:
            for delta in engine.run_until_idle():
                tokens[delta.request_id] = tokens.get(delta.request_id, []) + delta.token_ids
                if delta.error_code:
                    errors[delta.request_id] = (delta.error_code, delta.error)
        assert said == [] and list(errors) == ["r1"] and errors["r1"][0] == "kernel_failed"
        assert case.said in str(errors["r1"][1]) and "\n" not in str(errors["r1"][1])
        assert [tokens[f"r{i}"] for i in (0, 2)] == [[t for ids, _ in each for t in ids] for each in expected[::2]]


def test_a_mask_that_no_kernel_reads_is_torchs_work() -> None:
    cases = [Case(resolved(temperature=0.8), seed=i) for i in range(3)] + [Case(resolved(temperature=0.0))]
    batch, histories = set_up(cases, 90)
    logits = torch.randn(4, 90, generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([[0b1011, 0, 7]] * 4, dtype=torch.int32)
    expected = Sampler(90, CPU).sample(logits, batch, histories, mask)
    sampler = Sampler(90, CPU, replace(STAND_INS, sample_rows=unless("mask")))
    with lines() as said:
        for _ in range(2):
            assert torch.equal(sampler.sample(logits, batch, histories, mask).tokens, expected.tokens)
    assert len(said) == 1 and "masked sampling" in said[0]


def test_neighbours_of_those_with_filters_are_drawn_by_the_kernel() -> None:
    def marked(*args: Any, **options: Any) -> Any:
        tokens, bad = sample_rows(*args, **options)
        return torch.full_like(tokens, 11), bad

    cases = [Case(resolved(temperature=0.8)), Case(resolved(temperature=0.8, min_p=0.2)), Case(resolved(temperature=0))]
    batch, histories = set_up(cases, 90)
    logits = torch.randn(3, 90, generator=torch.Generator().manual_seed(3))
    logits[:, 11] = -50.0
    with lines():
        tokens = Sampler(90, CPU, replace(STAND_INS, sample_rows=marked)).sample(logits, batch, histories).tokens
    assert tokens[0] == tokens[2] == 11 != tokens[1]


def test_memory_that_ran_out_is_no_fault_of_the_kernels() -> None:
    errors = [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("Triton Error [CUDA]: out of memory")]

    def sometimes(*args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return torch.full((1,), 8), torch.zeros(1, dtype=torch.bool)

    batch, histories = set_up([Case(resolved(temperature=0.8, top_p=0.5))], 30)
    sampler = Sampler(30, CPU, replace(STAND_INS, sample_filtered=sometimes))
    with lines() as said:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of memory"):
                sampler.sample(torch.zeros(1, 30), batch, histories)
        assert sampler.sample(torch.zeros(1, 30), batch, histories).tokens.tolist() == [8]
    assert said == []


def test_a_device_that_is_lost_ends_the_engine(tiny: Any, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so when a kernel is launched, as it would to whoever asks next: no kernel is given up for that."""

    def lost(*args: Any, **options: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def break_down(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(failures, "probe_device", lost)
        monkeypatch.setattr("quire.runtime.guard.probe_device", lost)
        return lost()

    given(replace(STAND_INS, sample_filtered=break_down))
    engine = make_engine(tiny)
    engine.add(make_request("r", PROMPTS[0], LATE["filters"].asked))
    with lines() as said, pytest.raises(DeviceLost, match="illegal memory access"):
        engine.run_until_idle()
    assert said == []


# ---------------------------------------------------------------------------------------------------------------------
# At the start


def lies(logits: Tensor, *rest: Any, **options: Any) -> Any:
    tokens, bad = sample_rows(logits, *rest, **options)
    return (tokens + 1) % logits.shape[1], bad


def wild(*args: Any, **options: Any) -> Any:
    tokens, bad = sample_rows(*args, **options)
    return tokens + (1 << 40), bad


def no_noise(logits: Tensor, key: Tensor, positions: Tensor, scales: Tensor, **options: Any) -> Any:
    return sample_rows(logits, key, positions, scales * 0, **options)


def same_noise(logits: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
    return sample_rows(logits, key * 0, *rest, **options)


def all_bad(*args: Any, **options: Any) -> Any:
    tokens, bad = sample_rows(*args, **options)
    return tokens, ~bad


@pytest.mark.parametrize("kernel", [fails, lies, wild, no_noise, same_noise, all_bad])
def test_the_kernel_that_every_request_needs(kernel: Any, tiny: Any, given: Any,
                                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Captured steps would sample with it, too: there are none, and no second line."""
    params = [LATE["filters"].asked, *PLAIN]
    expected = answers(tiny, params, kernels="torch")
    given(replace(STAND_INS, sample_rows=kernel))
    monkeypatch.setattr(assemble, "select_row_ops", fails)
    monkeypatch.setattr(assemble, "_can_capture", lambda model: True)
    with lines() as said:
        assert answers(tiny, params) == expected
    assert len(said) == 1 and said[0].startswith("The sampling kernel can't be used here (") and "\n" not in said[0]
    assert ("no such instruction" if kernel is fails else "its results differ from the reference") in said[0]
    for mode in ("strict_kernels", "deterministic"):
        with pytest.raises(QuireError, match="The sampling kernel") as refused:
            make_engine(tiny, **{mode: True})
        assert refused.value.code == "kernel_failed" and mode in refused.value.hint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_as_they_are_stay(dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(20):
            torch.manual_seed(seed)
            assert settle_sampling(STAND_INS, 5000, dtype, CPU, strict=True) is STAND_INS


SPECS = [
    CacheSpec("full", "paged", (0, 1), (2, 8), "float32", page_tokens=4),
    CacheSpec("walk", "state", (2,), (3, 8), "float32", page_tokens=4),
]


@dataclass(frozen=True)
class Inputs:
    tokens: Tensor
    positions: Tensor
    seq_lens: Tensor
    lengths: Tensor
    keys: Tensor
    scales: Tensor


def gather_rows(rows: Tensor, row_tokens: Tensor, computed: Tensor, keys: Tensor, scales: Tensor) -> Inputs:
    live = rows >= 0
    at = rows.clamp(min=0)
    positions = computed[at].where(live, -1)
    tokens = row_tokens[at, positions.clamp(min=0)].long().where(live, 0)
    computed[rows[live]] += 1
    return Inputs(tokens, positions, (positions + 1).int(), positions + 1, keys[at].where(live, 0), scales[at] * live)


def gather_slots(rows: Tensor, positions: Tensor, table: Tensor, page_tokens: int) -> Tensor:
    pages = table[rows.clamp(min=0), positions.clamp(min=0) // page_tokens].long()
    return (pages * page_tokens + positions % page_tokens).where(rows >= 0, -1)


ROW_OPS = RowOps(gather_rows, gather_slots, sample_rows)


def wrong_rows() -> dict[str, RowOps]:
    def stays(rows: Tensor, row_tokens: Tensor, computed: Tensor, *rest: Any) -> Inputs:
        return gather_rows(rows, row_tokens, computed.clone(), *rest)

    def first_page(rows: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        return gather_slots(rows, positions % 4, *rest)

    def pads(*args: Any) -> Tensor:
        return gather_slots(*args).clamp(min=0)

    def forgets(*args: Any, append_to: Any, **options: Any) -> Any:
        return sample_rows(*args, **options)

    def traces(*args: Any, append_to: Any, **options: Any) -> Any:
        append_to[1][-1, 0] = 77
        return sample_rows(*args, append_to=append_to, **options)

    def other_keys(*args: Any) -> Inputs:
        return replace(gather_rows(*args), keys=torch.zeros(len(args[0]), dtype=torch.int64))

    return {
        "fails": replace(ROW_OPS, gather_slots=fails),
        "stays": replace(ROW_OPS, gather_rows=stays),
        "keys": replace(ROW_OPS, gather_rows=other_keys),
        "first page": replace(ROW_OPS, gather_slots=first_page),
        "pads": replace(ROW_OPS, gather_slots=pads),
        "forgets": replace(ROW_OPS, choose=forgets),
        "traces": replace(ROW_OPS, choose=traces),
        "lies": replace(
            ROW_OPS, choose=lambda *args, out, **options: lies(*args, **options, out=None) and out[0].zero_()
        ),
    }


@pytest.mark.parametrize("max_len", [1, 5, 64])
def test_rows_as_they_are_stay(max_len: int) -> None:
    for specs in (SPECS, SPECS[1:]):
        assert settle_row_ops(ROW_OPS, specs, max_len, 90, torch.float32, CPU, strict=True) is ROW_OPS


@pytest.mark.parametrize("ops", wrong_rows().values(), ids=wrong_rows())
def test_rows_that_forget_something(ops: RowOps) -> None:
    with lines() as said:
        assert settle_row_ops(ops, SPECS, 64, 90, torch.float32, CPU, strict=False) is None
    assert len(said) == 1 and said[0].startswith("The rows kernel can't be used here (") and "\n" not in said[0]
    with pytest.raises(QuireError, match="The rows kernel") as refused:
        settle_row_ops(ops, SPECS, 64, 90, torch.float32, CPU, strict=True)
    assert refused.value.code == "kernel_failed"


def test_without_row_kernels_steps_are_not_captured(tiny: Any, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the deterministic mode, too: they compute the same bits."""
    given(STAND_INS)
    monkeypatch.setattr(assemble, "select_row_ops", lambda device_type: replace(ROW_OPS, gather_rows=fails))
    monkeypatch.setattr(assemble, "_can_capture", lambda model: True)
    expected = answers(tiny, [*PLAIN, PLAIN[0]], kernels="torch")
    for deterministic in (False, True):
        with lines() as said:
            assert answers(tiny, [*PLAIN, PLAIN[0]], deterministic=deterministic) == expected
        assert len(said) == 1 and "The rows kernel" in said[0]
    with pytest.raises(QuireError, match="The rows kernel"):
        make_engine(tiny, strict_kernels=True)


def test_a_capture_that_a_compiler_ends_leaves_its_steps_uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[int] = []

    def capture(*args: Any) -> Any:
        captures.append(1)
        raise CompilationError(COMPILER)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs, "capture_graph", capture)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    outputs = graphs._DecodeOutputs(torch.zeros(1, 5), torch.zeros(1, 4), None)
    monkeypatch.setattr(graphs.DecodeGraphs, "_decode", lambda self, kind: outputs)
    decodes = graphs.DecodeGraphs(None, {}, type("Rows", (), {"device": CPU})(), ROW_OPS, 4)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"Steps of 1 rows could not be captured \(.*: no such instruction\)") as said:
        for _ in range(4):
            assert decodes.run([2], choose=False).logits.shape == (1, 5)
    assert len(captures) == len(said) == 1
