"""DeepSeek: each call between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`, a turn's calls between a second pair.
V3 and R1 write `function<｜tool▁sep｜>name` and the arguments in a fenced block, V3.1 `name<｜tool▁sep｜>{…}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from quire.text.channels.calls import read_arguments
from quire.text.channels.events import ToolSpec
from quire.text.channels.grammar_text import GrammarText, either, literal
from quire.text.channels.source import Reading, Source

ALL_OPEN, ALL_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, SEPARATOR, CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "\n```"
_NAME = re.compile(r"[A-Za-z0-9_.:\-]")


class DeepSeek:
    """Reads both forms. `is_fenced` selects the form that grammars write, which is the one in the model's template."""

    markers: tuple[str, ...] = (ALL_OPEN, OPEN, SEPARATOR, CLOSE, ALL_CLOSE)
    trigger = ALL_OPEN
    plain_key = ""
    repeats = False  # one trigger precedes all calls of a turn

    def __init__(self, *, is_fenced: bool = False):
        self.name = "deepseek_fenced" if is_fenced else "deepseek"
        self._is_fenced = is_fenced

    def matches(self, template: str) -> bool:
        return OPEN in template and SEPARATOR in template and ("```json" in template) == self._is_fenced

    def read(self, source: Source, tools: Sequence[ToolSpec]) -> Reading[None]:
        while True:
            space, marker = yield from source.plain(source.log.text, (ALL_OPEN, OPEN))
            if not marker:
                return
            source.keep(space + marker)
            yield from source.spaces()
            if marker == ALL_OPEN and not (yield from source.match(OPEN)):
                source.give_back()
                continue
            while (yield from _call(source)):
                source.keep("")
                yield from source.spaces()
                closed = yield from source.match(CLOSE)
                yield from source.spaces()
                if (yield from source.match(ALL_CLOSE)) or closed:
                    source.settle()
                    yield from source.spaces()
                source.give_back_unless_blank()
                source.keep("")
                if not (yield from source.match(OPEN)):
                    source.settle()
                    break

    def grammar(self, text: GrammarText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        separator, begin, end = (text.marker(marker) for marker in (SEPARATOR, OPEN, CLOSE))
        calls = []
        for tool in tools:
            arguments = text.arguments(tool)
            if self._is_fenced:
                fence = literal(tool.name + "\n```json\n")
                calls.append(f'"function" {separator} {fence} {arguments} {literal(FENCE)}')
            else:
                calls.append(f"{literal(tool.name)} {separator} {arguments}")
        one = text.rule(f"{begin} {either(calls)} {end}")
        return f"{one}{'+' if parallel else ''} {text.marker(ALL_CLOSE)}"


def _call(source: Source) -> Reading[bool]:
    """Read a call after its opening marker, to the end of its arguments."""
    yield from source.spaces()
    name = yield from source.word(_NAME)
    if not (yield from source.match(SEPARATOR)):
        source.give_back()
        return False
    yield from source.spaces()
    is_fenced, is_named = not (yield from source.next_is("{")), name != "function"
    if is_fenced and not source.broke_off:
        name = yield from source.word(_NAME)
        is_named = bool((yield from source.spaces()))
        if (yield from source.match("```")):
            yield from source.match("json")
        yield from source.spaces()
    if not (yield from read_arguments(source, name, is_named=is_named)):
        return False
    if is_fenced:
        source.keep("")
        yield from source.spaces()
        if (yield from source.match("```")):
            source.settle()
        source.give_back_unless_blank()
    return True
