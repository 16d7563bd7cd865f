"""Translates string formats and patterns for the grammar library, and reports those that it can't enforce."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

KNOWN_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
_CHARACTER = r"([A-Za-z0-9._~!$&'()*+,;=@:-]|%[0-9A-Fa-f]{2})"  # of a URI's path
_PLAIN = r"([A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"  # the same without a colon
_HOST = r"([A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*(:[0-9]*)?"
_END = rf"(\?({_CHARACTER}|[/?])*)?(#({_CHARACTER}|[/?])*)?"
_POINTER = r"(/([^~/]|~[01])*)*"
WRITTEN_FORMATS = {  # formats as patterns; each pattern is at least as strict as its format
    "uri-reference": rf"^(([A-Za-z][A-Za-z0-9+.-]*:)?(//{_HOST}(/{_CHARACTER}*)*|/({_CHARACTER}+(/{_CHARACTER}*)*)?)"
    rf"|{_PLAIN}+(/{_CHARACTER}*)*)?{_END}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
}
_NARROW_FUEL = 200_000  # lexer fuel for compiling one pattern


def translated(pattern: str) -> str:
    """An ECMAScript pattern in the library's dialect, in which some characters inside a class denote set operations and
    need an escape."""
    made: list[str] = []
    in_class = escaped = False
    for character in pattern:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif in_class and character in "[&~":
            made.append("\\")
        elif character in "[]":
            in_class = character == "["
        made.append(character)
    return "".join(made)


@lru_cache(1024)
def complaint(pattern: str) -> str | None:
    """Why a translated pattern can't be enforced; None if it can."""
    found = _library_complaint({"type": "string", "pattern": pattern})
    if not found:
        return None
    lowered = found.lower()
    for word, why in _REASONS.items():
        if word in lowered:
            return why
    return "it can't be read"


@lru_cache(256)
def overlap(patterns: tuple[str, ...]) -> bool:
    """Whether one text may match two of these patterns."""
    return bool(_library_complaint({"type": "object", "patternProperties": dict.fromkeys(patterns, True)}))


_REASONS = {
    "look": "it looks ahead or behind, or has a word boundary",
    "backreference": "it refers back to a group",
    "fuel": "it is too complex",
    "too big": "it is too complex",
    "too large": "it is too complex",
    "limit": "it is too complex",
    "unclosed": "a group or a class is not closed",
    "unrecognized escape": "it has an escape that is not known",
    "repetition": "a repetition has nothing to repeat, or no sense",
}


def _library_complaint(schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, initial_lexer_fuel=_NARROW_FUEL)
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    return LLMatcher.validate_grammar(grammar, limits=limits)
