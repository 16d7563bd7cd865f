"""Bare JSON: the whole answer is `{"name": …, "arguments": {…}}`, or a list of such, with no marker around it.

Only a name among the request's tools makes it a call; any other JSON is an answer. For models whose template names no
format we know.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.text.channels.calls import read_call, read_calls, read_separator
from quire.text.channels.events import ToolSpec
from quire.text.channels.grammar_text import GrammarText, either
from quire.text.channels.source import Reading, Source


class BareJson:
    name = "json"
    markers: tuple[str, ...] = ()
    trigger = ""
    plain_key = "arguments"
    repeats = False

    def matches(self, template: str) -> bool:
        return False  # nothing in a template says so; it is asked for, or what remains

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
