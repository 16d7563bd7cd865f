"""Two runs side by side: verdicts that follow the figures and the chance in them, files, the page, exit codes."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from quire.bench.online.compare import OnlineRun, compare_runs, read_run
from quire.bench.online.run import Record, Targets, measure
from quire.bench.online.stream_client import Answer
from quire.cli.main import main
from quire.types import QuireError

SEED = int(os.environ.get("TEST_SEED", "7"))
WORK = {"requests": 0, "rate": 10.0, "input_len": "5", "output_len": "8", "seed": 1}


def make_report(slower: float = 1.0, count: int = 300, seed: int = SEED, failing: float = 0.0,
                targets: Targets | None = None, jitter: int = 0, **work: Any) -> dict[str, Any]:  # fmt: skip
    """A run of `count` requests whose times are drawn from the seed; `jitter` draws what is not due to the work."""
    rng, noise = random.Random(seed), random.Random(f"{seed}/{jitter}")
    records = []
    for index in range(count):
        due = index / 10
        first = rng.lognormvariate(-2, 0.5) * slower * noise.uniform(0.98, 1.02)
        between = rng.uniform(0.01, 0.02) * slower * noise.uniform(0.98, 1.02)
        times = [due + first + place * between for place in range(8)]
        outcome = "HTTP 500" if noise.random() < failing else "ok"
        records.append(Record(due, due, times[-1], outcome=outcome, answer=Answer(times, True, 5, 0, 8)))
    targets = targets or Targets()
    return {
        "benchmark": "online",
        "format": 1,
        "url": "http://127.0.0.1:1/v1",
        "model": "fake",
        "work": {**WORK, "requests": count, **work},
        "targets": {"ttft_s": targets.ttft_s, "tpot_s": targets.tpot_s},
        **measure(records, [8] * count, targets),
        "client": {"lag_s": {"p50": 0.0, "p90": 0.0, "p99": 0.0, "max": 0.0}, "max_open": 9, "most_open": 3,
                   "held_back": 0},
        "bars": [],
        "pass": True,
    }  # fmt: skip


def save(path: Path, report: Any) -> Path:
    path.write_text(report if isinstance(report, str) else json.dumps(report))
    return path


def load(tmp_path: Path, name: str, **options: Any) -> OnlineRun:
    return read_run(save(tmp_path / f"{name}.json", make_report(**options)))


def verdicts(comparison: dict[str, Any]) -> dict[str, str]:
    return {figure["name"]: figure["verdict"] for figure in comparison["figures"]}


def test_a_run_is_the_same_as_itself(tmp_path: Path) -> None:
    comparison = compare_runs(load(tmp_path, "a"), load(tmp_path, "b"))
    assert comparison["pass"] and comparison["same_work"]
    assert set(verdicts(comparison).values()) == {"same"}
    assert all(figure["ratio"] == 1 and figure["low"] <= 1 <= figure["high"] for figure in comparison["figures"])
    paired = [figure for figure in comparison["figures"] if figure["unit"] == "seconds"]
    assert all(figure["low"] == figure["high"] == 1 for figure in paired), "request by request nothing differs"


def test_noise_is_no_difference(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    for other in range(3):
        a = load(tmp_path, "a", count=60, seed=SEED + 100 + other)
        b = load(tmp_path, "b", count=60, seed=SEED + 200 + other, other=1)
        comparison = compare_runs(a, b)
        assert not comparison["same_work"] and comparison["pass"], comparison["figures"]
        assert verdicts(comparison)["TTFT p99"] == "not judged", "60 requests have no p99"


def test_slower_is_worse_and_faster_is_better(tmp_path: Path) -> None:
    a, b = load(tmp_path, "a"), load(tmp_path, "b", slower=1.3, jitter=1)
    worse, better = compare_runs(a, b), compare_runs(b, a)
    assert not worse["pass"] and better["pass"]
    for name in ("TTFT p50", "TTFT p90", "TPOT p50", "TPOT p99", "end to end p50"):
        assert (verdicts(worse)[name], verdicts(better)[name]) == ("worse", "better"), name
    figure = next(figure for figure in worse["figures"] if figure["name"] == "TPOT p50")
    assert figure["low"] <= figure["ratio"] <= figure["high"] and figure["ratio"] == pytest.approx(1.3, rel=0.05)
    assert compare_runs(a, b, tolerance=0.4)["pass"]


def test_pairs_find_what_the_spread_of_the_work_would_hide(tmp_path: Path) -> None:
    a, b = load(tmp_path, "a", count=80), load(tmp_path, "b", count=80, slower=1.1, jitter=1)
    apart = OnlineRun({**b.report, "work": {}}, b.latencies, b.answered, b.output_tps)
    assert verdicts(compare_runs(a, b))["TTFT p50"] == "worse"
    assert verdicts(compare_runs(a, apart))["TTFT p50"] == "unclear"


def test_failures_and_targets_are_compared(tmp_path: Path) -> None:
    targets = Targets(0.15, 0.1)
    a = load(tmp_path, "a", targets=targets)
    b = load(tmp_path, "b", failing=0.4, jitter=1)  # its own targets, none, do not matter
    found = verdicts(compare_runs(a, b))
    assert found["answered"] == "worse" and found["good requests"] == "worse"
    assert "good requests" not in verdicts(compare_runs(b, a))


def test_a_warm_cache_is_noted(tmp_path: Path) -> None:
    a, b = load(tmp_path, "a", count=20), load(tmp_path, "b", count=20)
    assert compare_runs(a, b)["notes"] == []
    b.report["cached_tokens"] = b.report["prompt_tokens"]
    assert compare_runs(a, b)["notes"] == ["The server's cache held 0% of A's prompts and 100% of B's."]


def test_the_bootstrap_repeats_itself(tmp_path: Path) -> None:
    a, b = load(tmp_path, "a"), load(tmp_path, "b", jitter=2)
    assert compare_runs(a, b) == compare_runs(a, b)
    assert compare_runs(a, b) != compare_runs(a, b, seed=1)


def test_answers_in_one_piece_have_no_time_per_token(tmp_path: Path) -> None:
    report = make_report(count=20)
    for entry in report["requests"]:
        entry["tpot_s"] = entry["pause_s"] = None
    run = read_run(save(tmp_path / "a.json", report))
    assert not any(name.startswith("TPOT") for name in verdicts(compare_runs(run, run)))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ([], "not a report of an online benchmark"),
        ({"benchmark": "offline"}, "not a report of an online benchmark"),
        ({"benchmark": "online"}, "its format is None"),
        ({"benchmark": "online", "format": 1}, "missing or changed"),
        ({**make_report(count=3), "requests": []}, "missing or changed"),
        ({**make_report(count=3), "requests": [5]}, "missing or changed"),
        ({**make_report(count=3), "targets": {"x": 1}}, "missing or changed"),
        ({**make_report(count=3), "timeline": {"output_tps": []}}, "missing or changed"),
        (make_report(count=3, failing=1.0), "no answered request"),
    ],
)
def test_files_that_are_no_runs(tmp_path: Path, content: Any, why: str) -> None:
    path = save(tmp_path / "x.json", content)
    with pytest.raises(QuireError) as caught:
        read_run(path)
    assert caught.value.what.startswith(f"{path} can't be compared") and why in caught.value.what


# -- the command


def test_exit_codes_and_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = save(tmp_path / "a.json", make_report()), save(tmp_path / "b.json", make_report(1.5, jitter=1))
    page = tmp_path / "both.html"
    assert main(["bench", "compare", str(a), str(b), "--html", str(page)]) == 2
    out = capsys.readouterr().out
    assert "FAIL  B is worse in TTFT p50" in out and "1.5" in out
    assert "B is worse than A." in page.read_text()
    assert main(["bench", "compare", str(b), str(a)]) == 0
    assert "pass  B is not worse" in capsys.readouterr().out
    assert main(["bench", "compare", str(a), str(b), "--tolerance", "0.9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tolerance"] == 0.9
    assert main(["bench", "compare", str(a), str(tmp_path / "absent.json")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main(["bench", "compare", str(a)]) == 1
