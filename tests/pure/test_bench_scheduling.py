"""The scheduler's benchmark, at a size that takes no time: its structure, its device, and that torch stays out."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.bench import scheduling
from quire.bench.scheduling import SampleCounts, SchedulerRig, bench_scheduler
from quire.bench.tables import show
from quire.cli import bench as command
from quire.cli.main import main

SMALL = SampleCounts(
    2,
    2,
    3,
    row_counts=(1, 3),
    waiting=(2, 40),
    matched=(64, 640),
    blocked_rounds=2,
    blocked=(20, 320),
    prompt_rounds=2,
    prompt_len=512,
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the command measure little."""
    monkeypatch.setattr(scheduling, "SampleCounts", lambda: SMALL)


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench_scheduler(SMALL)
    assert [step["rows"] for step in report["steps"]] == [1, 3]
    for step in report["steps"]:
        assert min(step["plan_us"], step["commit_us"], step["loop_us"]) > 0
        assert step["plan_and_commit_us_per_row"] * step["rows"] == pytest.approx(step["plan_us"] + step["commit_us"])
    sides = [(prompt["cached"], prompt["evicts"], prompt["page_tokens"]) for prompt in report["prompts"]]
    assert sides == list(itertools.product((0, 448), (False, True), (16, 64)))
    assert all(min(prompt["plan_us"], prompt["commit_us"], prompt["books_us"]) > 0 for prompt in report["prompts"])
    assert (report["waiting"]["few"], report["waiting"]["many"]) == (2, 40)
    assert (report["matching"]["short"], report["matching"]["long"]) == (64, 640)
    assert [bar["bar"] for bar in report["bars"]] == [1.2, 12.0]
    assert report["pass"] == all(bar["pass"] for bar in report["bars"])
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    show(report)
    shown = capsys.readouterr().out
    assert "plan" in shown and "matching 640 tokens over 64" in shown


def test_the_rig_runs_requests_to_their_ends() -> None:
    rig = SchedulerRig(max_rows=2, num_pages=64)
    for length in (5, 40, 7):
        rig.add(list(range(length)), 3)
    ended = sum(rig.step() for _ in range(8) if rig.scheduler.has_work)
    assert ended == 3 and not rig.scheduler.has_work
    assert rig.scheduler.stats.sampled_tokens == 9
    plan_us, commit_us = rig.take_costs()
    assert plan_us > 0 and commit_us > 0
    assert rig.take_costs() == (0, 0)
    rig.scheduler.check()


def test_a_prompt_comes_again_with_all_but_its_end_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[tuple[int, ...]] = []
    step = SchedulerRig.step

    def watched(rig: SchedulerRig) -> int:
        before = rig.scheduler.stats.computed_tokens
        ended = step(rig)
        computed.append((rig.cache.page_tokens, rig.scheduler.stats.computed_tokens - before))
        return ended

    monkeypatch.setattr(SchedulerRig, "step", watched)
    scheduling.prompt_costs(512, 3)
    assert computed == [(size, tokens) for size in (16, 64, 16, 64) for tokens in (512, 1, 64, 1)] * 3


def test_both_sides_of_the_waiting_comparison_keep_their_queue() -> None:
    sides = [scheduling._QueueSide(size, 4) for size in (3, 30)]
    for side in sides:
        for _ in range(5):
            side.window()
    assert [len(side._rig.scheduler.waiting) for side in sides] == [3, 30]
    assert sides[0]._rig.scheduler.stats == sides[1]._rig.scheduler.stats, "the sides do different work"
    assert sides[0]._rig.scheduler.stats.ended > 4, "nobody came and went"


def growth_of(ratio: float) -> Any:
    return lambda *_: {"few": 1, "few_us": 1.0, "many": 2, "many_us": ratio, "short": 1, "short_us": 1.0, "long": 2,
                       "long_us": ratio, "ratio": ratio}  # fmt: skip


@pytest.mark.parametrize(("ratio", "code"), [(1.19, 0), (1.21, 2), (13.0, 2)])
@pytest.mark.usefixtures("small")
def test_a_missed_bar_is_exit_code_2(
    ratio: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scheduling, "waiting_growth", growth_of(ratio))
    monkeypatch.setattr(scheduling, "match_growth", growth_of(ratio))
    assert main(["bench", "scheduler", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["pass"] == (code == 0)
    assert [bar["pass"] for bar in report["bars"]] == [ratio <= 1.2, ratio <= 12]


def test_torch_stays_out() -> None:
    script = """
import sys
from quire.bench import scheduling
sizes = {"row_counts": (1,), "waiting": (1, 2), "matched": (32, 64), "blocked": (16, 64)}
small = scheduling.SampleCounts(1, 1, 1, blocked_rounds=1, prompt_rounds=1, prompt_len=128, **sizes)
scheduling.SampleCounts = lambda: small
from quire.cli.main import main
assert main(["bench", "scheduler"]) in (0, 2)
assert "torch" not in sys.modules
"""
    root = str(Path(quire.__file__).parent.parent)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# -- the command around it


@pytest.mark.parametrize(
    "argv",
    [
        ["bench"],
        ["bench", "sceduler"],
        ["bench", "offline"],
        ["bench", "offline", "--workload", "ragged"],
        ["bench", "offline", "--workload", "single", "--requests", "x"],
        ["bench", "offline", "--workload", "single", "--repeat", "0"],
        ["bench", "batch", "--batch", "many"],
        ["bench", "scheduler", "--model", "x"],
    ],
    ids=" ".join,
)
def test_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 1
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["offline", "--requests", "absent.jsonl"], "can't be read"),
        (["offline", "--workload", "single", "--temperature", "nan"], "temperature=nan"),
        (["offline", "--workload", "single", "--max-rows", "0"], "max_rows"),
        (["growth", "--first", "5", "--last", "5"], "--first 5 is not before --last 5"),
    ],
)
def test_what_can_not_be_measured_is_exit_code_1(
    argv: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And it is said before a model is opened."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "open_llm", lambda config: pytest.fail("opened a model"))
    assert main(["bench", *argv]) == 1
    out, err = capsys.readouterr()
    assert out == "" and why in err and err.count("\n") == 1
