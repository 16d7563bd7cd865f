"""Channels: splits a model's streamed text into text, reasoning and tool calls, the same for every API.

`make_channel_parser` makes the state machine of one sample. `probe` reads a model's formats off its chat template, as
`layouts`; `formats` holds those with names. `tool_grammar` turns `tool_choice` into a grammar that the engine enforces.
"""

from quire.text.channels.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolSpec,
    merge,
)
from quire.text.channels.formats import FORMATS
from quire.text.channels.formats.seam import ToolFormat
from quire.text.channels.parser import ChannelParser, format_named, make_channel_parser
from quire.text.channels.reasoning import (
    AnswerMarkers,
    ReasoningStyle,
    choose_reasoning,
    closes_reasoning,
    opens_reasoning,
)
from quire.text.channels.tool_grammar import answer_grammar, tool_grammar

__all__ = [
    "FORMATS",
    "AnswerMarkers",
    "ChannelParser",
    "Event",
    "ReasoningDelta",
    "ReasoningStyle",
    "TextDelta",
    "ToolCallDelta",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolFormat",
    "ToolSpec",
    "answer_grammar",
    "choose_reasoning",
    "closes_reasoning",
    "format_named",
    "make_channel_parser",
    "merge",
    "opens_reasoning",
    "tool_grammar",
]
