"""A session as one file: exported from a cache folder, checked and imported into another, perhaps on another machine.

    magic, 8 bytes | length, 8 bytes | the session | for each block file: length, 8 bytes | the file

The session says how many files follow and what they are called. Every part has its own checksum, and a block's name
follows from its header, so nothing is put into a folder that is not what it claims to be.
"""

from __future__ import annotations

import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from quire.cache.tiers.blocks import MAX_HEADER, MAX_PART, CorruptBlock, name_of
from quire.cache.tiers.folder import FolderStore
from quire.cache.tiers.sessions import MAX_BYTES, SessionFolder, StoredSession, decode_session, encode_session
from quire.types import QuireError
from quire.types.sessions import SessionInfo, check_session_id, no_such_session

MAGIC = b"QuireEx\x01"
MAX_FILE = 8 * MAX_PART + MAX_HEADER  # a head of a state may exceed the size at which parts are cut
_LENGTH = struct.Struct("<Q")


def export_session(cache: Path, owner: str, name: str, target: Path) -> SessionInfo:
    """Write a session and all its blocks to a new file. Raises if one is missing or damaged, and leaves no file."""
    store = FolderStore(cache)
    session = SessionFolder(cache).get(owner, check_session_id(name))
    if session is None:
        raise no_such_session(name)
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise QuireError("invalid_path", f"The file {str(target)!r} exists already.", "Choose another.") from None
    except OSError as error:
        what = f"The file {str(target)!r} can't be written: {error.strerror or error}."
        raise QuireError("invalid_path", what, "Choose another place.") from None
    try:
        with open(descriptor, "wb") as file:
            file.write(MAGIC)
            _put(file, encode_session(session))
            for part in session.files:
                data = store.read(part, MAX_FILE)
                if data is None or _name(data) != part:
                    what = f"A block of the session {name!r} is missing or damaged."
                    raise QuireError("session_damaged", what, "Load the session in an engine, and save it again.")
                _put(file, data)
            file.flush()
            os.fsync(descriptor)
    except BaseException as error:
        with suppress(OSError):
            target.unlink()
        if isinstance(error, OSError):
            what = f"The file {str(target)!r} can't be written: {error.strerror or error}."
            raise QuireError("invalid_path", what, "Choose another place.") from None
        raise
    return session.info()


def import_session(
    cache: Path, source: Path, *, owner: str | None = None, name: str | None = None, weights: bytes | None = None
) -> SessionInfo:
    """Put an exported session into a cache folder. `owner`, `name`: None for those that it has. `weights`: of the only
    model that it may be of.

    Everything is checked before the session can be found. Blocks before a damaged one stay: each is good by itself.
    """
    store = FolderStore(cache)
    try:
        with open(source, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise _damaged(source, "it is no exported session, or one of another version")
            session = decode_session(_take(file, source, MAX_BYTES))
            if weights is not None and session.weights != weights:
                what = f"The session in {str(source)!r} is of another model, or of the same with other settings."
                raise QuireError("session_of_other_model", what, "Import it where that model runs.")
            for part in session.files:
                data = _take(file, source, MAX_FILE)
                if _name(data) != part:
                    raise _damaged(source, "a block in it is damaged or another one")
                store.write(part, data)
            if file.read(1):
                raise _damaged(source, "something follows its last block")
    except OSError as error:
        what = f"The file {str(source)!r} can't be imported: {error.strerror or error}."
        raise QuireError("invalid_path", what, "Look at the file and at the cache folder.") from None
    changed = {"owner": session.owner if owner is None else owner, "id": check_session_id(name or session.id)}
    left = max(0.0, session.expires_at - session.saved_at)
    session = msgspec.structs.replace(session, **changed, expires_at=time.time() + left)
    SessionFolder(cache).put(session)
    return session.info()


def check_files(cache: Path, session: StoredSession) -> int:
    """Return how many of a session's files are missing."""
    store = FolderStore(cache)
    return sum(not store.has(part) for part in session.files)


def _name(data: bytes) -> str:
    try:
        return name_of(data)
    except CorruptBlock:
        return ""


def _put(file: BinaryIO, data: bytes) -> None:
    file.write(_LENGTH.pack(len(data)))
    file.write(data)


def _take(file: BinaryIO, source: Path, most: int) -> bytes:
    head = file.read(_LENGTH.size)
    length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else most + 1
    data = file.read(length) if length <= most else b""
    if length > most or len(data) != length:
        raise _damaged(source, "it is cut off")
    return data


def _damaged(source: Path, why: str) -> QuireError:
    return QuireError("invalid_session_file", f"{str(source)!r} can't be imported: {why}.", "Export it again.")
