"""Keywords of arrays and objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from quire.text.schema.notes import below, broken, shown
from quire.text.schema.strings import overlap
from quire.text.schema.values import count_of, usable

if TYPE_CHECKING:
    from quire.text.schema.normal import Walk

_JOINING = ("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas")


def read_array(walk: Walk, schema: Mapping[str, Any], place: str, depth: int, made: dict[str, Any]) -> None:
    first, rest = schema.get("prefixItems"), "items"
    if isinstance(schema.get("items"), list):  # form of drafts before 2020
        first, rest = schema["items"], "additionalItems"
    if first is not None:
        if not isinstance(first, list):
            raise broken("prefixItems", place, "is no list of schemas")
        name = "items" if rest == "additionalItems" else "prefixItems"
        made["prefixItems"] = [
            walk.schema(part, below(place, name, index), depth + 1) for index, part in enumerate(first)
        ]
    if rest in schema:
        made["items"] = walk.schema(schema[rest], below(place, rest), depth + 1)
    for keyword in ("minItems", "maxItems"):
        if keyword in schema:
            made[keyword] = count_of(schema, keyword, place)
    if schema.get("uniqueItems") and made.get("maxItems", 2) > 1:
        walk.findings.leave_out("uniqueItems", place, "a grammar can't compare items")
    if "contains" in schema:
        walk.findings.leave_out("contains", place, "a grammar can't count the items that fit")
    _read_unevaluated(walk, schema, "unevaluatedItems", "items", place, depth, made)


def read_object(
    walk: Walk, schema: Mapping[str, Any], place: str, depth: int, made: dict[str, Any], more: list[Any]
) -> None:
    if "properties" in schema:
        properties = _mapping(schema, "properties", place)
        made["properties"] = {
            name: walk.schema(part, below(place, "properties", name), depth + 1) for name, part in properties.items()
        }
    _read_required(walk, schema, place, made)
    if "additionalProperties" in schema:
        where = below(place, "additionalProperties")
        made["additionalProperties"] = walk.schema(schema["additionalProperties"], where, depth + 1)
    _read_pattern_properties(walk, schema, place, depth, made)
    _read_unevaluated(walk, schema, "unevaluatedProperties", "additionalProperties", place, depth, made)
    if "propertyNames" in schema:
        _read_names(walk, schema["propertyNames"], place, made)
    _read_counts(walk, schema, place, made, more)


def _mapping(schema: Mapping[str, Any], keyword: str, place: str) -> Mapping[str, Any]:
    value = schema[keyword]
    if not isinstance(value, Mapping):
        raise broken(keyword, place, "is no object with a schema for each name")
    return value


def _read_required(walk: Walk, schema: Mapping[str, Any], place: str, made: dict[str, Any]) -> None:
    required = schema.get("required")
    if required is None:
        return
    if isinstance(required, bool):
        walk.findings.leave_out("required", place, "it must be a list of names, in the schema of the object")
    elif not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise broken("required", place, "is no list of names")
    elif required:
        made["required"] = list(dict.fromkeys(required))


def _read_pattern_properties(
    walk: Walk, schema: Mapping[str, Any], place: str, depth: int, made: dict[str, Any]
) -> None:
    """Read `patternProperties`. Where it is left out, the names that it covers must stay allowed."""
    if "patternProperties" not in schema:
        return
    found: dict[str, Any] = {}
    reason = None
    for pattern, part in _mapping(schema, "patternProperties", place).items():
        made_schema = walk.schema(part, below(place, "patternProperties", pattern), depth + 1)
        pattern, why = usable(walk, pattern)
        if why is None:
            found[pattern] = made_schema
        else:
            reason = f"in the pattern {shown(repr(pattern))} {why}"
    if reason is None and len(found) > 1 and _overlap(walk, tuple(found)):
        reason = "a name may match two of its patterns"
    if reason is None and found and made.get("properties") and _overlap(walk, (*found, _only(made["properties"]))):
        reason = "it may match a name among 'properties'"
    if reason is not None:
        walk.findings.leave_out("patternProperties", place, reason)
        made["additionalProperties"] = True
    elif found:
        made["patternProperties"] = found


def _read_unevaluated(
    walk: Walk, schema: Mapping[str, Any], keyword: str, plain: str, place: str, depth: int, made: dict[str, Any]
) -> None:
    """Read an `unevaluated…` keyword as its plain counterpart where no other keyword evaluates the values."""
    if keyword not in schema or schema[keyword] is True or schema[keyword] == {}:
        return
    if not any(key in schema for key in _JOINING) and "contains" not in schema:
        if plain not in made:
            made[plain] = walk.schema(schema[keyword], below(place, keyword), depth + 1)
    else:
        walk.findings.leave_out(keyword, place, "it depends on which of the schemas beside it fit")


def _read_names(walk: Walk, names: Any, place: str, made: dict[str, Any]) -> None:
    """Enforce `propertyNames` where names are listed or have one pattern."""
    if names is True or (isinstance(names, Mapping) and set(names) <= {"type", "title", "description"}):
        return
    meaning = {key: value for key, value in names.items() if key != "type"} if isinstance(names, Mapping) else {}
    listed = [meaning["const"]] if set(meaning) == {"const"} else meaning.get("enum") if len(meaning) == 1 else None
    others = made.get("additionalProperties", True)
    if isinstance(listed, list) and "patternProperties" not in made:
        known = made.get("properties", {})
        allowed = [name for name in listed if isinstance(name, str)]
        made["properties"] = {name: known.get(name, others) for name in allowed}
        made["properties"] |= {name: False for name in known if name not in allowed}
        made["additionalProperties"] = False
        return
    is_free = "patternProperties" not in made and "properties" not in made
    if is_free and set(meaning) == {"pattern"} and isinstance(meaning["pattern"], str):
        pattern, why = usable(walk, meaning["pattern"])
        if why is None:
            made["patternProperties"] = {pattern: others}
            made["additionalProperties"] = False
            return
    walk.findings.leave_out("propertyNames", place, "only listed names, or a pattern for all of them, can be enforced")


def _read_counts(walk: Walk, schema: Mapping[str, Any], place: str, made: dict[str, Any], more: list[Any]) -> None:
    names, required = made.get("properties", {}), made.get("required", [])
    is_closed = made.get("additionalProperties") is False and not made.get("patternProperties")
    is_simple = all(name in required for name in names) and not any(key in schema for key in _JOINING)
    low = count_of(schema, "minProperties", place) if "minProperties" in schema else 0
    if low > len(required):
        if is_simple:
            made["minProperties"] = low
        elif is_closed and low == 1:
            more.append({"anyOf": [{"required": [name]} for name, part in names.items() if part is not False]})
        else:
            walk.findings.leave_out("minProperties", place, "properties that may be left out can't be counted")
    if "maxProperties" in schema:
        high = count_of(schema, "maxProperties", place)
        if is_simple:
            made["maxProperties"] = high
        elif not is_closed or high < len(names):
            walk.findings.leave_out("maxProperties", place, "properties that may be left out can't be counted")


def _overlap(walk: Walk, patterns: tuple[str, ...]) -> bool:
    walk.new_pattern("\0".join(patterns))
    return overlap(patterns)


def _only(names: Iterable[str]) -> str:
    """One pattern that matches exactly these names: the library's time grows faster than linearly with the number of
    patterns."""
    each = (
        "".join(c if c.isalnum() or c == "_" or ord(c) > 127 else f"\\x{ord(c):02x}" for c in name) for name in names
    )
    return f"^({'|'.join(each)})$"
