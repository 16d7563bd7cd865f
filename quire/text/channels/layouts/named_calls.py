"""Calls as a name followed by its arguments as JSON: `name⟨marker⟩{…}`, between markers of the model.

Kimi K2, DeepSeek, the newer Mistral models, functionary and Solar write them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from quire.text.channels.calls import read_arguments, read_call, read_calls
from quire.text.channels.events import ToolSpec
from quire.text.channels.grammar_text import GrammarText, calls_in_text, either, joined
from quire.text.channels.layouts.frame import CallFrame
from quire.text.channels.layouts.pieces import ID, INDEX, NAME, expect, expect_after, head, shown
from quire.text.channels.source import Reading, Source


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """A layout whose calls are a name, a marker and a JSON object."""

    name: str
    frame: CallFrame
    before_arguments: str = ""  # between name and arguments
    call_id: str = ""  # between name and `before_arguments`; may be missing when read
    writes_id: bool = False  # grammars and `write` have it

    frames_text: ClassVar[bool] = False
    plain_key: ClassVar[str] = ""

    @property
    def markers(self) -> tuple[str, ...]:
        frame = self.frame
        return (frame.section_open, frame.open, self.call_id, self.before_arguments, frame.close, frame.section_close)

    @property
    def trigger(self) -> str:
        return self.frame.trigger

    @property
    def repeats(self) -> bool:
        return not self.frame.section_open and not self.frame.is_single

    @property
    def description(self) -> str:
        frame = self.frame
        call = f"{frame.opening}⟨name⟩{self._mid}⟨arguments⟩{frame.close}{frame.section_close}"
        return shown(call)

    def read(self, source: Source, tools: Sequence[ToolSpec]) -> Reading[None]:
        while True:
            space, marker = yield from source.plain(source.log.text, self.frame.triggers)
            if not marker:
                return
            source.keep(space + marker)
            if not (yield from self.frame.read_opening(source, marker)):
                source.give_back()
                continue
            if (yield from self._read_call(source)):
                yield from self.frame.read_close(source)
                yield from source.spaces()

    def _read_call(self, source: Source) -> Reading[bool]:
        """Read a call from its name. If it is none, it is given back as text."""
        yield from source.spaces()
        if (yield from source.next_is("[{")):  # some models write JSON with the name inside after the same marker
            return (yield from _read_json(source))
        name = yield from source.word(self._name_pattern)
        is_named = False
        if name and self.call_id and (yield from source.match(head(self.call_id))):
            yield from expect_after(source, head(self.call_id), self.call_id)
        if name and self.before_arguments.strip():
            is_named = yield from expect(source, self.before_arguments)
            if not is_named and not source.broke_off and not (yield from source.next_is("{")):
                source.give_back()
                return False
        yield from source.spaces()
        if not is_named or (yield from source.next_is("{")) or source.broke_off:
            return (yield from read_arguments(source, name, is_named=is_named))
        return (yield from self._read_fenced(source))

    def _read_fenced(self, source: Source) -> Reading[bool]:
        """Read a name and its arguments in a fenced block, which some models write after a word such as `function`."""
        name = yield from source.word(self._name_pattern)
        yield from source.spaces()
        if (yield from source.match("```")):
            yield from source.match("json")
        yield from source.spaces()
        if not (yield from read_arguments(source, name, is_named=bool(name))):
            return False
        source.keep("")
        yield from source.spaces()
        if (yield from source.match("```")):
            source.settle()
        source.give_back_unless_blank()
        return True

    @property
    def _mid(self) -> str:
        return (self.call_id if self.writes_id else "") + self.before_arguments

    @property
    def _name_pattern(self) -> re.Pattern[str]:
        ends = re.escape(self.call_id.strip()[:1] + self.before_arguments.strip()[:1] + "<")
        return re.compile(rf"(?![{ends}])[\w.:/\-]")

    def grammar(self, text: GrammarText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        frame = self.frame

        def one(begin: str) -> str:
            return either(
                joined(
                    text.spelled(begin.replace(NAME, tool.name) + tool.name + self._mid),
                    text.arguments(tool),
                )
                for tool in tools
            )

        opened = frame.opening.partition(self.trigger)[2]
        if self.repeats:
            return joined(one(opened), text.spelled(frame.close))
        first = text.rule(one(opened))
        again = text.rule(one(frame.close + frame.between + frame.open))
        calls = f"{first} {again}*" if parallel and not frame.is_single else first
        return joined(calls, text.spelled(frame.close + frame.section_close))

    def free(self, text: GrammarText, call: str, *, parallel: bool) -> str:
        return calls_in_text(text, self.trigger, call, repeats=parallel and self.repeats)

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        frame, parts = self.frame, []
        for index, (name, arguments) in enumerate(calls):
            begin = frame.opening if index == 0 else frame.close + frame.between + frame.open
            filled = (begin + name + self._mid).replace(NAME, name)
            parts.append(filled.replace(INDEX, str(index)).replace(ID, f"call{index:05d}") + arguments)
        return "".join(parts) + frame.close + frame.section_close


def _read_json(source: Source) -> Reading[bool]:
    if (yield from source.next_is("[")):
        return (yield from read_calls(source))
    return (yield from read_call(source))
