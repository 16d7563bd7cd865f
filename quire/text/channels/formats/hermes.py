"""Hermes JSON: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one block per call. Qwen 2.5, Qwen 3,
Granite 4 and many others use it; several calls in one block are read too."""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.text.channels.calls import read_call, read_calls, read_separator
from quire.text.channels.events import ToolSpec
from quire.text.channels.grammar_text import GrammarText, either
from quire.text.channels.source import Reading, Source

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SHAPE = re.compile(r'\\?"name\\?":.{0,80}?\\?"arguments\\?":', re.DOTALL)  # \\?: templates may escape it
_OTHERS = ("<function=", "<arg_key>", "<invoke", "<tool_calls>")  # formats with the same marker and another body


class Hermes:
    """Implements `ToolFormat`."""

    name = "hermes"
    markers: tuple[str, ...] = (OPEN, CLOSE)
    trigger = OPEN
    plain_key = ""
    repeats = True

    def matches(self, template: str) -> bool:
        has_shape = OPEN in template and _SHAPE.search(template) is not None
        return has_shape and not any(other in template for other in _OTHERS)

    def read(self, source: Source, tools: Sequence[ToolSpec]) -> Reading[None]:
        while True:
            space, marker = yield from source.plain(source.log.text, (OPEN,))
            if not marker:
                return
            source.keep(space + marker)
            yield from source.spaces()
            if (yield from source.next_is("[")):
                is_call = yield from read_calls(source)
            elif (yield from source.next_is("{")):
                is_call = yield from _objects(source)
            else:
                source.give_back()
                continue
            if is_call:
                yield from source.spaces()
                yield from source.match(CLOSE)
                yield from source.spaces()

    def grammar(self, text: GrammarText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        call = either(text.json_call(tool, "arguments") for tool in tools)
        return f'"\\n" {call} "\\n" {text.marker(CLOSE)}'


def _objects(source: Source) -> Reading[bool]:
    """Read all calls of one block. Returns False if the first object is no call."""
    if not (yield from read_call(source)):
        return False
    while (yield from read_separator(source)):
        if not (yield from read_call(source)):
            return True
    source.give_back_unless_blank()
    return True
