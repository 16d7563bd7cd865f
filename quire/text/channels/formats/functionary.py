"""Functionary 3.2: each part of an answer begins with its recipient, `>>>name` and a line break.

The recipient `all` is the user; any other is a tool, and its part is the arguments as JSON. The prompt ends with the
first `>>>`.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.text.channels.calls import read_arguments
from quire.text.channels.events import ToolSpec
from quire.text.channels.formats.seam import ToolFormat
from quire.text.channels.grammar_text import ANY_TEXT, GrammarText, either, joined, literal
from quire.text.channels.source import Reading, Source

OPEN = ">>>"
USER = "all"


class Functionary:
    """Implements `TaughtFormat`."""

    name = "functionary"
    markers: tuple[str, ...] = (OPEN,)
    trigger = ""
    repeats = False
    frames_text = True
    plain_key = ""
    style = None
    answer = None
    description = f"{OPEN}⟨name⟩\n⟨arguments⟩"

    def is_taught_by(self, template: str, found: ToolFormat | None) -> bool:
        return found is None and ">>>all\\n" in template.replace("${recipient}", USER)

    def read(self, source: Source, tools: Sequence[ToolSpec]) -> Reading[None]:
        recipients = {f"{name}\n": name for name in (USER, *(tool.name for tool in tools))}
        source.keep("", may_be_text=True)
        yield from source.match(OPEN)
        while True:
            recipient = recipients.get((yield from source.match(*recipients)), "")
            if recipient == USER:
                source.settle()
            elif recipient and (yield from read_arguments(source, recipient, is_named=True)):
                yield from source.spaces()
            else:
                source.give_back()
            space, begun = yield from source.plain(source.log.text, (OPEN,))
            if not begun:
                return
            source.keep(space + begun)

    def grammar(self, text: GrammarText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        one = text.rule(either(joined(literal(f"{tool.name}\n"), text.arguments(tool)) for tool in tools))
        return f'{one} ("{OPEN}" {one})*' if parallel else one

    def free(self, text: GrammarText, call: str, *, parallel: bool) -> str:
        said = joined(literal(f"{USER}\n"), text.until(OPEN))
        return f"{said} {call} | {call} | {literal(USER)} {text.rule(ANY_TEXT)}"

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        return OPEN.join(f"{name}\n{arguments}" for name, arguments in calls)
