"""What people do with a cache folder while no engine uses it: list, verify and prune it. `quire cache` calls it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from quire.cache.tiers.blocks import MAX_HEADER, MAX_PART, CorruptBlock, describe_head, name_of
from quire.cache.tiers.folder import MARKER, FolderStore, StoredFile
from quire.cache.tiers.sessions import SessionFolder, StoredSession
from quire.types import QuireError

MAX_FILE = 8 * MAX_PART + MAX_HEADER


@dataclass(slots=True)
class ModelUsage:
    """The blocks of one model with one set of settings."""

    num_files: int = 0
    num_bytes: int = 0
    used_at: float = 0.0  # Unix seconds, the latest use
    groups: set[str] = field(default_factory=set)


@dataclass(slots=True)
class FolderCheck:
    """The result of reading every file of a folder."""

    num_files: int = 0
    num_bytes: int = 0
    damaged: list[Path] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)  # sessions of which blocks are missing


def open_cache(folder: Path) -> FolderStore:
    """Return the store in a folder that exists. Raises if there is none."""
    if not (folder / MARKER).is_file():
        raise QuireError("invalid_path", f"{str(folder)!r} is no cache of Quire.", "Name a folder that Quire has made.")
    return FolderStore(folder)


def list_models(folder: Path) -> dict[str, ModelUsage]:
    """Return what each model has in the folder, by the digest of its weights. A file that can't be read is of "?"."""
    store, models = open_cache(folder), dict[str, ModelUsage]()
    for file in store.scan():
        weights, group = "?", "?"
        with suppress(CorruptBlock, OSError), open(store.path(file.name), "rb") as data:
            weights, group = _head_of(data)
        usage = models.setdefault(weights, ModelUsage())
        usage.num_files += 1
        usage.num_bytes += file.num_bytes
        usage.used_at = max(usage.used_at, file.used_at)
        usage.groups.add(group)
    return models


def _head_of(data: BinaryIO) -> tuple[str, str]:
    return describe_head(data.read(MAX_HEADER))


def list_sessions(folder: Path) -> Iterator[tuple[Path, StoredSession | None]]:
    return SessionFolder(folder).all()


def verify(folder: Path, *, delete: bool = False) -> FolderCheck:
    """Read every file and compare it with its name and checksum. `delete`: delete what is damaged."""
    store, found = open_cache(folder), FolderCheck()
    for file in store.scan():
        found.num_files += 1
        found.num_bytes += file.num_bytes
        try:
            data = store.read(file.name, MAX_FILE, touch=False)
            is_good = data is not None and name_of(data) == file.name
        except (CorruptBlock, OSError):
            is_good = False
        if not is_good:
            found.damaged.append(store.path(file.name))
    damaged = set(found.damaged)
    for path, session in list_sessions(folder):
        if session is None:
            found.damaged.append(path)
        elif any(not store.has(name) or store.path(name) in damaged for name in session.files):
            found.incomplete.append(session.id)
    for path in found.damaged if delete else ():
        path.unlink(missing_ok=True)
    return found


def prune(
    folder: Path, *, keep: int | None = None, older_than: float | None = None, weights: str | None = None
) -> tuple[int, int]:
    """Delete expired and damaged sessions, then files: all not used for `older_than` seconds, all of the model
    `weights`, and the least recently used until `keep` bytes are left, those of sessions last. Returns how many files
    and bytes were deleted."""
    store, now = open_cache(folder), time.time()
    spared: set[str] = set()
    for path, session in list_sessions(folder):
        if session is None or session.expires_at < now:
            path.unlink(missing_ok=True)
        else:
            spared |= set(session.files)
    files = sorted(store.scan(), key=lambda file: (file.name in spared, file.used_at))
    total = sum(file.num_bytes for file in files)
    deleted = freed = 0
    for file in files:
        is_old = older_than is not None and file.used_at < now - older_than and file.name not in spared
        is_surplus = keep is not None and total - freed > keep
        if is_old or is_surplus or (weights is not None and _is_of(store, file, weights)):
            store.delete(file.name)
            deleted, freed = deleted + 1, freed + file.num_bytes
    return deleted, freed


def _is_of(store: FolderStore, file: StoredFile, weights: str) -> bool:
    with suppress(CorruptBlock, OSError), open(store.path(file.name), "rb") as data:
        return _head_of(data)[0].startswith(weights)
    return False
