"""Checks a call's arguments against its tool's schema, and mends what has one reading: a number written as text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.agent.repair.lenient_json import MalformedCall

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
_BOOLEANS = {"true": True, "True": True, "false": False, "False": False}


def fit_arguments(schema: Mapping[str, Any], arguments: dict[str, Any], tool: str) -> dict[str, Any]:
    """Returns the arguments in the schema's types. Raises `MalformedCall` if they do not fit."""
    properties: Mapping[str, Any] = schema.get("properties") or {}
    is_open = schema.get("additionalProperties", True) not in (False, None) or not properties
    unknown = [name for name in arguments if name not in properties]
    if unknown and not (is_open and "additionalProperties" in schema) and properties:
        known = ", ".join(properties)
        raise MalformedCall(f"{tool} has no argument {unknown[0]!r}; it has {known}")
    missing = [
        name
        for name in schema.get("required") or ()
        if name not in arguments or (arguments[name] is None and "null" not in _names(properties.get(name) or {}))
    ]
    if missing:
        raise MalformedCall(f"{tool} needs the argument {missing[0]!r}")
    return {
        name: _fit(properties.get(name) or {}, value, f"{tool}.{name}")
        for name, value in arguments.items()
        if value is not None or "null" in _names(properties.get(name) or {"type": "null"})
    }


def _names(schema: Mapping[str, Any]) -> list[str]:
    """The types that a schema names; empty if it names none."""
    kind = schema.get("type")
    if isinstance(kind, list):
        return [str(one) for one in kind]
    if kind is not None:
        return [str(kind)]
    return [name for part in schema.get("anyOf") or () if isinstance(part, dict) for name in _names(part)]


def _fit(schema: Mapping[str, Any], value: Any, where: str) -> Any:
    names = _names(schema)
    if names and not any(_is(value, name) for name in names):
        value = _converted(value, names, where)
    allowed = schema.get("enum")
    if isinstance(allowed, list) and value not in allowed:
        raise MalformedCall(f"{where} must be one of {', '.join(map(json.dumps, allowed))}, not {json.dumps(value)}")
    least, most = schema.get("minimum"), schema.get("maximum")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if isinstance(least, (int, float)) and value < least:
            raise MalformedCall(f"{where} must be at least {least}")
        if isinstance(most, (int, float)) and value > most:
            raise MalformedCall(f"{where} must be at most {most}")
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        return [_fit(schema["items"], item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict) and isinstance(schema.get("properties"), dict):
        return fit_arguments(schema, value, where)
    return value


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if isinstance(value, float) and name == "integer":
        return False
    return name not in _TYPES or isinstance(value, _TYPES[name])


def _converted(value: Any, names: list[str], where: str) -> Any:
    """Converts where nothing is lost; a text that is a number, a whole float, JSON in a text."""
    if isinstance(value, str):
        text = value.strip()
        if "boolean" in names and text in _BOOLEANS:
            return _BOOLEANS[text]
        if "integer" in names and re.fullmatch(r"-?\d{1,15}", text):
            return int(text)
        if "number" in names and re.fullmatch(r"-?\d{1,15}(\.\d{1,15})?", text):
            return float(text)
        if ("object" in names or "array" in names) and text[:1] in ("{", "["):
            try:
                parsed = json.loads(text)
            except (ValueError, RecursionError):
                raise MalformedCall(f"{where} must be of type {' or '.join(names)}") from None
            if any(_is(parsed, name) for name in names):
                return parsed
    if isinstance(value, float) and "integer" in names and value == int(value):
        return int(value)
    raise MalformedCall(f"{where} must be of type {' or '.join(names)}, not {json.dumps(value)[:60]}")
