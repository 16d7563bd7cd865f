"""Calls as JSON objects, one by one or in a list: `{"name": …, "arguments": {…}}` with any keys, or `{"name": {…}}`.

Hermes, Qwen 2.5 and 3, Granite, Command R, Nemotron, Apriel, MiniMax M1 and many others write them, between markers of
their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from quire.text.channels.calls import ARGUMENT_KEYS, read_call, read_calls, read_separator
from quire.text.channels.events import ToolSpec
from quire.text.channels.grammar_text import GrammarText, calls_in_text, either, joined, json_or_text
from quire.text.channels.layouts.frame import CallFrame
from quire.text.channels.layouts.pieces import ID, INDEX, shown
from quire.text.channels.source import MAX_NAME, JsonSpan, Reading, Source

_LIST = re.compile(r"\[\s*$")


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """A layout whose calls are JSON objects. `frame.open` and `frame.close` surround each object or, if `is_list`, the
    section's markers surround a list of them."""

    name: str
    frame: CallFrame
    name_key: str = "name"  # empty: the name is the object's only key
    arguments_key: str = "arguments"
    before_name: str = '{"name": "'  # the object's text as the template writes it; may hold slots
    before_arguments: str = '", "arguments": '
    after_arguments: str = "}"
    is_list: bool = False
    frames_text: ClassVar[bool] = False

    @property
    def markers(self) -> tuple[str, ...]:
        frame = self.frame
        return (frame.section_open, frame.open, frame.close, frame.section_close)

    @property
    def trigger(self) -> str:
        return self._bare_frame.trigger

    @property
    def plain_key(self) -> str:
        return "" if self.trigger else self.arguments_key

    @property
    def repeats(self) -> bool:
        frame = self.frame
        return not frame.section_open and bool(self.trigger) and not self.is_list and not frame.is_single

    @property
    def description(self) -> str:
        call = f"{self.before_name}⟨name⟩{self.before_arguments}⟨arguments⟩{self.after_arguments}"
        return shown(f"{self.frame.opening}{call}{self.frame.close}{self.frame.section_close}")

    def read(self, source: Source, tools: Sequence[ToolSpec]) -> Reading[None]:
        if not self.trigger:
            yield from self._read_bare(source, frozenset(tool.name for tool in tools) or None)
            return
        frame = self._bare_frame
        while True:
            space, marker = yield from source.plain(source.log.text, frame.triggers)
            if not marker:
                return
            source.keep(space + marker)
            if not (yield from frame.read_opening(source, marker)) or not (yield from _at_json(source)):
                source.give_back()
                continue
            if (yield from self._read_objects(source)):
                yield from self.frame.read_close(source)
                yield from source.spaces()

    @property
    def _bare_frame(self) -> CallFrame:
        """The frame without the bracket of a list, which the reader of the list takes."""
        frame = self.frame
        return replace(frame, section_open=_LIST.sub("", frame.section_open), open=_LIST.sub("", frame.open))

    def _read_objects(self, source: Source) -> Reading[bool]:
        """Read a list of calls, or calls one after another. Returns False if the first is none; it is then text."""
        if not self.name_key:
            return (yield from _read_keyed(source))
        keys = (self.arguments_key, *ARGUMENT_KEYS)
        if (yield from source.next_is("[")):
            return (yield from read_calls(source, name_key=self.name_key, argument_keys=keys))
        one = partial(read_call, name_key=self.name_key, argument_keys=keys)
        if not (yield from one(source)):
            return False
        while (yield from read_separator(source)):
            if not (yield from one(source)):
                return True
        source.give_back_unless_blank()
        return True

    def _read_bare(self, source: Source, names: frozenset[str] | None) -> Reading[None]:
        """Read an answer that is calls as a whole; only the name of a tool makes an object a call."""
        options: dict[str, Any] = {"names": names, "is_marked": False, "name_key": self.name_key}
        source.keep("", may_be_text=True)
        yield from source.spaces()
        if (yield from source.next_is("[")):
            any_call = yield from read_calls(source, **options)
        else:
            any_call = False
            while (yield from source.next_is("{")) and (yield from read_call(source, **options)):
                any_call = True
                yield from read_separator(source)
        if any_call:
            source.give_back_unless_blank()
        source.give_back()
        yield from source.rest(source.log.text)

    def grammar(self, text: GrammarText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        frame, spelled = self.frame, text.spelled
        one = text.rule(either(self._object(text, tool) for tool in tools))
        if self.repeats:  # each call has its own trigger
            return joined(spelled(frame.open.partition(self.trigger)[2]), one, spelled(frame.close))
        again = joined(spelled(frame.close + frame.between + frame.open), one)
        begin = frame.opening.partition(self.trigger)[2] if self.trigger else frame.opening
        many = f"{one} ({again})*" if parallel and not frame.is_single else one
        return joined(spelled(begin), many, spelled(frame.close + frame.section_close))

    def free(self, text: GrammarText, call: str, *, parallel: bool) -> str:
        if not self.trigger:
            return json_or_text(text, call)
        return calls_in_text(text, self.trigger, call, repeats=parallel and self.repeats)

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """The text of these calls, pairs of name and arguments as JSON."""
        frame = self.frame
        objects = [
            _with_index(self.before_name, index)
            + json.dumps(name)[1:-1]
            + self.before_arguments
            + arguments
            + self.after_arguments
            for index, (name, arguments) in enumerate(calls)
        ]
        joined = (frame.close + frame.between + frame.open).join(objects)
        return f"{frame.opening}{joined}{frame.close}{frame.section_close}"

    def _object(self, text: GrammarText, tool: ToolSpec) -> str:
        begin = text.spelled(self.before_name + json.dumps(tool.name)[1:-1] + self.before_arguments)
        return joined(begin, text.arguments(tool), text.spelled(self.after_arguments))


def _with_index(text: str, index: int) -> str:
    return text.replace(INDEX, str(index)).replace(ID, f"call{index:05d}")


def _at_json(source: Source) -> Reading[bool]:
    yield from source.spaces()
    return (yield from source.next_is("[{"))


def _read_keyed(source: Source) -> Reading[bool]:
    """Read `[{"name": {…}}, …]`, objects whose only key is the name of the tool."""
    yield from source.match("[")
    any_call = False
    while True:
        yield from source.spaces()
        if not (yield from source.match("{")):
            break
        yield from source.spaces()
        name = (yield from source.string(MAX_NAME)) if (yield from source.next_is('"')) else None
        yield from source.spaces()
        if not name or not (yield from source.match(":")):
            source.give_back()
            return any_call
        yield from source.spaces()
        if not (yield from source.next_is("{")) and not source.broke_off:
            source.give_back()
            return any_call
        source.settle()
        source.log.start_call(name)
        is_whole = yield from source.span(JsonSpan(), source.log.arguments)
        source.log.end_call(is_whole)
        any_call = True
        source.keep("")
        yield from source.spaces()
        yield from source.match("}")
        yield from source.spaces()
        if not (yield from source.match(",")):
            break
    if any_call:
        yield from source.match("]")
        source.settle()
    else:
        source.give_back()
    return any_call
