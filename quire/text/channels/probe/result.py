"""What was read off a chat template: the formats in which the model writes, and how a conversation comes back to it."""

from __future__ import annotations

from dataclasses import dataclass

from quire.text.channels.formats.seam import ToolFormat
from quire.text.channels.probe.replay import Replay
from quire.text.channels.reasoning import AnswerMarkers, ReasoningStyle


@dataclass(frozen=True, slots=True)
class TemplateFormats:
    """The formats of one model. Parser, grammar and replay all follow them."""

    tools: ToolFormat | None  # None: calls stay text
    reasoning: ReasoningStyle | None
    answer: AnswerMarkers
    replay: Replay
    reads_all: bool = False  # the format of calls also frames the text, so it reads answers without tools too
    is_generic: bool = False  # the template has no place for tools, so that they are described in a message
    notes: tuple[str, ...] = ()  # what was found and how, for a person
