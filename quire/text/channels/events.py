"""Events of a channel parser: text, reasoning and tool calls, in the order in which the model wrote them.

Front ends consume only these events. `merge` joins neighbouring deltas for callers that do not stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False  # a grammar enforces the schema of the arguments


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call's arguments."""

    index: int
    arguments: str  # raw JSON text; all deltas joined are the call's arguments


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A tool call ends."""

    index: int
    is_whole: bool = True  # false: the arguments are incomplete


Event = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallEnd


class EventLog:
    """Collects the events of the current chunk. Neighbouring deltas of one kind are joined, so events stay few."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self.num_calls = 0

    def text(self, text: str) -> None:
        if text:
            self._add(TextDelta(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._add(ReasoningDelta(text))

    def start_call(self, name: str) -> None:
        self._add(ToolCallStart(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Append to the arguments of the call that started last."""
        if text:
            self._add(ToolCallDelta(self.num_calls - 1, text))

    def end_call(self, is_whole: bool = True) -> None:
        self._add(ToolCallEnd(self.num_calls - 1, is_whole))

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _add(self, event: Event) -> None:
        joined = _joined(self._events[-1], event) if self._events else None
        if joined is None:
            self._events.append(event)
        else:
            self._events[-1] = joined


def merge(events: Iterable[Event]) -> list[Event]:
    """The events with neighbouring deltas of one kind joined, independent of how the text was chunked."""
    log = EventLog()
    for event in events:
        log._add(event)
    return log.take()


def _joined(left: Event, right: Event) -> Event | None:
    if isinstance(left, TextDelta) and isinstance(right, TextDelta):
        return TextDelta(left.text + right.text)
    if isinstance(left, ReasoningDelta) and isinstance(right, ReasoningDelta):
        return ReasoningDelta(left.text + right.text)
    if isinstance(left, ToolCallDelta) and isinstance(right, ToolCallDelta) and left.index == right.index:
        return ToolCallDelta(left.index, left.arguments + right.arguments)
    return None
