"""Scripts in `bench/` and tests import names that exist, also inside functions.

Scripts run by hand, GPU tests on another machine and slow ones at night, and type checking covers none of them. A name
that was changed would be missed until then.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "bench").glob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


@cache
def defined_names(module: str) -> frozenset[str]:
    """The names that a module has, whatever branch of it runs; its submodules, if it is a package."""
    path = ROOT / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = {inner.stem for inner in path.iterdir()} if path.is_dir() else set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # of `__all__` and of names that a package imports when they are asked for
    return frozenset(names)


def missing_names(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("quire", "tests"):
            assert node.module is not None
            missing = {alias.name for alias in node.names} - defined_names(node.module)
            found += [
                f"{path.relative_to(ROOT)}:{node.lineno}: {node.module} has no {name}" for name in sorted(missing)
            ]
    return found


def test_there_are_scripts_and_tests() -> None:
    assert SCRIPTS and len(TESTS) > 200


def test_imported_names_exist() -> None:
    missing = [line for path in (*SCRIPTS, *TESTS) for line in missing_names(path)]
    assert not missing, "\n".join(missing)


def test_a_name_that_is_gone_is_noticed() -> None:
    assert {"Edge", "NoSuchEdge"} - defined_names("quire.edge") == {"NoSuchEdge"}
