"""A digest by which ranks see that they have the same Quire and the same model files, without reading all weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quire.files.source import ModelFiles

HEAD_BYTES = 1 << 20  # of each file: the names, shapes and types of its tensors
PACKAGE = Path(__file__).parents[1]


def model_digest(files: ModelFiles) -> str:
    """Returns a digest of Quire's sources, and of the names, sizes and beginnings of the model's files."""
    found = hashlib.sha256()
    for source in sorted(PACKAGE.rglob("*.py")):
        found.update(f"/{source.relative_to(PACKAGE)}/".encode())
        found.update(source.read_bytes())
    path = Path(files.path)
    for one in sorted(path.iterdir()) if path.is_dir() else [path]:
        if one.is_file():
            found.update(f"/{one.name}/{one.stat().st_size}/".encode())
            with one.open("rb") as file:
                found.update(file.read(HEAD_BYTES))
    return found.hexdigest()
