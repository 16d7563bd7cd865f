"""Formats of tool calls that are data: a layout says which texts stand before, between and after the parts of a call.

`probe` reads layouts off a chat template; the presets of `formats` are layouts too. Each layout is a `ToolFormat`: it
parses calls, writes them, and gives the grammar that enforces them.
"""

from quire.text.channels.layouts.frame import CallFrame
from quire.text.channels.layouts.json_calls import JsonCalls
from quire.text.channels.layouts.named_calls import NamedCalls
from quire.text.channels.layouts.tagged_calls import TaggedCalls

Layout = JsonCalls | NamedCalls | TaggedCalls

__all__ = ["CallFrame", "JsonCalls", "Layout", "NamedCalls", "TaggedCalls"]
