"""Writes the grammar of tool calls in the Lark dialect of the grammar engine.

Each format describes one call with it, and `tool_grammar` builds the complete grammar. The engine compiles the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from quire.text.channels.events import ToolSpec
from quire.text.schema import normalise
from quire.types import GrammarSpec, QuireError

ANY_TEXT = r"/(?s:.*)/"
BOUNDED_SPACE = r"[ \n\t]{0,24}"  # between JSON tokens; bounded because small models may emit white space for ever


_SLOT_RULES = {"\ue0d0": "/[A-Za-z0-9]{9}/", "\ue0d1": "/[0-9]{1,2}/"}  # ids of calls, and their number in the turn


class GrammarText:
    """Rules of one grammar. `specials` maps the spelling of each special token that markers may hold to its id."""

    def __init__(self, specials: Mapping[str, int]):
        self._specials = specials
        longest = sorted(specials, key=len, reverse=True)
        self._parts = re.compile("|".join(map(re.escape, [*longest, *_SLOT_RULES])))
        self._rules: list[str] = []
        self.warnings: list[str] = []  # schema keywords that are not enforced

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule for an expression and return its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def spelled(self, text: str) -> str:
        """The grammar of a marker text: special tokens where the model has them, else characters. Slots are filled."""
        parts, at = [], 0
        for found in self._parts.finditer(text):
            parts.append(literal(text[at : found.start()]))
            special = self._specials.get(found.group())
            parts.append(_SLOT_RULES[found.group()] if special is None else f"<[{special}]>")
            at = found.end()
        return " ".join(part for part in [*parts, literal(text[at:])] if part != '""')

    def until(self, close: str) -> str:
        """The grammar of any text up to and including this marker text."""
        special = self._parts.search(close)
        if special is not None and special.start() == 0:  # a special token is never part of the text before it
            return f"{self.rule(ANY_TEXT)} {self.spelled(close)}"
        plain = close if special is None else close[: special.start()]
        return joined(self.rule(ANY_TEXT, f"[suffix={literal(plain)}]"), self.spelled(close[len(plain) :]))

    def string(self, schema: Mapping[str, Any], close: str) -> str:
        """The grammar of an unquoted string of this schema and the marker text after it. A string whose length is
        bounded holds no `<`, with which markers begin."""
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if not isinstance(most, int) and not least:
            return self.until(close)
        return f"/[^<]{{{int(least)},{'' if most is None else int(most)}}}/ {self.spelled(close)}"

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


def calls_in_text(text: GrammarText, trigger: str, call: str, *, repeats: bool) -> str:
    """The grammar of free text with a call wherever the trigger occurs."""
    return f"({text.rule(f'{text.until(trigger)} {call}')}){'*' if repeats else '?'} {text.rule(ANY_TEXT)}"


def json_or_text(text: GrammarText, call: str) -> str:
    """The grammar of a call in plain JSON or of free text: the first character decides."""
    no_call = text.rule(r"/([^{\[](?s:.*))?/")
    return f"{no_call} | {call}"


def joined(*bodies: str) -> str:
    """The grammar of these bodies one after another, without those that are empty."""
    return " ".join(body for body in bodies if body)


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def either(bodies: Iterable[str]) -> str:
    return "(" + " | ".join(bodies) + ")"
