"""`quire bench`: exit code 2 means a missed bar and nothing else, for every benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.cli import bench
from quire.cli.main import main
from quire.types import QuireError
from tests.pure.test_cli_hints import parsers

BENCHMARKS = sorted(name.removeprefix("bench ") for name in parsers() if name.startswith("bench "))
NEEDED = {  # what a benchmark can't be called without
    "offline": ["--workload", "chat"],
    "online": ["--url", "http://127.0.0.1:1", "--rate", "1", "--requests", "1"],
    "compare": ["a.json", "b.json"],
    "quality": ["--text", "text.txt"],
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def argv(name: str, *more: str) -> list[str]:
    from quire.bench.workloads import WORKLOADS

    needed = ["--workload", next(iter(WORKLOADS))] if name == "offline" else NEEDED.get(name, [])
    return ["bench", name, *needed, *more]


def measure(monkeypatch: pytest.MonkeyPatch, name: str, result: Any) -> None:
    """Puts a report, or an error, in the place of the benchmark."""

    def stand_in(*_: object) -> Any:
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setitem(bench._MEASURE, name, stand_in)


def test_every_benchmark_is_covered() -> None:
    assert set(BENCHMARKS) == set(bench._MEASURE) and len(BENCHMARKS) > 10


@pytest.mark.parametrize("name", BENCHMARKS)
def test_wrong_usage_is_1(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measure(monkeypatch, name, pytest.fail)
    assert main(argv(name, "--no-such-flag", "1")) == 1
    assert "unrecognized arguments: --no-such-flag" in capsys.readouterr().err
    if NEEDED.get(name):
        assert main(["bench", name]) == 1
        assert "required" in capsys.readouterr().err


@pytest.mark.parametrize("error", ["usage", "invalid_setting", "unknown_setting", "prompt_too_long", "out_of_memory"])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_what_can_not_be_measured_is_1(
    name: str, error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(monkeypatch, name, QuireError(error, "It is wrong."))
    assert main(argv(name)) == 1
    assert capsys.readouterr().err == "quire: error: It is wrong.\n"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_other_endings_keep_their_codes(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, code in ((KeyError("k"), 70), (OSError(5, "Broken"), 1), (KeyboardInterrupt(), 130)):
        measure(monkeypatch, name, error)
        assert main(argv(name)) == code


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_missed_bar_is_2_and_a_met_one_0(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ["--json"] + (["--gate"] if name == "batch" else [])
    for is_met, code in ((False, 2), (True, 0)):
        measure(monkeypatch, name, {"benchmark": name, "pass": is_met})
        assert main(argv(name, *more)) == code


def test_wrong_settings_are_1_wherever_they_stand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "growth", "--show-config", "--max-rows", "none-at-all"]) == 1
    assert main(["bench", "growth", "--config", "absent.toml"]) == 1
    monkeypatch.setenv("QUIRE_MAX_ROW", "1")
    assert main(["bench", "growth"]) == 1
    assert main(["bench", "growth", "--show-config"]) == 1
    assert main(["run", "--show-config"]) == 2, "other commands keep theirs"


@pytest.mark.parametrize("words", [["bench"], ["bench", "xyzzy"], ["bench", "--xyzzy"]])
def test_no_benchmark_is_1(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    assert capsys.readouterr().err.startswith("usage: quire bench")
