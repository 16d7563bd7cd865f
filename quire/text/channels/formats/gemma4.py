"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`, with bare keys and marked strings."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from quire.text.channels.events import ToolSpec
from quire.text.channels.formats.notation import Notation
from quire.text.channels.formats.seam import ToolFormat
from quire.text.channels.grammar_text import GrammarText, calls_in_text, either, joined
from quire.text.channels.source import MAX_HELD, MAX_NAME, Reading, Source

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MAX_NESTING = 64
_NAME = re.compile(r"[\w.\-]")
_KEY = re.compile(r"[^:{}\[\],<>\s]")
_SCALAR = re.compile(r"[^,{}\[\]<>]")
_NOTATION = Notation(quote=QUOTE, quotes_keys=False, colon=":", comma=",")


class Gemma4:
    """Implements `TaughtFormat`."""

    name = "gemma4"
    markers: tuple[str, ...] = (OPEN, CLOSE, QUOTE)
    trigger = OPEN
    repeats = True
    frames_text = False
    plain_key = ""
    style = None
    answer = None
    description = f"{OPEN}call:⟨name⟩{{⟨key⟩:{QUOTE}⟨text⟩{QUOTE},…}}{CLOSE}"

    def is_taught_by(self, template: str, found: ToolFormat | None) -> bool:
        return OPEN in template and QUOTE in template

    def read(self, source: Source, tools: Sequence[ToolSpec]) -> Reading[None]:
        while True:
            space, marker = yield from source.plain(source.log.text, (OPEN,))
            if not marker:
                return
            source.keep(space + marker)
            yield from source.spaces()
            yield from source.match("call:")
            name = yield from source.word(_NAME)
            if not name or not (yield from source.next_is("{")):
                source.give_back()
                continue
            source.settle()
            source.log.start_call(name)
            is_whole = yield from _value(source, 0)
            source.log.end_call(is_whole)
            yield from source.spaces()
            yield from source.match(CLOSE)
            yield from source.spaces()

    def grammar(self, text: GrammarText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        calls = (
            joined(
                text.spelled(f"call:{tool.name}"),
                _NOTATION.members(text, tool, before="{", colon=":", after="}"),
                text.spelled(CLOSE),
            )
            for tool in tools
        )
        return either(calls)

    def free(self, text: GrammarText, call: str, *, parallel: bool) -> str:
        return calls_in_text(text, self.trigger, call, repeats=parallel)

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        return "".join(f"{OPEN}call:{name}{_NOTATION.write(json.loads(arguments))}{CLOSE}" for name, arguments in calls)


def _value(source: Source, depth: int) -> Reading[bool]:
    """Read a value and log it as JSON. Returns False where it breaks off."""
    log = source.log
    yield from source.spaces()
    if (yield from source.next_is("{")):
        return (yield from _members(source, "{", "}", depth))
    if (yield from source.next_is("[")):
        return (yield from _members(source, "[", "]", depth))
    if (yield from source.match(QUOTE)):
        log.arguments('"')
        space, marker = yield from source.plain(lambda text: log.arguments(_escaped(text)), (QUOTE,))
        if not marker:
            return False
        log.arguments(_escaped(space) + '"')
        return True
    text = yield from source.word(_SCALAR, MAX_HELD)
    if not (yield from source.more()):
        log.arguments(text.strip())
        return False
    try:
        json.loads(text)
        log.arguments(text.strip())
    except (ValueError, RecursionError):
        log.arguments(json.dumps(text.strip(), ensure_ascii=False))
    return True


def _members(source: Source, opening: str, closing: str, depth: int) -> Reading[bool]:
    """Read an object or a list."""
    if depth > MAX_NESTING:
        return False
    log, count = source.log, 0
    log.arguments(source.take_char())
    while True:
        yield from source.spaces()
        if (yield from source.match(closing)):
            log.arguments(closing)
            return True
        if count and not (yield from source.match(",")):
            return False
        yield from source.spaces()
        if not (yield from source.more()):
            return False
        log.arguments(", " if count else "")
        if opening == "{":
            is_quoted = bool((yield from source.match(QUOTE)))
            key = yield from source.word(_KEY, MAX_NAME)
            if is_quoted:
                yield from source.match(QUOTE)
            yield from source.spaces()
            if not key or not (yield from source.match(":")):
                return False
            log.arguments(json.dumps(key, ensure_ascii=False) + ": ")
        if not (yield from _value(source, depth + 1)):
            return False
        count += 1


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
