"""Bare JSON: the whole answer is `{"name": …, "arguments": {…}}`, or a list of such objects, without a marker.

Only the name of one of the request's tools makes an object a call; other JSON is an answer. It is the fallback for
models whose template teaches no known format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from quire.text.channels.calls import read_call, read_calls, read_separator
from quire.text.channels.events import ToolSpec
from quire.text.channels.grammar_text import GrammarText, either, json_or_text
from quire.text.channels.source import Reading, Source


class BareJson:
    """Implements `ToolFormat`."""

    name = "json"
    markers: tuple[str, ...] = ()
    trigger = ""
    plain_key = "arguments"
    repeats = False
    frames_text = False
    description = '{"name": "⟨name⟩", "arguments": ⟨arguments⟩}'

    def read(self, source: Source, tools: Sequence[ToolSpec]) -> Reading[None]:
        names = frozenset(tool.name for tool in tools) or None
        source.keep("", may_be_text=True)
        yield from source.spaces()
        if (yield from source.next_is("[")):
            any_call = yield from read_calls(source, names=names, is_marked=False)
        else:
            any_call = False
            while (yield from source.next_is("{")) and (yield from read_call(source, names=names, is_marked=False)):
                any_call = True
                yield from read_separator(source)
        if any_call:
            source.give_back_unless_blank()
        source.give_back()
        yield from source.rest(source.log.text)

    def grammar(self, text: GrammarText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        call = text.rule(either(text.json_call(tool, "arguments") for tool in tools))
        return f'({call} | "[" {call} (", " {call})* "]")' if parallel else call

    def free(self, text: GrammarText, call: str, *, parallel: bool) -> str:
        return json_or_text(text, call)

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        objects = [f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in calls]
        return objects[0] if len(objects) == 1 else f"[{', '.join(objects)}]"
