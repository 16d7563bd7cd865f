"""Proves that no value fits two schemas. `oneOf` over such schemas equals `anyOf`, which a grammar can enforce."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.text.schema.refs import References, ref_of

TYPES = frozenset(["string", "number", "integer", "boolean", "null", "array", "object"])
MAX_PAIRS = 10_000
MAX_DEPTH = 6


def all_exclusive(branches: list[Any], references: References) -> bool:
    """Whether every two branches are certainly exclusive."""
    if len(branches) * (len(branches) - 1) // 2 > MAX_PAIRS:
        return False
    return all(
        exclusive(first, second, references) for place, first in enumerate(branches) for second in branches[place + 1 :]
    )


def exclusive(first: Any, second: Any, references: References, depth: int = 0) -> bool:
    if first is False or second is False:
        return True
    if (
        depth > MAX_DEPTH
        or not references.may_look()
        or not isinstance(first, Mapping)
        or not isinstance(second, Mapping)
    ):
        return False
    for one, other in ((first, second), (second, first)):
        if any(exclusive(part, other, references, depth + 1) for part in _all_of(one, references)):
            return True
        for key in ("anyOf", "oneOf"):
            parts: Any = one.get(key)
            is_list = isinstance(parts, list) and 0 < len(parts) <= 64
            if is_list and all(exclusive(part, other, references, depth + 1) for part in parts):
                return True
    shared = types_of(first) & types_of(second)
    if not shared:
        return True
    values, others = values_of(first), values_of(second)
    if values is not None and others is not None:
        return not values & others
    if shared == {"object"}:
        return _exclusive_objects(first, second, references, depth)
    return shared <= {"number", "integer"} and (_ends_below(first, second) or _ends_below(second, first))


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a value may have; "number" includes "integer"."""
    values = values_of(schema)
    if values is not None:
        return frozenset(name for value in values for name in types_of_value(json.loads(value)))
    stated = schema.get("type")
    names = frozenset([stated] if isinstance(stated, str) else _strings(stated) or TYPES)
    return names | {"integer"} if "number" in names else names


def values_of(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """All values that fit, in canonical form; None if the schema lists none."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(map(canonical, listed)) if isinstance(listed, list) else None


def canonical(value: Any) -> str:
    """JSON text that is equal for equal values: 1 and 1.0 are equal in JSON schema, 1 and true are not."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def types_of_value(value: Any) -> tuple[str, ...]:
    """The types of a value; a whole number has two."""
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, (int, float)):
        return ("integer", "number") if value == value // 1 else ("number",)
    return ("string",) if isinstance(value, str) else ("array",) if isinstance(value, list) else ("object",)


def _all_of(schema: Mapping[str, Any], references: References) -> list[Any]:
    """Schemas that every value of this schema also fits."""
    parts = schema.get("allOf")
    found = list(parts) if isinstance(parts, list) and len(parts) <= 64 else []
    ref = ref_of(schema)
    target = references.find(ref) if ref is not None else None
    return [*found, target[1]] if target is not None else found


def _exclusive_objects(first: Mapping[str, Any], second: Mapping[str, Any], references: References, depth: int) -> bool:
    for one, other in ((first, second), (second, first)):
        for key in _strings(one.get("required")):
            if _forbids(other, key):
                return True
            if key not in _strings(other.get("required")):
                continue
            mine, yours = _property(one, key), _property(other, key)
            if exclusive(mine, yours, references, depth + 1):
                return True
    return False


def _strings(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _property(schema: Mapping[str, Any], key: str) -> Any:
    properties = schema.get("properties")
    return properties.get(key, {}) if isinstance(properties, Mapping) else {}


def _forbids(schema: Mapping[str, Any], key: str) -> bool:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    if key in properties:
        return properties[key] is False
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")


def _ends_below(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    top, bottom = first.get("maximum"), second.get("minimum")
    is_number = all(isinstance(end, (int, float)) and not isinstance(end, bool) for end in (top, bottom))
    return is_number and top < bottom  # type: ignore[operator]
