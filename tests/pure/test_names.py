"""Rules of the package's layout: unique class names, small folders, described modules, formatted signatures.

A protocol and its implementations share a suffix, not a name, so class names need no exception.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_FILES = 23  # side by side in one folder; divide it from about 20 on


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "quire").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 500
    repeated = {name: where for name, where in places.items() if len(where) > 1}
    assert not repeated, f"rename the less central class of each: {repeated}"


def test_folders_are_small() -> None:
    """A folder with more files hides the architecture: divide it by what its files do."""
    files = [path for path in (ROOT / "quire").rglob("*") if path.is_file() and path.suffix not in (".pyc", ".so")]
    folders = Counter(path.parent for path in files)
    assert len(folders) > 40
    large = {str(folder.relative_to(ROOT)): count for folder, count in folders.items() if count > MAX_FILES}
    assert not large


def test_every_module_says_what_it_is() -> None:
    paths = [path for path in (ROOT / "quire").rglob("*.py") if path.name != "__init__.py"]
    assert not [path for path in paths if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]


def test_the_formatter_lays_out_every_line() -> None:
    switched_off = re.compile(r"#\s*fmt:\s*(skip|off)")
    paths = sorted((ROOT / "quire").rglob("*.py"))
    assert not [path for path in paths if switched_off.search(path.read_text(encoding="utf-8"))]
