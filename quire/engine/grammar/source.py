"""Translates specs to the grammar library's source text, and the library's errors to `QuireError`s."""

from __future__ import annotations

import json
import re
from typing import Any

from quire.text.schema import normalise
from quire.types import GrammarSpec, QuireError

MAX_CHARS = 262_144
MAX_CHOICES = 10_000
# White space in JSON is bounded, since small models would otherwise write it until max_tokens.
JSON_OPTIONS = {"whitespace_pattern": r"[ \n\t]{0,24}"}
LEADING_SPACE = r"/[ \n\t]{0,4}/"  # white space that models write between reasoning and answer
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")  # a position in a grammar's text, in the library's errors
_EXCERPT = re.compile(r" \d+ \| .*$")  # an excerpt of that text
_CONVERTER = "Failed to convert the grammar from GBNF to Lark: "  # no client asked for that
_REGEX = re.compile(r"^line \d+, column \d+: invalid regex .* \(in regex\): (?:regex parse error: )?")
_TOO_MUCH = ("too big", "too large", "too complex", "too many", "limit", "fuel", "recursion", "max is")


def check_size(spec: GrammarSpec, max_chars: int) -> None:
    if len(spec.value) > max_chars:
        what = f"The {_NAMES.get(spec.kind, 'grammar')} has {len(spec.value)} characters, the limit is {max_chars}."
        raise QuireError("grammar_too_complex", what, "Use a smaller one.")


def library_grammar(spec: GrammarSpec, leads: bool) -> str:
    """Return the library's source text of a spec. `leads`: reasoning precedes, so white space may lead."""
    from llguidance import LLMatcher, grammar_from

    if spec.kind == "json_object":
        return _json_grammar({"type": "object"}, leads)
    if spec.kind == "json_schema":
        return _json_grammar(_schema(spec.value), leads, spec.strict)
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.value)
    if spec.kind == "choice":
        return _choice_grammar(spec.value)
    if spec.kind == "ebnf":
        try:
            return grammar_from("ebnf", spec.value)
        except (ValueError, RecursionError) as error:
            raise explain(str(error), "invalid_schema") from None
    raise QuireError("invalid_schema", f"There is no grammar of kind {spec.kind!r}.", "Use json_schema, regex or ebnf.")


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise QuireError("grammar_too_complex", "The JSON schema is nested too deeply.", "Make it flatter.") from None
    except ValueError as error:
        raise QuireError("invalid_schema", f"The JSON schema is not JSON: {error}.", "Send an object.") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise QuireError("invalid_schema", "The JSON schema is not an object.", "Send an object.")
    return schema


def _json_grammar(schema: dict[str, Any], leads: bool, strict: bool = True) -> str:
    enforced = {**normalise(schema, strict=strict).schema, "x-guidance": JSON_OPTIONS}
    if leads:
        return f"%llguidance {{}}\nstart: LEAD body\nLEAD: {LEADING_SPACE}\nbody: %json {json.dumps(enforced)}\n"
    return json.dumps({"grammars": [{"json_schema": enforced}]})


def _choice_grammar(text: str) -> str:
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError):
        choices = None
    is_good = isinstance(choices, list) and choices and all(isinstance(c, str) and c for c in choices)
    if not is_good or len(choices) > MAX_CHOICES:
        what = f"A choice must be a list of 1 to {MAX_CHOICES} non-empty texts."
        raise QuireError("invalid_schema", what, "Correct the list.")
    bodies = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    return f"%llguidance {{}}\nstart: {bodies}\n"


def explain_regex(complaint: str) -> QuireError:
    """Explain an error in a regular expression without the grammar that Quire wraps around it."""
    error = explain(complaint, "invalid_schema")
    if error.code != "invalid_schema":
        return error
    why = _REGEX.sub("", error.what.partition("can't be used: ")[2])
    return QuireError(error.code, f"The regular expression can't be used: {why}", "Correct it.")


def explain_schema(complaint: str) -> QuireError:
    """Explain an error in a schema whose keywords are all supported.

    The library's own text describes the grammar that it made of the schema, which the client does not know.
    """
    lowered = complaint.lower()
    if "unsatisfiable" in lowered or "no text" in lowered:
        return QuireError("invalid_schema", "The JSON schema allows no value at all.", "Correct it.")
    if "circular" in lowered or "intersection" in lowered:
        what = "The JSON schema combines circular schemas, or too many schemas, with allOf or $ref."
        return QuireError("grammar_too_complex", what, "Write the combined schema out, or leave a part of it out.")
    if any(word in lowered for word in _TOO_MUCH):
        return QuireError("grammar_too_complex", "The JSON schema is too complex.", "Use a simpler one.")
    what = "The JSON schema can't be enforced as a whole, though each of its keywords can."
    return QuireError("invalid_schema", what, "Leave a part of it out.")


def explain(complaint: str, code: str) -> QuireError:
    """Convert an error of the library to a QuireError of one line. `code` is used unless a limit was exceeded."""
    line = " ".join(complaint.replace("<non-verbose/>", "").split()).removeprefix(_CONVERTER)
    line = _EXCERPT.sub("", _PLACE.sub(r"line \1, column \2: ", line))[:300].rstrip(".")
    if line.startswith("NoExtension"):
        line = "it allows no text at all"
    if "recursion depth" in line:  # of the library's own converter
        return QuireError("grammar_too_complex", "The grammar is nested too deeply.", "Make it flatter.")
    if any(word in line.lower() for word in _TOO_MUCH):
        return QuireError("grammar_too_complex", f"The grammar is too complex: {line}.", "Use a simpler one.")
    if code == "grammar_failed":
        return QuireError(code, f"The output does not match its grammar: {line}.", "Please report it, with the schema.")
    return QuireError(code, f"The schema or grammar can't be used: {line}.", "Correct it, or leave that part out.")


_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "choice": "list of choices"}
