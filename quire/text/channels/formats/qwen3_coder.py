"""Qwen3-Coder XML: `<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`.

Values are unquoted, so the tool's schema decides their type: strings are escaped into JSON while they stream; any other
value is buffered, and becomes a string unless it parses as JSON of a type that the schema allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.channels.events import ToolSpec
from quire.text.channels.grammar_text import ANY_TEXT, GrammarText, either, literal, owner
from quire.text.channels.source import MAX_HELD, Reading, Source

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\s]")
_TYPES: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


class Qwen3Coder:
    """Implements `ToolFormat`."""

    name = "qwen3_coder"
    markers: tuple[str, ...] = (OPEN, CLOSE)
    trigger = OPEN
    plain_key = ""
    repeats = True

    def matches(self, template: str) -> bool:
        return all(marker in template for marker in (OPEN, FUNCTION, PARAMETER))

    def read(self, source: Source, tools: Sequence[ToolSpec]) -> Reading[None]:
        schemas = {tool.name: tool.parameters for tool in tools}
        while True:
            space, marker = yield from source.plain(source.log.text, (OPEN, FUNCTION))  # some models omit OPEN
            if not marker:
                return
            source.keep(space + marker)
            if marker == OPEN:
                yield from source.spaces()
            if marker == FUNCTION or (yield from source.match(FUNCTION)):
                is_call = yield from _function(source, schemas)
                if is_call:
                    yield from source.spaces()
                    yield from source.match(CLOSE)
                    yield from source.spaces()
            else:
                source.give_back()

    def grammar(self, text: GrammarText, tools: Sequence[ToolSpec], *, parallel: bool) -> str:
        functions = []
        for tool in tools:
            required = tool.parameters.get("required", ())
            parts = []
            for key, schema in _properties(tool.parameters).items():
                part = f"{literal(f'{PARAMETER}{key}>' + chr(10))} {_value_grammar(text, schema, tool)} " + r'"\n"'
                parts.append(part if key in required else f"({part})?")
            functions.append(" ".join([literal(f"\n{FUNCTION}{tool.name}>\n"), *parts, literal(f"{END_FUNCTION}\n")]))
        return f"{either(functions)} {text.marker(CLOSE)}"


def _function(source: Source, schemas: Mapping[str, Mapping[str, Any]]) -> Reading[bool]:
    """Read a function after its opening marker. If it breaks off, the part read stays a call and the rest is text."""
    name = yield from source.word(_NAME)
    if not name or not (yield from source.match(">")):
        source.give_back()
        return False
    source.settle()
    log = source.log
    log.start_call(name)
    log.arguments("{")
    properties = _properties(schemas.get(name, {}))
    keys: set[str] = set()
    while True:
        source.keep("")
        yield from source.spaces()
        found = yield from source.match(PARAMETER, END_FUNCTION)
        if found != PARAMETER:
            break
        key = yield from source.word(_NAME)
        if not key or key in keys or not (yield from source.match(">")):
            found = ""
            break
        source.settle()
        log.arguments(f"{', ' if keys else ''}{json.dumps(key, ensure_ascii=False)}: ")
        keys.add(key)
        yield from source.match("\n")
        if not (yield from _value(source, _types(properties.get(key, {"type": "string"})))):
            log.end_call(is_whole=False)  # the text ended inside the value
            return True
    if found or (yield from source.more()):
        log.arguments("}")
    if found:
        source.settle()
    log.end_call(is_whole=bool(found))
    source.give_back_unless_blank()
    return True


def _value(source: Source, types: frozenset[str]) -> Reading[bool]:
    """Read one value and its closing marker, and log it as JSON. Returns False if the text ended before the marker."""
    log = source.log
    if types != {"string"}:
        held, is_whole = yield from source.until(END_PARAMETER, MAX_HELD)
        if is_whole:
            log.arguments(_as_json(held.removesuffix("\n"), types))
            return True
        if not (yield from source.more()):
            held = held.removesuffix("\n")
            log.arguments(held if _may_be_json(held) else '"' + _escaped(held))
            return False
        log.arguments('"' + _escaped(held))  # too long to hold back: stream it as a string
    else:
        log.arguments('"')
    space, marker = yield from source.plain(lambda text: log.arguments(_escaped(text)), (END_PARAMETER,))
    if not marker:
        return False
    log.arguments(_escaped(space.removesuffix("\n")) + '"')
    return True


def _may_be_json(text: str) -> bool:
    """Whether `text` may be the beginning of JSON."""
    start = text.strip()
    return start[:1] in tuple('{["-0123456789') or any(word.startswith(start) for word in ("true", "false", "null"))


def _as_json(text: str, types: frozenset[str]) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    if types and not types.intersection(_TYPES[type(value)]):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _types(schema: Any) -> frozenset[str]:
    """The JSON types that a schema states by type, enum, anyOf or oneOf; empty if it states none."""
    if not isinstance(schema, Mapping):
        return frozenset()
    stated = schema.get("type")
    if isinstance(stated, str):
        return frozenset([stated])
    if isinstance(stated, list):
        return frozenset(str(name) for name in stated)
    if isinstance(schema.get("enum"), list):
        return frozenset(name for value in schema["enum"] for name in _TYPES.get(type(value), ()))
    for choice in ("anyOf", "oneOf"):
        if isinstance(schema.get(choice), list):
            each = [_types(option) for option in schema[choice]]
            return frozenset().union(*each) if all(each) else frozenset()
    return frozenset()


def _value_grammar(text: GrammarText, schema: Any, tool: ToolSpec) -> str:
    """The grammar of a value and its closing marker."""
    close = literal(f"\n{END_PARAMETER}")
    if _types(schema) != {"string"}:
        shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
        whole = {**shared, **schema} if isinstance(schema, Mapping) else {}
        return f"{text.json(whole, strict=tool.strict, of=owner(tool))} {close}"
    if isinstance(schema.get("enum"), list):
        return f"{either(literal(str(value)) for value in schema['enum'])} {close}"
    return text.rule(ANY_TEXT, f"[suffix={close}]")
