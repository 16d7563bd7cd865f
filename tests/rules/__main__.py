"""`python -m tests.rules [--only WORDS]`: take every rule away in a copy of the tree and see its test fail.

Exit 1 if a rule can go without a test noticing, or if a test fails with all rules in place. Takes some minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tests.rules.removal import Edit, Removal
from tests.rules.removals import REMOVALS
from tests.rules.speculation_removals import SPECULATION_REMOVALS

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("quire", "tests", "docs", ".ci", "pyproject.toml", "README.md")
TEST_SECONDS = 300


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rules")
    parser.add_argument("--only", default="", help="rules whose row, rule or test holds these words")
    args = parser.parse_args()
    chosen = [r for r in (*REMOVALS, *SPECULATION_REMOVALS) if args.only in f"{r.threat} {r.rule} {r.test}"]
    with tempfile.TemporaryDirectory(prefix="quire-rules-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        wrong = [f"{test}: {said}" for test in dict.fromkeys(r.test for r in chosen)
                 if (said := outcome(tree, test)) != "passed"]  # fmt: skip
        for what in wrong:
            print(f"with all rules in place, {what}", flush=True)
        survived = 0
        for removal in chosen:
            began = time.monotonic()
            said = without(tree, removal)
            survived += said != "failed"
            mark = "noticed " if said == "failed" else f"SURVIVED ({said}) "
            print(f"{mark} {removal.threat}: {removal.rule} [{time.monotonic() - began:.1f} s]", flush=True)
    print(f"{len(chosen)} rules removed, {survived} went unnoticed, {len(wrong)} tests do not pass as they are")
    return 1 if survived or wrong else 0


def copy_tree(tree: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, tree / name)


def without(tree: Path, removal: Removal) -> str:
    before = {edit.file: (tree / edit.file).read_text(encoding="utf-8") for edit in removal.edits}
    try:
        for edit in removal.edits:
            path = tree / edit.file
            path.write_text(apply(path.read_text(encoding="utf-8"), edit), encoding="utf-8")
        return outcome(tree, removal.test)
    finally:
        for file, text in before.items():
            (tree / file).write_text(text, encoding="utf-8")


def apply(source: str, edit: Edit) -> str:
    if source.count(edit.text) != 1:
        raise SystemExit(f"{edit.file} holds this {source.count(edit.text)} times instead of once: {edit.text!r}")
    return source.replace(edit.text, edit.without)


def outcome(tree: Path, test: str) -> str:
    """passed, failed (in the test itself), or what else pytest said: an error on the way to it shows nothing."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", "", test]
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=env, text=True, capture_output=True, timeout=TEST_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no end within {TEST_SECONDS} s"
    return read_outcome(done.stdout.splitlines())


def read_outcome(lines: Iterable[str]) -> str:
    last = next((line for line in reversed(list(lines)) if line.strip()), "nothing")
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error|errors|skipped)", last)}
    if counts.get("failed") and not counts.get("error", 0) + counts.get("errors", 0):
        return "failed"
    if counts.get("passed") and set(counts) == {"passed"}:
        return "passed"
    return last.strip()


if __name__ == "__main__":
    sys.exit(main())
