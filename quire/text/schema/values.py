"""Keywords of single values: `type`, `enum`, `const`, numbers and strings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.text.schema.exclusive import TYPES, types_of_value
from quire.text.schema.notes import broken, shown
from quire.text.schema.strings import KNOWN_FORMATS, WRITTEN_FORMATS, complaint, translated

if TYPE_CHECKING:
    from quire.text.schema.normal import Walk

_BOUNDS = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}


def read_values(walk: Walk, schema: Mapping[str, Any], place: str, made: dict[str, Any], more: list[Any]) -> None:
    """Read the keywords of single values into `made`. Constraints whose keyword is in use go to `more`."""
    types = _read_type(schema, place)
    if types is not None:
        made["type"] = types[0] if len(types) == 1 else types
    _read_listed(schema, place, types, made)
    _read_numbers(schema, place, made)
    for keyword in ("minLength", "maxLength"):
        if keyword in schema:
            made[keyword] = count_of(schema, keyword, place)
    _read_pattern(walk, schema, place, made)
    if "format" in schema and (types is None or "string" in types):
        _read_format(walk, schema["format"], place, made, more)


def _read_type(schema: Mapping[str, Any], place: str) -> list[str] | None:
    if "type" not in schema:
        return None
    stated = schema["type"]
    names = stated if isinstance(stated, list) and stated else [stated]
    for name in names:
        if not isinstance(name, str) or name not in TYPES:
            raise broken("type", place, f"is {shown(repr(name))}, which is no type of JSON")
    return list(dict.fromkeys(names))


def _read_listed(schema: Mapping[str, Any], place: str, types: list[str] | None, made: dict[str, Any]) -> None:
    """Read `const` and `enum`, without the values that are not of the type."""
    if "const" in schema:
        made["const"] = schema["const"]
    if "enum" not in schema:
        return
    listed = schema["enum"]
    if not isinstance(listed, list) or not listed:
        raise broken("enum", place, "is no list of at least one value")
    fitting = listed if types is None else [value for value in listed if set(types_of_value(value)) & set(types)]
    made["enum"] = fitting or listed


def _read_numbers(schema: Mapping[str, Any], place: str, made: dict[str, Any]) -> None:
    for keyword, exclusive in _BOUNDS.items():
        if keyword in schema:
            made[keyword] = _number_of(schema, keyword, place)
        if isinstance(schema.get(exclusive), bool):  # form of draft 4
            if schema[exclusive] and keyword in made:
                made[exclusive] = made.pop(keyword)
        elif exclusive in schema:
            made[exclusive] = _number_of(schema, exclusive, place)
    if "multipleOf" in schema:
        made["multipleOf"] = _number_of(schema, "multipleOf", place)
        if made["multipleOf"] <= 0:
            raise broken("multipleOf", place, "is not above 0")


def _number_of(schema: Mapping[str, Any], keyword: str, place: str) -> float:
    value: Any = schema[keyword]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise broken(keyword, place, "is no number")
    return value


def count_of(schema: Mapping[str, Any], keyword: str, place: str) -> int:
    value: Any = schema[keyword]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != value // 1:
        raise broken(keyword, place, "is no whole number of 0 or more")
    return int(value)


def _read_pattern(walk: Walk, schema: Mapping[str, Any], place: str, made: dict[str, Any]) -> None:
    if "pattern" not in schema:
        return
    if not isinstance(schema["pattern"], str):
        raise broken("pattern", place, "is no text")
    pattern, why = usable(walk, schema["pattern"])
    if why is None:
        made["pattern"] = pattern
    else:
        walk.findings.leave_out("pattern", place, why)


def usable(walk: Walk, pattern: str) -> tuple[str, str | None]:
    """The translated pattern, and the reason why it can't be enforced, or None."""
    pattern = translated(pattern)
    walk.new_pattern(pattern)
    return pattern, complaint(pattern)


def _read_format(walk: Walk, name: Any, place: str, made: dict[str, Any], more: list[Any]) -> None:
    if not isinstance(name, str):
        raise broken("format", place, "is no text")
    if name in KNOWN_FORMATS:
        made["format"] = name
    elif name not in WRITTEN_FORMATS:
        walk.findings.leave_out("format", place, f"the format {shown(repr(name))} can't be enforced")
    elif "pattern" in made:
        more.append({"pattern": WRITTEN_FORMATS[name]})
    else:
        made["pattern"] = WRITTEN_FORMATS[name]
