"""`quire bench latency` end to end on a model of made-up weights: the parts, the targets, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.main import main
from tests.cpu.test_bench_offline import CONFIG, KNOBS


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    knobs = [f"--{name.replace('_', '-')}={value}" for name, value in KNOBS.items() if name != "random_weights"]
    load = ["--decodes=4", "--decode-len=16", "--prompts=3", "--prompt-len=80", "--every=0.01", "--alone=0.02",
            "--fresh-tail=8"]  # fmt: skip
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
    assert main([*flags, "--targets=fast"]) == 2
    assert "neither off nor a number" in capsys.readouterr().err
