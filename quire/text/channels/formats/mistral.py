"""Mistral: `[TOOL_CALLS]` before a JSON list of calls (the old form), or before each call as `name[ARGS]{…}` with an
optional `[CALL_ID]…` between them (the new form)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.text.channels.calls import read_arguments, read_calls
from quire.text.channels.events import ToolSpec
from quire.text.channels.grammar_text import GrammarText, either, literal
from quire.text.channels.source import Reading, Source

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[A-Za-z0-9_.:\-]")


class Mistral:
    """Reads both forms. `is_list` selects the form that grammars write, which is the one in the model's template."""

    markers: tuple[str, ...] = (OPEN, ARGS, CALL_ID)
    trigger = OPEN
    plain_key = ""

    def __init__(self, *, is_list: bool = False):
        self.name = "mistral_list" if is_list else "mistral"
        self.repeats = not is_list
        self._is_list = is_list

    def matches(self, template: str) -> bool:
        return OPEN in template and (ARGS not in template) == self._is_list

    def read(self, source: Source, tools: Sequence[ToolSpec]) -> Reading[None]:
        while True:
            space, marker = yield from source.plain(source.log.text, (OPEN,))
            if not marker:
                return
            source.keep(space + marker)
            yield from source.spaces()
            if (yield from source.next_is("[")):
                is_call = yield from read_calls(source)
            else:
                is_call = yield from _named_call(source)
            if is_call:
                yield from source.spaces()

    def grammar(self, text: GrammarText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        if self._is_list:
            call = text.rule(either(text.json_call(tool, "arguments") for tool in tools))
            more = f'(", " {call})*' if parallel else ""
            return f'"[" {call} {more} "]"'
        args = text.marker(ARGS)
        return either(f"{literal(tool.name)} {args} {text.arguments(tool)}" for tool in tools)


def _named_call(source: Source) -> Reading[bool]:
    name = yield from source.word(_NAME)
    if (yield from source.match(CALL_ID)):
        yield from source.word(_NAME)
    is_named = bool((yield from source.match(ARGS)))
    yield from source.spaces()
    return (yield from read_arguments(source, name, is_named=is_named))
