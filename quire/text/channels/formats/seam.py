"""The seam every tool-call format stands at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.text.channels.events import ToolSpec
from quire.text.channels.grammar_text import GrammarText
from quire.text.channels.source import Reading, Source


class ToolFormat(Protocol):
    name: str
    markers: tuple[str, ...]  # may be special tokens of the model; then they must be shown in the text to be parsed
    trigger: str  # stands before every call; empty where a call is plain JSON
    repeats: bool  # the trigger may come again for a further call
    plain_key: str  # where a call is plain JSON without a trigger: the key of its arguments; elsewhere empty

    def matches(self, template: str) -> bool:
        """Does a chat template with this source teach its model this format?"""
        ...

    def read(self, source: Source, tools: Sequence[ToolSpec]) -> Reading[None]:
        """Turn all text that is not reasoning into text and calls, to its end."""
        ...

    def grammar(self, text: GrammarText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        """What follows the trigger: a call of one of these tools, or, where it does not repeat, several."""
        ...
