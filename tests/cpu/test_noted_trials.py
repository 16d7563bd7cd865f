"""A start that finds a note of one just like it tries no kernel again and ends with the same table; nothing is noted
that failed or was not tried, and a kernel that fails after all takes the note with it."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels.table import REFERENCE, Ops
from quire.kernels.validation import gated_trial as trial_gated
from quire.kernels.validation import trials as trial
from quire.kernels.validation.gated_trial import GatedTrialShape, settle_gated
from quire.kernels.validation.trial_results import Findings
from quire.kernels.validation.trials import KernelTrial, settle_ops
from quire.models.loading import loader
from quire.runtime.runner import Runner
from quire.startup import assemble
from quire.startup import trial_notes as notes
from quire.startup.trial_notes import TrialNote
from tests.cpu.test_trials import STAND_INS, fails, lying
from tests.cpu.tiny_llm import make_tiny_llm

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
KNOBS: dict[str, Any] = {"dtype": "float32", "max_model_len": 200, "num_pages": 60, "max_rows": 4, "device": "cpu"}
NOTED = Findings({})


def row(attempt: Callable[[Ops], None]) -> KernelTrial:
    return KernelTrial("some", attempt, lambda ops: REFERENCE)


def refuse(*args: Any) -> Any:
    pytest.fail("nothing is tried")


# ---------------------------------------------------------------------------------------------------------------------
# What is worth noting


def test_only_a_start_in_which_everything_agreed_has_something_to_note() -> None:
    findings = Findings()
    assert settle_ops(STAND_INS, [row(lambda ops: None)] * 2, strict=True, findings=findings) is STAND_INS
    assert findings.worth_noting == {}
    with pytest.warns(UserWarning, match="some kernel"):
        assert settle_ops(STAND_INS, [row(fails)], strict=False, findings=findings) is REFERENCE
    assert findings.worth_noting is None
    settle_ops(STAND_INS, [row(lambda ops: None)], strict=False, findings=findings)
    assert findings.worth_noting is None, "one that agrees later makes nothing good"


def test_what_memory_did_not_suffice_for_was_not_tried() -> None:
    def runs_out(ops: Ops) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    findings = Findings()
    assert settle_ops(STAND_INS, [row(runs_out)], strict=True, findings=findings) is STAND_INS
    assert findings.worth_noting is None
    findings = Findings()
    assert findings.decide("race", lambda: None) is False and findings.worth_noting is None


def test_with_a_note_nothing_is_tried_and_nothing_noted_again() -> None:
    assert settle_ops(STAND_INS, [row(refuse)], strict=False, findings=NOTED) is STAND_INS
    assert NOTED.worth_noting is None


def test_what_was_measured_is_recalled() -> None:
    findings = Findings()
    assert findings.decide("quick", lambda: True) and not findings.decide("slow", lambda: False)
    again = Findings(findings.worth_noting)
    assert again.decide("quick", refuse) is True and again.decide("slow", refuse) is False
    assert again.decide("new", lambda: True), "what the note does not tell is measured"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_kernel_for_hopper_is_put_in_as_it_was_then(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    shape, table, device = GatedTrialShape(4096, 24576, torch.bfloat16), replace(REFERENCE, captures=True), "cuda"
    tried: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(trial_gated, "try_gated", lambda *args: tried.append("tried"))
    for quicker in (True, False):
        monkeypatch.setattr(trial_gated, "is_quicker", lambda *args: tried.append("timed") or quicker)  # noqa: B023
        findings = Findings()
        first = settle_gated(table, shape, torch.device(device), strict=False, findings=findings)
        assert (first is not table) is quicker and tried == ["tried", "timed"]
        again = settle_gated(table, shape, torch.device(device), strict=False, findings=Findings(findings.worth_noting))
        assert tried == ["tried", "timed"] and (again is not table) is quicker
        assert type(again.fused_linear) is type(first.fused_linear)
        tried.clear()
    findings = Findings()
    monkeypatch.setattr(trial_gated, "try_gated", fails)
    with pytest.warns(UserWarning, match="gate and up"):
        assert settle_gated(table, shape, torch.device(device), strict=False, findings=findings) is table
    assert findings.worth_noting is None
    monkeypatch.setattr(triton, "__version__", "3.8.0")
    with pytest.warns(UserWarning, match=r"made for Triton 3\.6"):  # no trial: it is said at each start
        assert settle_gated(table, shape, torch.device(device), strict=False, findings=Findings({})) is table


# ---------------------------------------------------------------------------------------------------------------------
# Starts, on a card that is a stand-in


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llm(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """`ops`: its kernels; `tried`: rows that were; `notes`: what lies on disk."""
    told = SimpleNamespace(ops=STAND_INS, uuid="GPU-1", tried=[], notes=lambda: list(tmp_path.rglob("*.tried")))
    plain = trial.failure

    def failure(ops: Ops, row: KernelTrial, findings: Findings) -> Exception | None:
        return plain(
            ops, replace(row, attempt=lambda ops: (told.tried.append(row.name), row.attempt(ops))[1]), findings
        )

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(loader, "select_ops", lambda *args: told.ops)
    monkeypatch.setattr(assemble, "check_ops", lambda *args: None)
    monkeypatch.setattr(assemble, "describe_gpu", lambda device: {"uuid": told.uuid})
    monkeypatch.setattr(trial, "failure", failure)
    yield told


def start(folder: Path, card: SimpleNamespace, **knobs: Any) -> tuple[list[str], list[int]]:
    """What was tried, and what the model answered."""
    card.tried.clear()
    with LLM(str(folder), **{**KNOBS, **knobs}) as llm:
        tried = list(card.tried)
        return tried, llm.generate([[5, 6, 7, 8]], GREEDY)[0].token_ids


def test_the_second_start_tries_nothing_and_answers_the_same(folder: Path, card: SimpleNamespace) -> None:
    tried, tokens = start(folder, card)
    assert {"norm", "rope", "attention"} <= set(tried) and len(card.notes()) == 1
    assert start(folder, card) == ([], tokens)
    card.uuid = "GPU-2"
    assert start(folder, card) == (tried, tokens) and len(card.notes()) == 2
    assert start(folder, card, max_model_len=100)[0] == tried
    assert start(folder, card)[0] == []
    assert start(folder, card, strict_kernels=True)[0] == tried, "who is strict sees for themselves"
    for note in card.notes():
        note.write_text("{")
    assert start(folder, card) == (tried, tokens) and start(folder, card)[0] == []


@pytest.mark.parametrize("bad", [fails, lying(STAND_INS.rms_norm)], ids=["raises", "lies"])
def test_a_kernel_that_broke_with_new_code_is_caught_and_never_noted(
    bad: Any, folder: Path, card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, tokens = start(folder, card)
    card.ops = replace(STAND_INS, rms_norm=bad)
    monkeypatch.setattr(notes, "_hash_sources", lambda: "other sources")
    for _ in range(2):  # the next start says it, too
        with pytest.warns(UserWarning, match="The norm kernel can't be used here"):
            assert start(folder, card) == (tried, tokens)
    assert len(card.notes()) == 1, "of the code before"


def test_a_kernel_that_fails_after_all_takes_the_note_with_it(folder: Path, card: SimpleNamespace) -> None:
    """Such as one that was damaged on disk: the note can't know."""
    tried, tokens = start(folder, card)
    card.ops = replace(STAND_INS, paged_attention=fails)
    assert start(folder, card) == ([], []), "its requests fail"
    assert card.notes() == []
    with pytest.warns(UserWarning, match="The attention kernel can't be used here"):
        assert start(folder, card) == (tried, tokens)


def one_request(runner: Runner) -> Iterator[None]:
    """The first warm-up of a GPU; a CPU has none."""
    runner.warm_up(1, 32)
    yield


def test_a_start_that_fails_with_what_was_noted_tries_everything_and_serves(
    folder: Path, card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "warm_ups", one_request)
    tried, tokens = start(folder, card)
    assert start(folder, card) == ([], tokens) and len(card.notes()) == 1
    card.ops = replace(STAND_INS, paged_attention=fails)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert start(folder, card) == (tried, tokens)
    lines = [str(warning.message).split(" (")[0] for warning in said]
    assert lines == ["Warm-up stopped", "The attention kernel can't be used here"]
    assert card.notes() == []


def test_a_start_whose_first_step_fails_leaves_no_note(
    folder: Path, card: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_first(runner: Runner) -> Iterator[None]:
        raise RuntimeError("not a kernel that was tried")
        yield

    monkeypatch.setattr(Runner, "warm_ups", fails_first)
    with pytest.warns(UserWarning, match="Warm-up stopped"):
        tried, tokens = start(folder, card)
    assert tried and len(tokens) == 6 and card.notes() == []


def test_memory_that_runs_out_in_a_step_leaves_the_note_alone(folder: Path, card: SimpleNamespace) -> None:
    def runs_out(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    start(folder, card)
    card.ops = replace(STAND_INS, paged_attention=runs_out)
    assert start(folder, card) == ([], [])
    assert len(card.notes()) == 1


def test_warm_ups_that_come_to_their_end_are_no_failure(folder: Path, card: SimpleNamespace) -> None:
    with LLM(str(folder), **KNOBS) as llm:
        llm.prepare()
    assert len(card.notes()) == 1


def test_a_cpu_has_no_notes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(TrialNote, "write", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with LLM(str(folder), **KNOBS) as llm:
            llm.generate([[5, 6, 7, 8]], GREEDY)
    assert not list(tmp_path.rglob("*.tried"))
