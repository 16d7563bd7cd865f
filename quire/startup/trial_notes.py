"""Trial notes: files that record a start whose kernel trials all passed, so that an equal start skips the trials.

`assemble` reads and writes them; a failed step deletes the note (`runtime.guard`). A note is in Triton's cache
directory beside the compiled kernels, and is deleted with them. Its name is a hash of everything that could change the
result of a trial: this package's sources, Python, torch, Triton, the driver, the GPU, the model and the settings. Its
content is the decisions made by measurement; a file with any other content is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config import Config
from quire.files.source import ModelFiles
from quire.machine import installed_version, nvidia_driver_version
from quire.startup.compile_ahead import ROOT, kernel_folder, kernel_settings, list_sources

VERSION = 1
SUFFIX = ".tried"
MAX_BYTES = 4096
MAX_NOTES = 200  # in one folder; the oldest are deleted
# Sources that launch kernels or decide which ones.
_STARTUP = ("startup/assemble.py", "startup/cache_plan.py", "startup/defaults.py")
SOURCES = (*_STARTUP, "kernels", "layers", "models", "runtime", "sampling")
# Prefixes of environment variables that may change which kernels run.
VARIABLES = ("TRITON_", "CUDA_", "CUBLAS", "NVIDIA_", "TORCH", "PYTORCH", "LLVM_", "DISABLE_")


@dataclass(frozen=True, slots=True)
class TrialNote:
    """The note of one kind of start, whether or not it exists on disk."""

    path: Path

    def read(self) -> dict[str, bool] | None:
        """Returns the decisions in the note; None if there is no valid note."""
        try:
            with self.path.open("rb") as file:
                content = json.loads(file.read(MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(content, dict) or content.get("version") != VERSION or content.get("note") != self.path.stem:
            return None
        decided = content.get("decided")
        if not isinstance(decided, dict) or not all(isinstance(answer, bool) for answer in decided.values()):
            return None
        return decided

    def write(self, decided: Mapping[str, bool]) -> None:
        """Writes the note atomically; another process may write the same note at the same time."""
        text = json.dumps({"version": VERSION, "note": self.path.stem, "decided": dict(decided)})
        if len(text) > MAX_BYTES:
            return
        with suppress(OSError):  # without a note the next start repeats the trials
            self.path.parent.mkdir(parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.stem, suffix=".new")
            try:
                with os.fdopen(number, "w") as file:
                    file.write(text)
                os.replace(name, self.path)
            finally:
                Path(name).unlink(missing_ok=True)
            _keep_newest(self.path.parent)

    def delete(self) -> None:
        """Deletes the note, if there is one."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def find_note(config: Config, files: ModelFiles, card: Mapping[str, Any] | None) -> TrialNote | None:
    """Returns the note of such a start on this GPU.

    None without a GPU, and with `strict_kernels`, which requires trials at every start.
    """
    if card is None or config.engine.strict_kernels:
        return None
    with suppress(OSError):
        versions = [sys.version, *(installed_version(name) for name in ("torch", "triton")), nvidia_driver_version()]
        variables = sorted((name, value) for name, value in os.environ.items() if name.startswith(VARIABLES))
        depends = [kernel_settings(config), _model_identity(files), dict(card), versions, variables, _hash_sources()]
        text = json.dumps(depends, sort_keys=True, default=str)
        return TrialNote(kernel_folder() / (hashlib.sha256(text.encode()).hexdigest()[:32] + SUFFIX))
    return None


def _model_identity(files: ModelFiles) -> list[Any]:
    """Returns what identifies the model's shapes."""
    if files.config is not None:
        return [files.config]
    stat = files.path.stat()
    return [str(files.path), stat.st_size, stat.st_mtime_ns]


def _hash_sources() -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        for path in list_sources(ROOT / "quire" / name):
            text = path.read_bytes()
            digest.update(f"{path.relative_to(ROOT)} {len(text)}\n".encode())
            digest.update(text)
    return digest.hexdigest()


def _keep_newest(folder: Path) -> None:
    notes = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in notes[MAX_NOTES:]:
        path.unlink(missing_ok=True)
