"""Block files in a folder: a local disk, or a folder that several machines share.

A file is written under a temporary name, synced and renamed, so that others see it whole or not at all. The folder
itself is the only index: it is scanned at the start. Files are readable by their owner alone.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from quire.types import QuireError

MARKER = "quire-cache"
VERSION = "1"
NAME = re.compile(r"[0-9a-f]{40}-[0-9a-f]{16}-[0-9]{3}")
TEMPORARY = ".tmp"
STALE_SECONDS = 3600.0  # age from which a temporary file counts as left over from a crash, also in a shared folder


class StoredFile(NamedTuple):
    """A file of a store, as its scan finds it."""

    name: str
    num_bytes: int
    used_at: float  # Unix seconds


class BlockStore(Protocol):
    """A store of block files. Calls come from several threads and may block; errors are `OSError`."""

    is_shared: bool  # other engines write to it, so it is scanned again and again

    def scan(self) -> Iterator[StoredFile]: ...

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Return the first `max_bytes` of a file; None: there is no such file."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file, visible once it is complete."""
        ...

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        ...


class FolderStore:
    """Implements `BlockStore`. Refuses a folder that is not empty and was not made by it."""

    def __init__(self, folder: Path, *, is_shared: bool = False):
        self.folder = folder
        self.is_shared = is_shared
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_marker()
        except OSError as error:
            what = f"The cache folder {str(folder)!r} can't be used: {error.strerror or error}."
            raise QuireError("cache_folder", what, "Choose another folder, or mend its permissions.") from None

    def _check_marker(self) -> None:
        marker = self.folder / MARKER
        if marker.is_file():
            found = marker.read_bytes()[:100].decode("utf-8", "replace").strip()
            if found != VERSION:
                what = f"The cache folder {str(self.folder)!r} has format {found!r}, this Quire writes {VERSION!r}."
                raise QuireError("cache_folder", what, "Choose another folder, or delete that one.")
        elif any(self.folder.iterdir()):
            what = f"The folder {str(self.folder)!r} is not empty and is no cache of Quire."
            raise QuireError("cache_folder", what, "Choose an empty or a new folder.")
        else:
            write_file(marker, VERSION.encode() + b"\n")

    def scan(self) -> Iterator[StoredFile]:
        """Yield all files, and delete what a crash left half written."""
        for shard in sorted(self.folder.iterdir()):
            if len(shard.name) != 2 or not shard.is_dir():
                continue
            for entry in os.scandir(shard):
                try:
                    found = entry.stat(follow_symlinks=False)
                    if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        yield StoredFile(entry.name, found.st_size, found.st_mtime)
                    elif entry.name.endswith(TEMPORARY) and (
                        not self.is_shared or found.st_mtime < time.time() - STALE_SECONDS
                    ):
                        os.unlink(entry.path)
                except FileNotFoundError:
                    continue  # another engine deleted it

    def read(self, name: str, max_bytes: int, *, touch: bool = True) -> bytes | None:
        """`touch`: note the use, so that the order of use survives a restart."""
        path = self.path(name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb", buffering=0) as file:
            data = file.read(max_bytes) or b""
            while len(data) < max_bytes and (more := file.read(max_bytes - len(data))):
                data += more
        if touch:
            with suppress(OSError):
                os.utime(path)
        return data

    def has(self, name: str) -> bool:
        return self.path(name).is_file()

    def write(self, name: str, data: bytes) -> None:
        path = self.path(name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_file(path, data)

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.path(name))

    def path(self, name: str) -> Path:
        return self.folder / name[:2] / check_name(name)


def check_name(name: str) -> str:
    """Return a block's name. Raises if it is none, which a session's file may have: it must not become a path."""
    if not NAME.fullmatch(name):
        raise QuireError("session_damaged", f"{name[:80]!r} is no name of a block.", "Save the session again.")
    return name


def write_file(path: Path, data: bytes) -> None:
    """Write a file that is visible once it is whole and on the disk, and readable by its owner alone."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}{TEMPORARY}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(descriptor)
        os.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
