"""The protocol that every tool-call format implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.text.channels.events import ToolSpec
from quire.text.channels.grammar_text import GrammarText
from quire.text.channels.source import Reading, Source


class ToolFormat(Protocol):
    """How a family of models writes tool calls: parses them, and describes them as a grammar."""

    name: str
    markers: tuple[str, ...]  # text markers; where they are special tokens, the detokenizer must show them
    trigger: str  # text that precedes every call; empty where a call is plain JSON
    repeats: bool  # each further call has its own trigger
    plain_key: str  # key of the arguments in formats without a trigger; empty in all others

    def matches(self, template: str) -> bool:
        """Whether a chat template with this source teaches the format."""
        ...

    def read(self, source: Source, tools: Sequence[ToolSpec]) -> Reading[None]:
        """Split everything after the reasoning into text and calls."""
        ...

    def grammar(self, text: GrammarText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """The grammar after the trigger: one call of one of `tools`, or several calls if `repeats` is false."""
        ...
