"""Values between markers, unquoted: the tool's schema, or the template's own mark, says which JSON type each is.

Strings are escaped into JSON while they stream. Any other value is held back until its closing marker, and becomes a
string unless it parses as JSON of a type that the schema allows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.text.channels.source import MAX_HELD, Reading, Source

_TYPES: Mapping[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates print values of Python


CDATA = ("<![CDATA[", "]]>")  # around values with angle brackets, in templates that quote them so


def read_value(
    source: Source, types: frozenset[str], close: str, *, trims: bool, has_cdata: bool = False
) -> Reading[bool]:
    """Read one value and its closing marker, and log it as JSON. Returns False if the text ended before the marker.
    `trims`: the line break before the closing marker is the template's, not the value's."""
    log = source.log
    if has_cdata and (yield from source.match(CDATA[0])):
        log.arguments('"')
        space, marker = yield from source.plain(lambda text: log.arguments(_escaped(text)), (CDATA[1],))
        if not marker:
            return False
        log.arguments(_escaped(space) + '"')
        yield from source.match(close)
        return True
    if types != {"string"}:
        held, is_whole = yield from source.until(close, MAX_HELD)
        if is_whole:
            log.arguments(as_json(held.removesuffix("\n") if trims else held, types))
            return True
        if not (yield from source.more()):
            held = held.removesuffix("\n")
            log.arguments(held if _may_be_json(held) else '"' + _escaped(held))
            return False
        log.arguments('"' + _escaped(held))  # too long to hold back: stream it as a string
    else:
        log.arguments('"')
    space, marker = yield from source.plain(lambda text: log.arguments(_escaped(text)), (close,))
    if not marker:
        return False
    log.arguments(_escaped(space.removesuffix("\n") if trims else space) + '"')
    return True


def _may_be_json(text: str) -> bool:
    """Whether `text` may be the beginning of JSON."""
    start = text.strip()
    return start[:1] in tuple('{["-0123456789') or any(word.startswith(start) for word in ("true", "false", "null"))


def as_json(text: str, types: frozenset[str]) -> str:
    try:
        value = json.loads(_PYTHON_WORDS.get(text.strip(), text) if "string" not in types else text)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if types and not types.intersection(_TYPES[type(value)]):
        return json.dumps(text, ensure_ascii=False)
    return _PYTHON_WORDS.get(text.strip(), text.strip())


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def types_of(schema: Any) -> frozenset[str]:
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
            each = [types_of(option) for option in schema[choice]]
            return frozenset().union(*each) if all(each) else frozenset()
    return frozenset()


def type_of(value: Any) -> str:
    return _TYPES[type(value)][0]
