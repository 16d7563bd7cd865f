"""Channels: splits a model's streamed text into text, reasoning and tool calls, the same for every API.

`make_channel_parser` makes the state machine of one sample. `choose_format` and `choose_reasoning` read a model's
formats from its chat template. `tool_grammar` turns `tool_choice` into a grammar that the engine enforces.
"""

from quire.text.channels.choose import choose_format
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
from quire.text.channels.parser import ChannelParser, make_channel_parser
from quire.text.channels.reasoning import ReasoningStyle, choose_reasoning, closes_reasoning, opens_reasoning
from quire.text.channels.tool_grammar import tool_grammar

__all__ = [
    "FORMATS",
    "ChannelParser",
    "Event",
    "ReasoningDelta",
    "ReasoningStyle",
    "TextDelta",
    "ToolCallDelta",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolSpec",
    "choose_format",
    "choose_reasoning",
    "closes_reasoning",
    "make_channel_parser",
    "merge",
    "opens_reasoning",
    "tool_grammar",
]
