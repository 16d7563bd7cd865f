"""Notations of values that are not JSON: how a model spells strings, words and keys. Reads them, and writes grammars.

Gemma 4 and the Pythonic formats each have one. A grammar enforces types, listed values, and which keys an object has;
other keywords of a schema are left out with a warning.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.text.channels.events import ToolSpec
from quire.text.channels.grammar_text import GrammarText, either, joined, literal, owner
from quire.text.channels.layouts.values import properties_of, types_of
from quire.types import QuireError

MAX_DEPTH = 12  # of schemas; deeper values may be anything
_ENFORCED = frozenset({"type", "enum", "const", "properties", "required", "items", "additionalProperties", "anyOf"})
_SILENT = frozenset({"title", "description", "default", "examples", "$defs", "definitions", "nullable", "$schema"})
_ORDER = ("string", "integer", "number", "boolean", "null", "array", "object")


@dataclass(frozen=True, slots=True)
class Notation:
    """The spelling of values. `quote` is a marker around strings, or empty where strings are those of JSON."""

    quote: str = ""
    true: str = "true"
    false: str = "false"
    null: str = "null"
    quotes_keys: bool = True
    colon: str = ": "
    comma: str = ", "

    def write(self, value: Any) -> str:
        """The text of a JSON value."""
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}" if self.quote else json.dumps(value, ensure_ascii=False)
        if isinstance(value, bool):
            return self.true if value else self.false
        if value is None:
            return self.null
        if isinstance(value, Mapping):
            members = (self.key(key) + self.colon + self.write(inner) for key, inner in value.items())
            return "{" + self.comma.join(members) + "}"
        if isinstance(value, list):
            return "[" + self.comma.join(map(self.write, value)) + "]"
        return json.dumps(value)

    def key(self, key: str) -> str:
        return json.dumps(key, ensure_ascii=False) if self.quotes_keys else key

    # -- grammars

    def members(self, text: GrammarText, tool: ToolSpec, *, before: str, colon: str, after: str) -> str:
        """The grammar of a tool's arguments, as members between two texts."""
        return self._members(text, tool, tool.parameters, (before, colon, after), 0)

    def value(self, text: GrammarText, tool: ToolSpec, schema: Any, depth: int = 0) -> str:
        """The grammar of a value of this schema."""
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            schema = {}
        types = types_of(schema)
        if not self._is_json(types):
            bounded = {"minLength", "maxLength"} if types == {"string"} else set()
            note_left_out(text, tool, schema, _ENFORCED | bounded)
        if "const" in schema or isinstance(schema.get("enum"), list):
            listed = schema["enum"] if "enum" in schema else [schema["const"]]
            return either(text.spelled(self.write(value)) for value in listed)
        if isinstance(schema.get("anyOf"), list) and schema["anyOf"]:
            return either(self.value(text, tool, one, depth + 1) for one in schema["anyOf"])
        types = types_of(schema) or (frozenset(_ORDER) if depth < 3 else frozenset(_ORDER[:5]))
        kinds = [kind for kind in _ORDER if kind in types]
        return text.rule(either(self._of_type(text, tool, schema, kind, depth) for kind in kinds))

    def _is_json(self, types: frozenset[str]) -> bool:
        """Whether values of these types are spelled as in JSON, whose grammar enforces all keywords."""
        return bool(types) and types <= ({"integer", "number"} if self.quote else {"integer", "number", "string"})

    def _of_type(self, text: GrammarText, tool: ToolSpec, schema: Mapping[str, Any], kind: str, depth: int) -> str:
        match kind:
            case "string" if self.quote:
                return joined(text.spelled(self.quote), text.string(schema, self.quote))
            case "string" | "integer" | "number":
                return text.json({**schema, "type": kind}, strict=tool.strict, of=owner(tool))
            case "boolean":
                return f'("{self.true}" | "{self.false}")'
            case "null":
                return f'"{self.null}"'
            case "array":
                item = self.value(text, tool, schema.get("items"), depth + 1)
                return f'"[" ({item} ({literal(self.comma)} {item})*)? "]"'
        return self._members(text, tool, schema, ("{", self.colon, "}"), depth + 1)

    def _members(
        self, text: GrammarText, tool: ToolSpec, schema: Mapping[str, Any], around: Sequence[str], depth: int
    ) -> str:
        """The grammar of an object's members in their order; optional ones may be missing."""
        before, colon, after = around
        required = schema.get("required", ())
        parts = [
            (
                joined(
                    text.spelled((key if around[0] != "{" else self.key(key)) + colon),
                    self.value(text, tool, inner, depth + 1),
                ),
                key in required,
            )
            for key, inner in properties_of(schema).items()
        ]
        return joined(literal(before), _in_order(text, parts, self.comma), literal(after))


def note_left_out(text: GrammarText, tool: ToolSpec, schema: Mapping[str, Any], enforced: Collection[str]) -> None:
    """Warn of keywords that a notation can't enforce. A strict tool with one is refused."""
    for keyword in schema:
        if keyword in enforced or keyword in _SILENT:
            continue
        what = f"{owner(tool)}'{keyword}' is not enforced in this model's format of calls"
        if tool.strict:
            raise QuireError("invalid_schema", f"{what}.", "Leave it out, or send strict: false.", "tools")
        text.warnings.append(what)


def _in_order(text: GrammarText, parts: Sequence[tuple[str, bool]], comma: str) -> str:
    """The grammar of members with separators, where some are optional."""
    follow = ""  # what may come after a member that is there
    first = ""  # what may come where none is there yet
    for body, is_required in reversed(parts):
        rule = text.rule(body)
        after = text.rule(f"{literal(comma)} {rule} {follow}".rstrip())
        begin = text.rule(f"{rule} {follow}".rstrip())
        if is_required:
            first, follow = begin, after
        else:
            first = text.rule(f"{begin} | {first}" if first else f"({begin})?")
            follow = text.rule(f"{after} | {follow}" if follow else f"({after})?")
    return first
