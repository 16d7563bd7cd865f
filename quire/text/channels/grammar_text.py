"""Writes the grammar of tool calls in the Lark dialect of the grammar engine.

Each format describes one call with it, and `tool_grammar` builds the complete grammar. The engine compiles the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quire.text.channels.events import ToolSpec
from quire.text.schema import normalise
from quire.types import GrammarSpec, QuireError

TokenIdOf = Callable[[str], int | None]  # maps a text to the special token that is spelled so, or None
ANY_TEXT = r"/(?s:.*)/"
BOUNDED_SPACE = r"[ \n\t]{0,24}"  # between JSON tokens; bounded because small models may emit white space for ever


class GrammarText:
    """Collects the rules of one grammar."""

    def __init__(self, special_id: TokenIdOf):
        self._special_id = special_id
        self._rules: list[str] = []
        self.warnings: list[str] = []  # schema keywords that are not enforced

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule for an expression and return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def marker(self, text: str) -> str:
        """A marker of the format: the special token if the model has one for it, else its characters."""
        token_id = self._special_id(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    def is_special(self, text: str) -> bool:
        return self._special_id(text) is not None

    def json(self, schema: Mapping[str, Any], *, strict: bool, of: str = "") -> str:
        """A rule for a JSON value of this schema. Unless `strict`, keywords that can't be enforced are left out instead
        of refused. `of` prefixes messages about the schema."""
        try:
            normal = normalise(schema, strict=strict)
        except QuireError as error:
            raise QuireError(error.code, f"{of}{error.what}", error.hint, error.param) from None
        self.warnings.extend(f"{of}{note}" for note in normal.notes)
        return self.rule("%json " + json.dumps({**normal.schema, "x-guidance": {"whitespace_pattern": BOUNDED_SPACE}}))

    def answer(self, spec: GrammarSpec) -> str:
        """A rule for an answer of any kind except `ebnf`."""
        if spec.kind in ("json_object", "json_schema"):
            return self.json(schema_of(spec), strict=spec.strict)
        if spec.kind == "choice":
            return self.rule(either(map(literal, json.loads(spec.value))))
        return self.rule("/" + spec.value.replace("/", "\\/") + "/")

    def json_call(self, tool: ToolSpec, key: str) -> str:
        """A rule body for `{"name": …, <key>: {…}}`, with the spaces that chat templates write."""
        begin = "{" + f'"name": {json.dumps(tool.name)}, {json.dumps(key)}: '
        return f'{literal(begin)} {self.arguments(tool)} "}}"'

    def arguments(self, tool: ToolSpec) -> str:
        schema = {"type": "object", **tool.parameters}
        return self.json(schema, strict=tool.strict, of=owner(tool))

    def finish(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"


def owner(tool: ToolSpec) -> str:
    return f"Tool {tool.name!r}: "


def schema_of(spec: GrammarSpec) -> dict[str, Any]:
    """The JSON schema of an answer in JSON."""
    if spec.kind == "json_object":
        return {"type": "object"}
    try:
        schema: dict[str, Any] = json.loads(spec.value)
    except RecursionError:
        what = "The JSON schema is nested too deeply."
        raise QuireError("grammar_too_complex", what, "Make it flatter.") from None
    return schema


def call_schema(tool: ToolSpec, key: str) -> dict[str, Any]:
    """The JSON schema of one call."""
    properties = {"name": {"const": tool.name}, key: {"type": "object", **tool.parameters}}
    return {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def either(bodies: Iterable[str]) -> str:
    return "(" + " | ".join(bodies) + ")"
