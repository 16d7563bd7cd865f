"""Finds models in the Hugging Face cache, where other tools have downloaded them. It is read and never written.

`hub` asks here before it downloads. Layout: `models--owner--name/refs/<revision>` names a commit, and
`snapshots/<commit>/` has its files, mostly as links to `blobs/`.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}")
MAX_FILES = 10_000  # of one snapshot


@dataclass(frozen=True, slots=True)
class CachedSnapshot:
    """The files of one commit that are in the Hugging Face cache; others may be missing."""

    folder: Path
    commit: str
    sizes: dict[str, int]  # by name in the repository

    def has(self, name: str, size: int | None) -> bool:
        """Whether a file is there, with this size if it is known."""
        return name in self.sizes and size in (None, self.sizes[name])


def hf_cache_dir() -> Path | None:
    """Returns the folder of the cache, as Hugging Face's own tools find it; None without a home folder."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if given := os.environ.get(name):
            return Path(given).expanduser()
    if given := os.environ.get("HF_HOME"):
        return Path(given).expanduser() / "hub"
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given).expanduser() / "huggingface" / "hub"
    with suppress(RuntimeError):
        return Path.home() / ".cache" / "huggingface" / "hub"
    return None


def find_snapshot(repo: str, revision: str) -> CachedSnapshot | None:
    """Returns the snapshot of a branch, tag or commit; None if the cache does not have it."""
    base = hf_cache_dir()
    if base is None or ".." in revision:
        return None
    folder, commit = base / f"models--{repo.replace('/', '--')}", revision
    with suppress(OSError, ValueError):
        commit = (folder / "refs" / revision).read_text("utf-8").strip()
    if not _COMMIT.fullmatch(commit):
        return None
    snapshot = folder / "snapshots" / commit
    sizes = _list_files(snapshot)
    return CachedSnapshot(snapshot, commit, sizes) if sizes else None


def _list_files(folder: Path) -> dict[str, int]:
    """Returns the sizes of all files below a folder. A link to a blob that was deleted is no file."""
    sizes: dict[str, int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with suppress(OSError):
                sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
            if len(sizes) > MAX_FILES:
                return {}
    return sizes
