"""`python -m tests.nightly [--only WORDS] [--out FILE]`: run everything that is too slow for each commit.

Each part is one command with a time limit. A part that fails or runs out of time does not stop the others. Prints one
line per part, writes the results as a Markdown table to FILE (`docs/nightly.md` holds the last one), and exits with 1
if any part failed. `--rules`, `--cases` and `--chaos-minutes` shorten a part; the table marks such a part as partial.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from quire.machine import read_machine

ROOT = Path(__file__).resolve().parents[1]
PYTHON = (sys.executable, "-m")
AGENTS = "tests/e2e/test_agents.py"
RULES, CASES, CHAOS_MINUTES = "", 20_000, 10.0  # what a whole run takes
PYTEST_SUMMARY = r"^[= ]*(\d+ (?:passed|failed|skipped|deselected|errors?)\b.*?)[= ]*$"
GATE = r"^((?:pass|FAIL)  .*)$"


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    command: tuple[str, ...]  # arguments of `python -m`
    limit_minutes: float
    summary: str  # pattern of the lines that show the result; the first group is what the table holds
    partial: bool = False  # covers less than a whole nightly run does


@dataclass(frozen=True, slots=True)
class PartResult:
    part: Part
    outcome: str  # passed, skipped, failed or timed out
    seconds: float
    summary: str

    @property
    def has_failed(self) -> bool:
        return self.outcome not in ("passed", "skipped")


def nightly_parts(rules: str = RULES, cases: int = CASES, chaos_minutes: float = CHAOS_MINUTES) -> list[Part]:
    def bench(name: str, limit_minutes: float, *flags: str) -> Part:
        return Part(f"bench {name}", ("quire", "bench", name, *flags), limit_minutes, GATE)

    rules_flags = ("--only", rules) if rules else ()
    chaos_flags = ("--model", "tiny", "--deterministic", "--minutes", f"{chaos_minutes:g}")
    return [
        Part("slow tests", ("pytest", "-q", "-n", "0", "-m", "slow", f"--ignore={AGENTS}"), 60, PYTEST_SUMMARY),
        Part("agents", ("pytest", "-q", "-n", "0", "-m", "slow", AGENTS), 20, PYTEST_SUMMARY),
        Part("rules", ("tests.rules", *rules_flags), 60, r"^(\d+ rules removed.*)$", partial=rules != RULES),
        Part("fuzz", ("tests.fuzz", "--cases", str(cases)), 60, r"^(\d+ cases.*)$", partial=cases < CASES),
        Part(
            "chaos",
            ("quire", "chaos", *chaos_flags),
            chaos_minutes + 10,
            r"^(?:│ )?((?:faults|innocent|tokens (?:lost|dup)|wrong bytes|leaked).*?|passed|FAILED)(?: *│$|;)",
            partial=chaos_minutes < CHAOS_MINUTES,
        ),
        bench("scheduler", 10),
        bench("batch", 10, "--model", "smollm2", "--output-len", "32", "--gate"),
        bench("growth", 15, "--model", "smollm2"),
        bench("start", 10, "--model", "smollm2", "--run-pairs", "5", "--max-beyond", "1.5"),
        bench("hostile", 20, "--model", "smollm2"),
    ]


def run_part(part: Part, log: Path) -> PartResult:
    """Run one part with its output in `log`; at its time limit, kill it and every process it started."""
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*PYTHON, *part.command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(part.limit_minutes * 60)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:  # at the time limit, or when the whole run is interrupted
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = read_summary(log.read_text(encoding="utf-8", errors="replace"), part.summary)
    return PartResult(part, _outcome(code, lines), time.monotonic() - began, "; ".join(lines) or f"exit code {code}")


def read_summary(output: str, pattern: str) -> list[str]:
    """Return the first group of each line that matches, with the column rules of tables replaced by spaces."""
    return [
        " ".join(re.split(r"[\s│]+", match[1].strip()))
        for line in output.splitlines()
        if (match := re.match(pattern, line))
    ]


def _outcome(code: int | None, summary: Sequence[str]) -> str:
    if code is None:
        return "timed out"
    if code:
        return "failed"
    # pytest exits with 0 where every test was skipped, which shows nothing.
    skipped = bool(summary) and "skipped" in summary[-1] and "passed" not in summary[-1]
    return "skipped" if skipped else "passed"


def show_line(result: PartResult, log: Path) -> str:
    name = result.part.name + (" (partial)" if result.part.partial else "")
    end = f" [{log}]" if result.has_failed else ""
    return f"{result.outcome:9} {name}, {_duration(result.seconds)}: {result.summary}{end}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{int(seconds) // 60} min {int(seconds) % 60} s"


def to_markdown(results: Sequence[PartResult], not_run: Sequence[str], commit: str, machine: str, date: str) -> str:
    rows = [
        f"| {result.part.name} | {result.outcome}{' (partial)' if result.part.partial else ''} | "
        f"{_duration(result.seconds)} | {_cell(result.summary)} | `{_cell(' '.join(result.part.command))}` |"
        for result in results
    ]
    return "\n".join(
        [
            "# The last nightly run",
            "",
            "`make nightly` writes this page (`tests/nightly.py`). A partial part covers less than a whole run does. A",
            "skipped part needs a program that the machine does not have. A benchmark that misses its gate has failed.",
            "",
            f"- Commit: {commit}",
            f"- Machine: {machine}",
            f"- Date: {date}",
            *([f"- Not run: {', '.join(not_run)}"] if not_run else []),
            "",
            "| part | result | duration | summary | `python -m …` |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def describe_machine() -> str:
    machine = read_machine()
    memory = "" if machine.memory_total is None else f", {machine.memory_total / 2**30:.0f} GiB"
    load = f", load average {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else ""
    return f"{machine.cpu}, {machine.num_usable_cores} cores{memory}{load}"


def describe_commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = ", with changes that are not committed" if git("status", "--porcelain", "--untracked-files=no") else ""
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + changed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nightly")
    parser.add_argument("--only", default="", metavar="WORDS", help="parts whose name contains one of these, by commas")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as Markdown")
    parser.add_argument(
        "--rules", default=RULES, metavar="WORDS", help="remove only the rules that contain these words"
    )
    parser.add_argument("--cases", type=int, default=CASES, metavar="N", help="fuzz cases of each target")
    parser.add_argument("--chaos-minutes", type=float, default=CHAOS_MINUTES, metavar="M", help="length of the chaos")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `run_part` kills the part under way
    parts = nightly_parts(args.rules, args.cases, args.chaos_minutes)
    chosen = [part for part in parts if any(word in part.name for word in args.only.split(","))]
    if not chosen:
        parser.error(f"no part is called {args.only!r}; there are {', '.join(part.name for part in parts)}")
    return run_nightly(chosen, args.out, [part.name for part in parts if part not in chosen])


def run_nightly(parts: Sequence[Part], out: Path | None, left_out: Sequence[str] = ()) -> int:
    commit, machine, date = describe_commit(), describe_machine(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    logs = Path(tempfile.mkdtemp(prefix="quire-nightly-"))
    results = []
    for index, part in enumerate(parts):
        log = logs / f"{part.name.replace(' ', '-')}.log"
        results.append(run_part(part, log))
        print(show_line(results[-1], log), flush=True)
        if out is not None:  # after each part, so that an interrupted run leaves what it has
            not_run = [*left_out, *(later.name for later in parts[index + 1 :])]
            out.write_text(to_markdown(results, not_run, commit, machine, date), encoding="utf-8")
    return 1 if any(result.has_failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
