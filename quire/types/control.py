"""Commands to a running engine and their replies: adapters, weights, precision, sleep. They cross processes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.types.bounds import MAX_ERROR
from quire.types.errors import QuireError

ControlAction = Literal["load_adapter", "unload_adapter", "weights", "precision", "sleep", "wake"]
Word = Annotated[str, Meta(max_length=4096)]
Field = Word | int | float | bool | None


class ControlCommand(msgspec.Struct, tag="control", array_like=True, frozen=True):
    """What an engine is asked to do, answered by a `ControlReply` with the same number."""

    number: int
    action: ControlAction
    fields: Annotated[dict[Word, Field], Meta(max_length=32)] = {}


class ControlReply(msgspec.Struct, tag="control_done", array_like=True, frozen=True):
    """What came of a command: `fields`, or an error, after which the engine is what it was before."""

    number: int
    fields: Annotated[dict[Word, Field], Meta(max_length=64)] = {}
    code: Word = ""
    what: Annotated[str, Meta(max_length=MAX_ERROR)] = ""
    hint: Annotated[str, Meta(max_length=MAX_ERROR)] = ""

    def result(self) -> dict[str, Any]:
        """Return the fields. Raises the error that the engine answered."""
        if self.code:
            raise QuireError(self.code, self.what, self.hint)
        return dict(self.fields)
