"""The protocol that every tool-call format implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.text.channels.events import ToolSpec
from quire.text.channels.grammar_text import GrammarText
from quire.text.channels.reasoning import AnswerMarkers, ReasoningStyle
from quire.text.channels.source import Reading, Source


class ToolFormat(Protocol):
    """How a family of models writes tool calls: parses them, writes them, and describes them as a grammar."""

    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Marker texts; where they hold special tokens, the detokenizer must show these."""
        ...

    @property
    def trigger(self) -> str:
        """The text that precedes every call; empty where a call is plain JSON."""
        ...

    @property
    def repeats(self) -> bool:
        """Whether each further call has its own trigger."""
        ...

    @property
    def plain_key(self) -> str:
        """The key of the arguments in formats without a trigger; empty in all others."""
        ...

    @property
    def frames_text(self) -> bool:
        """Whether text has markers of the format too, so that it must be read even without tools."""
        ...

    @property
    def description(self) -> str:
        """One call as the model writes it, for a person."""
        ...

    def read(self, source: Source, tools: Sequence[ToolSpec]) -> Reading[None]:
        """Split everything after the reasoning into text and calls."""
        ...

    def grammar(self, text: GrammarText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """The grammar after the trigger: one call of one of `tools`, or several calls if `repeats` is false."""
        ...

    def free(self, text: GrammarText, call: str, *, parallel: bool) -> str:
        """The grammar of free text with calls. `call` is the rule of what `grammar` returned."""
        ...

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """The text of calls, pairs of name and arguments as JSON, as the model writes them in one turn."""
        ...


class TaughtFormat(ToolFormat, Protocol):
    """A hand-written format that says itself whether a template teaches it."""

    @property
    def style(self) -> ReasoningStyle | None:
        """The format's own markers of reasoning; None: those read off the template."""
        ...

    @property
    def answer(self) -> AnswerMarkers | None: ...

    def is_taught_by(self, template: str, found: ToolFormat | None) -> bool:
        """Whether a template with this source teaches the format. `found` is the layout read off it, if any."""
        ...
