"""Groups channel events into content blocks that open, grow and close, as Anthropic's and the Responses API stream
them.

Text, reasoning and each tool call is one block. A block closes at the first event of another kind, so one is open at a
time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from quire.text.channels.events import Event, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart

Kind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class ContentBlock:
    """One block of a reply: text, reasoning or a tool call."""

    index: int
    kind: Kind
    name: str = ""  # the function's name if the block is a call
    text: str = ""  # the text so far; for a call, its arguments
    is_whole: bool = True  # false: a call with incomplete arguments


@dataclass(frozen=True, slots=True)
class BlockOpened:
    """A block has begun."""

    block: ContentBlock


@dataclass(frozen=True, slots=True)
class BlockGrown:
    """A block has more text."""

    block: ContentBlock
    text: str


@dataclass(frozen=True, slots=True)
class BlockClosed:
    """A block is complete, or ended by the end of the output."""

    block: ContentBlock


BlockChange = BlockOpened | BlockGrown | BlockClosed


class ContentBlocks:
    """The blocks of one reply, in order."""

    def __init__(self) -> None:
        self.all: list[ContentBlock] = []
        self._open: ContentBlock | None = None

    def feed(self, events: Iterable[Event]) -> list[BlockChange]:
        changes: list[BlockChange] = []
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

    def finish(self) -> list[BlockChange]:
        changes: list[BlockChange] = []
        self._end(changes)
        return changes

    def _grow(self, kind: Kind, text: str, changes: list[BlockChange]) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(kind, changes)
        assert self._open is not None
        self._open.text += text
        changes.append(BlockGrown(self._open, text))

    def _begin(self, kind: Kind, changes: list[BlockChange], name: str = "") -> None:
        self._end(changes)
        self._open = ContentBlock(len(self.all), kind, name)
        self.all.append(self._open)
        changes.append(BlockOpened(self._open))

    def _end(self, changes: list[BlockChange]) -> None:
        if self._open is not None:
            changes.append(BlockClosed(self._open))
            self._open = None
