"""A session: the cache of a conversation, kept in a store under a name until it expires."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quire.types.bounds import MAX_ERROR, TokenIds
from quire.types.errors import QuireError

SessionAction = Literal["save", "load", "get", "delete"]
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_MESSAGES = 16 << 20  # characters of the messages, as JSON, that are kept beside the cache
DEFAULT_SECONDS = 30 * 24 * 3600.0  # until a session expires
MAX_SECONDS = 10 * 366 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What is known of a session."""

    id: str
    num_tokens: int  # of the conversation
    saved_tokens: int  # of these, the leading ones whose cache is in the store
    num_bytes: int  # of their blocks
    saved_at: float  # Unix seconds
    expires_at: float
    ready_tokens: int = 0  # after a load: the leading tokens whose cache is on the device or in host memory
    messages: str = ""  # JSON, as it was given; empty if there was none


class SessionCommand(msgspec.Struct, tag="session", array_like=True, frozen=True):
    """What an engine is asked to do with a session, answered by a `SessionReply` with the same number."""

    number: int
    action: SessionAction
    id: Annotated[str, Meta(max_length=256)]
    owner: Annotated[str, Meta(max_length=256)]
    tokens: TokenIds = []  # the rest is for "save"
    salt: Annotated[bytes, Meta(max_length=256)] = b""
    seconds: float = DEFAULT_SECONDS  # until it expires
    messages: Annotated[str, Meta(max_length=MAX_MESSAGES)] = ""


class SessionReply(msgspec.Struct, tag="session_done", array_like=True, frozen=True):
    """`info` is None after a deletion, and where the command failed with `code` and `what`."""

    number: int
    info: SessionInfo | None = None
    code: Annotated[str, Meta(max_length=256)] = ""
    what: Annotated[str, Meta(max_length=MAX_ERROR)] = ""
    hint: Annotated[str, Meta(max_length=MAX_ERROR)] = ""

    def result(self) -> SessionInfo | None:
        """Return the session. Raises the error that the engine answered."""
        if self.code:
            raise QuireError(self.code, self.what, self.hint, "id")
        return self.info


def check_session_id(name: str) -> str:
    """Return the id. Raises where it is not one that can be kept."""
    if not _ID.fullmatch(name):
        shown = name if len(name) <= 60 else name[:57] + "..."
        what = f"{shown!r} is no session id."
        hint = "Use 1 to 128 letters, digits, '.', '_' and '-', the first a letter or digit."
        raise QuireError("invalid_session_id", what, hint, "id")
    return name


def no_such_session(name: str) -> QuireError:
    return QuireError("session_not_found", f"There is no session {name!r}.", "Save it first.", "id")
