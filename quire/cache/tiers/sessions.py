"""Sessions in a cache folder: which conversation, of which owner, and the files of its blocks.

A session is one file, named by a hash of its owner and id: no id is part of a path, and no owner finds another's.
It has the conversation's tokens, so it is as private as the blocks: only its user may read it. `quire.engine.sessions`
writes and reads it on a thread; `quire cache` reads it without an engine.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from zlib import crc32

import msgspec

from quire.cache.tiers.folder import TEMPORARY, write_file
from quire.types import QuireError
from quire.types.sessions import SessionInfo

MAGIC = b"QuireSn\x01"  # the last byte is the format's version
FOLDER = "sessions"
MAX_SESSIONS = 1000  # in one folder
MAX_BYTES = 256 << 20  # of one session's file
_CHECKSUM = struct.Struct("<I")


class StoredSession(msgspec.Struct, array_like=True, frozen=True):
    """A saved conversation."""

    id: str
    owner: str
    weights: bytes  # digest of the model's weights and settings
    salt: bytes
    tokens: list[int]
    length: int  # leading tokens whose blocks are stored
    files: list[str]  # the names of these blocks' files
    num_bytes: int
    saved_at: float
    expires_at: float
    messages: str = ""

    def info(self, ready_tokens: int = 0) -> SessionInfo:
        return SessionInfo(
            self.id,
            len(self.tokens),
            self.length,
            self.num_bytes,
            self.saved_at,
            self.expires_at,
            ready_tokens,
            self.messages,
        )


class SessionFolder:
    """The sessions of one cache folder. Calls may block, and raise `OSError` where the disk fails."""

    def __init__(self, cache: Path):
        self.cache = cache  # the folder with the blocks
        self._folder = cache / FOLDER

    def put(self, session: StoredSession) -> None:
        path = self._path(session.owner, session.id)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if not path.exists() and len(os.listdir(self._folder)) >= MAX_SESSIONS:
            what = f"The cache folder has {MAX_SESSIONS} sessions already."
            raise QuireError("too_many_sessions", what, "Delete some, or run `quire cache prune`.")
        write_file(path, encode_session(session))

    def get(self, owner: str, name: str) -> StoredSession | None:
        """Return a session; None: there is none of this owner. Raises if its file is damaged."""
        try:
            data = self._path(owner, name).read_bytes()
        except FileNotFoundError:
            return None
        session = decode_session(data)
        return session if (session.owner, session.id) == (owner, name) else None

    def delete(self, owner: str, name: str) -> bool:
        try:
            self._path(owner, name).unlink()
        except FileNotFoundError:
            return False
        return True

    def all(self) -> Iterator[tuple[Path, StoredSession | None]]:
        """Yield every file with its session; None: it is damaged."""
        with suppress(FileNotFoundError):
            for path in sorted(self._folder.iterdir()):
                if path.name.endswith(TEMPORARY) or not path.is_file():
                    continue
                try:
                    yield path, decode_session(path.read_bytes())
                except QuireError:
                    yield path, None

    def _path(self, owner: str, name: str) -> Path:
        digest = blake2b(f"{owner}\0{name}".encode(), digest_size=20, person=b"quire session")
        return self._folder / digest.hexdigest()


def encode_session(session: StoredSession) -> bytes:
    body = MAGIC + msgspec.msgpack.encode(session)
    return body + _CHECKSUM.pack(crc32(body))


def decode_session(data: bytes) -> StoredSession:
    """Return the session of a file. Raises if the file is damaged, or of another version."""
    good = MAGIC[:-1] == data[: len(MAGIC) - 1] and len(data) > len(MAGIC) + 4
    if good and data[: len(MAGIC)] != MAGIC:
        raise QuireError("session_damaged", "The session has another version of the format.", "Save it again.")
    if good and crc32(data[:-4]) == _CHECKSUM.unpack(data[-4:])[0]:
        with suppress(msgspec.MsgspecError):
            return msgspec.msgpack.decode(data[len(MAGIC) : -4], type=StoredSession)
    raise QuireError("session_damaged", "The session's file is damaged.", "Delete the session, and save it again.")
