"""Keywords that combine schemas: `allOf`, `anyOf`, `oneOf`, `not`, `if`, and dependencies on a property.

A grammar can express conjunction and disjunction, but neither "exactly one" nor negation. These are rewritten where an
equivalent exists, and left out otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.text.schema.exclusive import all_exclusive, canonical
from quire.text.schema.notes import below, broken

if TYPE_CHECKING:
    from quire.text.schema.normal import Walk

MAX_CONDITIONS = 4  # dependencies in one schema; each doubles the alternatives
_TYPES = ("string", "number", "boolean", "null", "array", "object")
_ANNOTATIONS = frozenset(["title", "description", "$comment", "default", "examples", "type", "$schema", "$defs", "$id"])


def read_logic(
    walk: Walk, schema: Mapping[str, Any], place: str, depth: int, made: dict[str, Any], more: list[Any]
) -> None:
    if "allOf" in schema:
        more.extend(_parts(walk, schema, "allOf", place, depth))
    if "anyOf" in schema:
        made["anyOf"] = _parts(walk, schema, "anyOf", place, depth)
    if "oneOf" in schema:
        parts = _parts(walk, schema, "oneOf", place, depth)
        if not all_exclusive(schema["oneOf"], walk.references):
            walk.findings.leave_out("oneOf", place, "more than one of its schemas may fit; it is taken as anyOf")
        if "anyOf" in made:
            more.append({"anyOf": parts})
        else:
            made["anyOf"] = parts
    if "not" in schema:
        _read_not(walk, schema, place, depth, more)
    if "if" in schema and ("then" in schema or "else" in schema):
        _read_if(walk, schema, place, depth, more)
    _read_dependencies(walk, schema, place, depth, more)


def _parts(walk: Walk, schema: Mapping[str, Any], keyword: str, place: str, depth: int) -> list[Any]:
    parts = schema[keyword]
    if not isinstance(parts, list) or not parts:
        raise broken(keyword, place, "is no list of at least one schema")
    joined = any(key not in _ANNOTATIONS and key != keyword for key in schema) or (
        keyword == "allOf" and len(parts) > 1
    )
    return [
        walk.schema(part, below(place, keyword, index), depth + 1, joined=joined) for index, part in enumerate(parts)
    ]


def _read_not(walk: Walk, schema: Mapping[str, Any], place: str, depth: int, more: list[Any]) -> None:
    opposite = _opposite(schema["not"], schema)
    if opposite is None:
        walk.findings.leave_out("not", place, "a grammar can't exclude what fits a schema")
    else:
        more.append(walk.schema(opposite, below(place, "not"), depth + 1))


def _opposite(schema: Any, beside: Mapping[str, Any]) -> Any:
    """A schema of the values that do not fit this one; None if there is no such schema."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, Mapping):
        return None
    if not schema:
        return False
    if len(schema) != 1:
        return None
    keyword, value = next(iter(schema.items()))
    if keyword == "type":
        names = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        if not names or ("integer" in names and "number" not in names):
            return None
        return {"type": [name for name in _TYPES if name not in names]}
    if keyword == "required" and isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return {"properties": {value[0]: False}}
    if keyword in ("const", "enum") and isinstance(beside.get("enum"), list):
        excluded = {canonical(one) for one in (value if keyword == "enum" else [value])}
        left = [one for one in beside["enum"] if canonical(one) not in excluded]
        return {"enum": left} if left else False
    if keyword == "anyOf" and isinstance(value, list) and value:
        each = [_opposite(part, beside) for part in value]
        return None if any(part is None for part in each) else {"allOf": each}
    return None


def _read_if(walk: Walk, schema: Mapping[str, Any], place: str, depth: int, more: list[Any]) -> None:
    """Enforce `if` where it tests a required property with listed values; leave it out elsewhere."""
    cases = _cases(schema)
    if cases is None:
        walk.findings.leave_out("if", place, "a grammar can't tell by a schema what follows")
        return
    name, fitting, others = cases
    made = []
    for keyword, values in (("then", fitting), ("else", others)):
        if values:
            inner = walk.schema(schema.get(keyword, True), below(place, keyword), depth + 1)
            case = {"properties": {name: {"enum": values}}}
            made.append({"allOf": [case, inner]} if isinstance(inner, dict) else case if inner else False)
    more.append({"anyOf": made})


def _cases(schema: Mapping[str, Any]) -> tuple[str, list[Any], list[Any]] | None:
    """The property that `if` tests, the values for which it holds, and those for which it does not."""
    asked, properties = schema["if"], schema.get("properties")
    if not isinstance(asked, Mapping) or not set(asked) - _ANNOTATIONS <= {"properties", "required"}:
        return None
    wanted = asked.get("properties")
    if not isinstance(wanted, Mapping) or len(wanted) != 1 or not isinstance(properties, Mapping):
        return None
    name, test = next(iter(wanted.items()))
    is_there = isinstance(schema.get("required"), list) and name in schema["required"]
    if not is_there or schema.get("type") != "object" or asked.get("required", [name]) != [name]:
        return None
    if not isinstance(test, Mapping) or not set(test) - _ANNOTATIONS < {"const", "enum"}:
        return None
    values, wanted_values = _listed(properties.get(name)), _listed(test)
    if values is None or wanted_values is None:
        return None
    hit = set(map(canonical, wanted_values))
    return name, [v for v in values if canonical(v) in hit], [v for v in values if canonical(v) not in hit]


def _listed(schema: Any) -> list[Any] | None:
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    if isinstance(values, list):
        return values
    return [True, False] if schema.get("type") == "boolean" else None


def _read_dependencies(walk: Walk, schema: Mapping[str, Any], place: str, depth: int, more: list[Any]) -> None:
    """Dependencies of a property: either the property is absent, or the dependent schema holds."""
    made = []
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        if keyword not in schema:
            continue
        if not isinstance(schema[keyword], Mapping):
            raise broken(keyword, place, "is no object")
        if len(schema[keyword]) > MAX_CONDITIONS:
            walk.findings.leave_out(keyword, place, f"it has more than {MAX_CONDITIONS} properties")
            continue
        for name, wanted in schema[keyword].items():
            asked = {"required": wanted} if isinstance(wanted, list) else wanted
            inner = walk.schema(asked, below(place, keyword, name), depth + 1)
            made.append({"anyOf": [{"properties": {name: False}}, inner]})
    more.extend(made)
