"""Pythonic calls, the format of LFM2: `<|tool_call_start|>[name(key='value', other=1), …]<|tool_call_end|>`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from quire.text.channels.events import ToolSpec
from quire.text.channels.formats.notation import Notation
from quire.text.channels.formats.seam import ToolFormat
from quire.text.channels.grammar_text import GrammarText, calls_in_text, either, joined, literal
from quire.text.channels.source import MAX_HELD, MAX_NAME, Reading, Source

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_NAME = re.compile(r"[\w.\-]")
_PLAIN = re.compile(r"[^'\"()\[\]{},]")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_WORDS = {"true": "True", "false": "False", "null": "None"}
_NOTATION = Notation(true="True", false="False", null="None", colon=": ", comma=", ")


class Pythonic:
    """Implements `TaughtFormat`."""

    name = "pythonic"
    markers: tuple[str, ...] = (OPEN, CLOSE)
    trigger = OPEN
    repeats = False
    frames_text = False
    plain_key = ""
    style = None
    answer = None
    description = f"{OPEN}[⟨name⟩(⟨key⟩=⟨value⟩, …), …]{CLOSE}"

    def is_taught_by(self, template: str, found: ToolFormat | None) -> bool:
        return found is None and any(mark in template for mark in (OPEN, "<|tool_list_start|>", '"List of tools: ['))

    def read(self, source: Source, tools: Sequence[ToolSpec]) -> Reading[None]:
        while True:
            space, marker = yield from source.plain(source.log.text, (OPEN,))
            if not marker:
                return
            source.keep(space + marker)
            yield from source.spaces()
            yield from source.match("[")
            any_call = False
            while (yield from _call(source)):
                any_call = True
                source.keep("")
                yield from source.spaces()
                if not (yield from source.match(",")):
                    break
                yield from source.spaces()
            if not any_call:
                continue
            yield from source.match("]")
            yield from source.spaces()
            if (yield from source.match(CLOSE)):
                source.settle()
                yield from source.spaces()
            elif source.broke_off:
                source.settle()
            source.give_back_unless_blank()

    def grammar(self, text: GrammarText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        one = text.rule(
            either(
                joined(literal(tool.name), _NOTATION.members(text, tool, before="(", colon="=", after=")"))
                for tool in tools
            )
        )
        more = f'(", " {one})*' if parallel else ""
        return joined('"["', one, more, '"]"', text.spelled(CLOSE))

    def free(self, text: GrammarText, call: str, *, parallel: bool) -> str:
        return calls_in_text(text, self.trigger, call, repeats=False)

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        written = []
        for name, arguments in calls:
            members = (f"{key}={_NOTATION.write(value)}" for key, value in json.loads(arguments).items())
            written.append(f"{name}({', '.join(members)})")
        return f"{OPEN}[{', '.join(written)}]{CLOSE}"


def _call(source: Source) -> Reading[bool]:
    """Read a call from its name. If it is none, it is given back as text."""
    yield from source.spaces()
    name = yield from source.word(_NAME, MAX_NAME)
    if not name or not (yield from source.match("(")):
        source.give_back()
        return False
    source.settle()
    log, count = source.log, 0
    log.start_call(name)
    log.arguments("{")
    while True:
        yield from source.spaces()
        if (yield from source.match(")")):
            log.arguments("}")
            log.end_call()
            return True
        if count and not (yield from source.match(",")):
            break
        yield from source.spaces()
        key = yield from source.word(_NAME, MAX_NAME)
        yield from source.spaces()
        if not key or not (yield from source.match("=")):
            break
        text, is_whole = yield from _literal(source)
        if not is_whole:
            break
        log.arguments(f"{', ' if count else ''}{json.dumps(key)}: {_as_json(text)}")
        count += 1
    log.end_call(is_whole=False)
    source.keep("")
    return True


def _literal(source: Source) -> Reading[tuple[str, bool]]:
    """Read one literal of Python. Returns its text, and False if it breaks off or is longer than MAX_HELD."""
    found, open_brackets = "", ""
    while len(found) < MAX_HELD and (yield from source.more()):
        if (yield from source.next_is("'\"")):
            quoted = yield from _quoted(source)
            found += quoted
            if len(quoted) < 2 or quoted[0] != quoted[-1]:
                return found, False
            continue
        if (yield from source.next_is("".join(_BRACKETS))):
            char = source.take_char()
            found, open_brackets = found + char, open_brackets + _BRACKETS[char]
        elif (yield from source.next_is(")]},")):
            if not open_brackets:
                return found, True
            char = source.take_char()
            found += char
            if char != "," and char == open_brackets[-1]:
                open_brackets = open_brackets[:-1]
        else:
            found += yield from source.word(_PLAIN, MAX_HELD)
    return found, False


def _quoted(source: Source) -> Reading[str]:
    quote = text = source.take_char()
    escaped = False
    while len(text) < MAX_HELD and (yield from source.more()):
        char = source.take_char()
        text += char
        if char == quote and not escaped:
            break
        escaped = char == "\\" and not escaped
    return text


def _as_json(text: str) -> str:
    text = text.strip()
    if text[:1] in ("'", '"'):  # models and templates write line breaks as they are
        text = text.replace("\n", "\\n")
    try:
        value: Any = ast.literal_eval(_WORDS.get(text, text))
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        pass
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
