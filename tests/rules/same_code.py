"""`python -m tests.rules.same_code BASE [REV]`: prove that only comments and docstrings changed between two commits.

Every Python file under `quire` and `tests` is parsed at both commits and compared without its docstrings. REV is the
working tree unless it is named. Exits with 1 and names each file whose code differs.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2:
        print(__doc__, file=sys.stderr)
        return 64
    base, revision = arguments[0], arguments[1] if len(arguments) == 2 else None
    changed = _git("diff", "--name-status", "--no-renames", base, *([revision] if revision else [])).splitlines()
    failures = []
    for line in changed:
        status, path = line.split("\t", 1)
        if not path.endswith(".py") or not path.startswith(("quire/", "tests/")):
            continue
        if status != "M":
            failures.append(f"{path}: added or removed")
            continue
        new = _git("show", f"{revision}:{path}") if revision else (ROOT / path).read_text(encoding="utf-8")
        if code_of(_git("show", f"{base}:{path}")) != code_of(new):
            failures.append(f"{path}: the code differs")
    for failure in failures:
        print(failure)
    print(f"{len(changed)} changed files, {len(failures)} with other code")
    return 1 if failures else 0


def code_of(source: str) -> str:
    """The syntax tree of a module as text, without docstrings; comments and layout are not part of it."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
