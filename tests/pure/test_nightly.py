"""`tests.nightly`: a failed part does not stop the others, time limits end a part, and the table tells the truth."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import nightly
from tests.nightly import PYTEST_SUMMARY, Part, nightly_parts, read_summary, run_nightly


@pytest.fixture(autouse=True)
def run_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are Python code instead of modules."""
    monkeypatch.setattr(nightly, "PYTHON", (nightly.sys.executable, "-c"))


def part(name: str, code: str, minutes: float = 1.0, partial: bool = False) -> Part:
    return Part(name, (code,), minutes, r"^(.+)$", partial)


def test_goes_on_after_a_failure_and_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "nightly.md"
    parts = [
        part("first", "print('it broke'); raise SystemExit(2)"),
        part("second", "print('3 passed | in 1s')", partial=True),
        part("third", "print('4 skipped in 1s')"),
    ]
    assert run_nightly(parts, out, ["fourth"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0].split(maxsplit=1) for line in lines] == [
        ["failed", "first"],
        ["passed", "second (partial)"],
        ["skipped", "third"],
    ]
    page = out.read_text()
    assert "| first | failed | " in page and "| it broke | `print('it broke'); raise SystemExit(2)` |" in page
    assert "| second | passed (partial) | " in page and "3 passed \\| in 1s" in page
    assert "| third | skipped | " in page
    assert "- Commit: " in page and "- Machine: " in page and "- Date: " in page
    assert "- Not run: fourth\n" in page


def test_passes_when_all_parts_do() -> None:
    assert run_nightly([part("one", "print('1 passed')"), part("two", "")], None) == 0


@pytest.mark.parametrize("end", [subprocess.TimeoutExpired("part", 60.0), SystemExit(143)])
def test_a_part_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    """At its time limit, or when the run is ended. The part and its child hold a pipe open; reading the pipe reaches
    its end only when both are dead."""
    os.mkfifo(tmp_path / "pipe")
    code = (
        f"import os, signal; pipe = open({str(tmp_path / 'pipe')!r}, 'wb', 0); os.fork(); pipe.write(b'x'); "
        "signal.pause()"
    )
    opened = []
    wait = subprocess.Popen.wait

    def run_out_of_time(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None:
            return wait(process)
        opened.append((tmp_path / "pipe").open("rb", 0))
        assert opened[0].read(1) + opened[0].read(1) == b"xx"  # both run
        raise end

    monkeypatch.setattr(subprocess.Popen, "wait", run_out_of_time)
    if isinstance(end, SystemExit):
        with pytest.raises(SystemExit):
            nightly.run_part(part("hangs", code), tmp_path / "log")
    else:
        result = nightly.run_part(part("hangs", code), tmp_path / "log")
        assert result.outcome == "timed out" and result.has_failed
    with opened[0] as pipe:
        assert pipe.read(1) == b""


def test_parts_shortened_by_a_flag_are_partial() -> None:
    assert not [each.name for each in nightly_parts() if each.partial]
    shortened = nightly_parts(rules="body", cases=10, chaos_minutes=1)
    assert [each.name for each in shortened if each.partial] == ["rules", "fuzz", "chaos"]


def test_an_unknown_part_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        nightly.main(["--only", "nothing"])
    assert "there are slow tests, agents, rules" in capsys.readouterr().err


def test_finds_the_rows_of_the_chaos_report() -> None:
    chaos = next(each for each in nightly_parts() if each.name == "chaos")
    output = "│ requests │ 9 │\n│ tokens lost          │ 0      │\n│ leaked pages │ 0 │\npassed; the server's log: x"
    assert read_summary(output, chaos.summary) == ["tokens lost 0", "leaked pages 0", "passed"]


def test_finds_pytest_summary_lines() -> None:
    output = "...s\n=== 3 passed, 1 skipped, 90 deselected in 2.50s ===\n"
    assert read_summary(output, PYTEST_SUMMARY) == ["3 passed, 1 skipped, 90 deselected in 2.50s"]
    assert read_summary("4 skipped in 0.1s", PYTEST_SUMMARY) == ["4 skipped in 0.1s"]
