"""A class name means one thing in the whole package `quire`.

A protocol and its implementations share a suffix, not a name, so they need no exception.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "quire").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 500
    repeated = {name: where for name, where in places.items() if len(where) > 1}
    assert not repeated, f"rename the less central class of each: {repeated}"
