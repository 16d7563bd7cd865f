"""The model store on disk: its location, atomic writes, verification stamps and locks.

Layout under `$XDG_CACHE_HOME/quire`: `builtin/` for built-in models, `hub/owner--name/<commit>/` for hub models, and
`locks/`. `fetch`, `hub`, `wheel` and `builtin` write through this module.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from quire.files.progress import Progress, format_bytes
from quire.types import QuireError

CHUNK_BYTES = 1 << 20


def cache_dir() -> Path:
    """Returns the store's folder without creating it. A relative `XDG_CACHE_HOME` is ignored, as its spec requires."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base and os.path.isabs(base):
        return Path(base) / "quire"
    try:
        return Path.home() / ".cache" / "quire"
    except RuntimeError:
        raise QuireError(
            "cache_unwritable", "There is no home folder to keep models in.", "Set XDG_CACHE_HOME to a folder."
        ) from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError from writing below `path` into a `cache_unwritable` error."""
    try:
        yield
    except OSError as error:
        raise QuireError(
            "cache_unwritable",
            f"Cannot write {path}: {error.strerror or error}.",
            "Free some space or set XDG_CACHE_HOME to a folder you can write to.",
        ) from error


def file_sizes(path: Path) -> dict[Path, int]:
    """Returns the size of the file `path`, or of every file below that folder.

    Files that another process deletes meanwhile are left out.
    """
    sizes: dict[Path, int] = {}
    files = [path] if path.is_file() else (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    for file in files:
        with suppress(OSError):
            sizes[file] = file.stat().st_size
    return sizes


def check_space(folder: Path, num_bytes: int) -> None:
    """Raises `cache_unwritable` before a download that would not fit on the disk."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return  # unknown free space: a full disk fails while writing
    if num_bytes > free:
        raise QuireError(
            "cache_unwritable",
            f"{folder} has {format_bytes(free)} free, and {format_bytes(num_bytes)} more are needed.",
            "Free some space or set XDG_CACHE_HOME to a folder on a larger disk.",
        )


def write_text(path: Path, text: str) -> None:
    """Replaces a small file atomically. Does nothing if it has this text, since the store may be read-only."""
    with suppress(OSError, UnicodeDecodeError):
        if path.read_text("utf-8") == text:
            return
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(text, "utf-8")
        os.replace(part, path)


class PartFile:
    """A partial file: it has the suffix `.part`, is hashed while it is written, and is renamed when complete.

    It continues the partial file of an earlier attempt, so that downloads resume. The caller must hold the lock, since
    two writers would corrupt it.
    """

    def __init__(self, target: Path, resume: bool = True):
        self.target = target
        self.path = target.with_name(target.name + ".part")
        self.done = 0
        self._hash = hashlib.sha256()
        with writing(self.path):
            target.parent.mkdir(parents=True, exist_ok=True)
            mode = "r+b" if resume and self.path.exists() else "w+b"
            self._file = open(self.path, mode)  # noqa: SIM115 -- lives as long as this object
            while chunk := self._file.read(CHUNK_BYTES):
                self._hash.update(chunk)
                self.done += len(chunk)

    @property
    def sha256(self) -> str:
        """Hash of the bytes so far."""
        return self._hash.hexdigest()

    def write(self, chunk: bytes) -> None:
        """Appends bytes."""
        with writing(self.path):
            self._file.write(chunk)
        self._hash.update(chunk)
        self.done += len(chunk)

    def restart(self) -> None:
        """Deletes the bytes so far."""
        with writing(self.path):
            self._file.seek(0)
            self._file.truncate()
        self._hash = hashlib.sha256()
        self.done = 0

    def publish(self) -> None:
        """Syncs the file to disk, then renames it. A crash leaves either the partial or the complete file."""
        with writing(self.target):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self.path, self.target)
            _sync_folder(self.target.parent)

    def discard(self) -> None:
        """Closes and deletes the partial file."""
        self.done = 0
        self.close()

    def close(self) -> None:
        """Closes the file; keeps it for the next attempt unless it is empty."""
        with suppress(OSError):
            self._file.close()
        if self.done == 0:
            self.path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # some systems cannot open a folder to sync it
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------------------
# Stamps record that a file was hashed, so that a start need not hash it again


def write_stamp(path: Path, sha256: str) -> None:
    """Writes the stamp of a verified file: its hash, size and modification time."""
    status = path.stat()
    stamp = {"sha256": sha256, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    write_text(path.with_name(path.name + ".stamp"), json.dumps(stamp) + "\n")


def is_verified(path: Path, size: int, sha256: str) -> bool:
    """Whether the file exists with the right bytes. Hashes it only if it changed since its stamp was written."""
    try:
        status = path.stat()
    except OSError:
        return False
    if status.st_size != size:
        return False
    with suppress(OSError, ValueError):
        stamp = json.loads(path.with_name(path.name + ".stamp").read_bytes())
        if stamp == {"sha256": sha256, "size": size, "mtime_ns": status.st_mtime_ns}:
            return True
    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return False
    if found != sha256:
        return False
    with suppress(QuireError):  # in a read-only store the next start hashes again
        write_stamp(path, sha256)
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Locks


@contextmanager
def exclusive(key: str, what: str, progress: Progress) -> Iterator[None]:
    """Holds the lock `key`; waits, with a note to the user, while another process holds it.

    The system releases the lock when its process ends.
    """
    path = cache_dir() / "locks" / (re.sub(r"[^\w.-]", "_", key) + ".lock")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab")  # noqa: SIM115 -- only the opening may fail as "cannot write"
    with file:
        if not _lock(file, wait=False):
            progress.note(f"another process is fetching {what}, waiting")
            while not _lock(file, wait=True):
                pass
        yield


if sys.platform == "win32":
    import msvcrt

    def _lock(file: BinaryIO, wait: bool) -> bool:
        file.seek(0)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError:  # held by another process; LK_LOCK times out after ten seconds
            return False
        return True

else:
    try:
        import fcntl
    except ImportError:  # a Python without it
        fcntl = None  # type: ignore[assignment]

    def _lock(file: BinaryIO, wait: bool) -> bool:
        if fcntl is None:
            return True  # as below
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True  # a file system without locks: atomic renames keep the store consistent
        return True
