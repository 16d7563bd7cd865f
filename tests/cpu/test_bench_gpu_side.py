"""`quire bench latency` end to end on a model of made-up weights: the parts, the targets, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.files.source import resolve_model
from quire.types import QuireError
from tests.cpu.test_bench_offline import CONFIG, KNOBS


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    knobs = [f"--{name.replace('_', '-')}={value}" for name, value in KNOBS.items() if name != "random_weights"]
    load = ["--decodes=4", "--decode-len=16", "--prompts=3", "--prompt-len=80", "--every=0.01", "--alone=0.02",
            "--fresh-tail=8", "--rest=0.001"]  # fmt: skip
    return ["bench", "latency", f"--model={tmp_path / 'model'}", "--random-weights", *knobs, *load]


def test_latency_under_load(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*flags, "--targets=off,5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [part["target_ms"] for part in report["under_load"]] == [None, 5.0]
    for part in report["under_load"]:
        for name in ("gap_alone_s", "gap_s", "ttft_s"):
            assert 0 < part[name]["p50"] <= part[name]["p99"] <= part[name]["max"], name
    idle = report["idle"]
    assert idle["warm_cached_tokens"] == 64, "72 of the 80 tokens are known, which is 4 full pages of 16"
    assert idle["warm_ttft_s"] > 0 and idle["cold_ttft_s"] > 0


def test_the_table_names_every_figure(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*flags, "--targets=off,5"]) == 0
    shown = capsys.readouterr().out
    for words in ("no target: gap, decodes alone", "target 5 ms: gap while prompts arrive", "first token", "cold",
                  "64 tokens cached"):  # fmt: skip
        assert words in shown, words


@pytest.mark.parametrize(
    ("more", "words"),
    [(["--prompt-len=5000"], "the limit here is"), (["--decodes=8"], "leave no row")],
)
def test_work_that_can_not_be_done_is_refused(
    flags: list[str], more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, *more]) == 1
    assert words in capsys.readouterr().err


def test_targets_that_are_none(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*flags, "--targets=fast"]) == 1
    assert "neither off nor a number" in capsys.readouterr().err


def engine_flags(flags: list[str], benchmark: str) -> list[str]:
    """The same model for another benchmark."""
    own = ("--decodes", "--decode-len", "--prompts", "--prompt-len", "--every", "--alone", "--fresh-tail", "--rest")
    return ["bench", benchmark, *(flag for flag in flags[2:] if not flag.startswith(own))]


def test_start_counts_from_the_start_of_the_process(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    given = [*engine_flags(flags, "start"), "--warm-runs=1", "--prompt-len=5", "--max-cold=0.001"]
    assert main([*given, "--json"]) == 2, "no process is that quick"
    report = json.loads(capsys.readouterr().out)
    for run in (report["cold"], report["warm"]):
        times = [run[name] for name in ("tried_s", "ready_s", "first_token_s", "tenth_token_s")]
        assert times == sorted(times) and times[0] > 0.05, "importing torch takes longer than that"
    assert not report["pass"] and len(report["bars"]) == 1


@pytest.mark.slow
def test_start_compares_quire_run_with_importing_torch(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        resolve_model("smollm2", offline=True)
    except QuireError as problem:
        pytest.skip(str(problem))
    given = ["bench", "start", "--model=smollm2", "--warm-runs=1", "--run-pairs=1", "--max-beyond=0.001", "--json"]
    assert main(given) == 2, "no model is loaded that fast"
    report = json.loads(capsys.readouterr().out)
    (importing, answering), run = report["run"]["pairs"][0], report["run"]
    assert 0.05 < importing < answering
    assert run["beyond_import_s"] == pytest.approx(answering - importing)
    assert [bar["pass"] for bar in report["bars"]] == [False]


def test_start_says_why_a_process_failed(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    broken = [flag for flag in engine_flags(flags, "start") if flag != "--random-weights"]
    assert main(broken) == 1
    shown = capsys.readouterr().err
    assert "quire: error:" in shown and "code 1" not in shown, "its own error, not that there was one"


def test_gap_tells_the_hosts_time_from_its_waiting(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    given = [*engine_flags(flags, "gap"), "--rows=4", "--prompt-len=8", "--steps=20"]
    assert main([*given, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["steps"] == 20 and report["device_s"] is None, "there is no GPU here"
    parts = report["host_parts_s"]
    assert {"plan", "forward", "sample", "commit"} <= set(parts)
    assert report["host_s"]["p50"] + report["wait_s"]["p50"] <= report["turn_s"]["max"] * 1.001
    assert sum(part["p50"] for part in parts.values()) <= report["host_s"]["max"]
    assert main(given) == 0
    assert "host waits for tokens" in capsys.readouterr().out
