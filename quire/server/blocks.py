"""Channel events as blocks that open, grow and close, one at a time: the form Anthropic's and the Responses API stream.

Text, reasoning and each tool call is a block; a block closes when another kind of event comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from quire.text.channels.events import Event, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart

Kind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Block:
    index: int
    kind: Kind
    name: str = ""  # of a call
    text: str = ""  # all of it so far; a call's arguments
    is_whole: bool = True  # false: a call whose arguments break off


@dataclass(frozen=True, slots=True)
class Opened:
    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    block: Block


Change = Opened | Grown | Closed


class Blocks:
    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def feed(self, events: Iterable[Event]) -> list[Change]:
        changes: list[Change] = []
        for event in events:
            if isinstance(event, TextDelta):
                self._grow("text", event.text, changes)
            elif isinstance(event, ReasoningDelta):
                self._grow("reasoning", event.text, changes)
            elif isinstance(event, ToolCallStart):
                self._begin("call", changes, event.name)
            elif isinstance(event, ToolCallDelta):
                self._grow("call", event.arguments, changes)
            elif isinstance(event, ToolCallEnd):
                if self._open is not None:
                    self._open.is_whole = event.is_whole
                self._end(changes)
        return changes

    def finish(self) -> list[Change]:
        changes: list[Change] = []
        self._end(changes)
        return changes

    def _grow(self, kind: Kind, text: str, changes: list[Change]) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(kind, changes)
        assert self._open is not None
        self._open.text += text
        changes.append(Grown(self._open, text))

    def _begin(self, kind: Kind, changes: list[Change], name: str = "") -> None:
        self._end(changes)
        self._open = Block(len(self.all), kind, name)
        self.all.append(self._open)
        changes.append(Opened(self._open))

    def _end(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(Closed(self._open))
            self._open = None
