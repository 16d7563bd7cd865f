"""Schemas for `test_schema_normal`: what can't be enforced, what means nothing, and what is hostile."""

from __future__ import annotations

from typing import Any

from tests.pure.schemas_enforced import POINT, TEXT

# What can't be enforced, with the keyword and place that are named.
NAMED: dict[str, tuple[Any, str, str]] = {
    "uniqueItems": (
        {"properties": {"tags": {"type": "array", "items": TEXT, "uniqueItems": True}}},
        "uniqueItems",
        "#/properties/tags",
    ),
    "oneOf that may overlap": ({"oneOf": [{"minLength": 3}, {"maxLength": 5}]}, "oneOf", "#"),
    "oneOf of required": ({**POINT, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "oneOf", "#"),
    "not": ({"items": {"not": {"pattern": "a"}}}, "not", "#/items"),
    "if": ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if", "#"),
    "contains": ({"type": "array", "contains": TEXT}, "contains", "#"),
    "format regex": ({"format": "regex"}, "format", "#"),
    "a format nobody knows": (
        {"properties": {"a/b": {"type": "string", "format": "color"}}},
        "format",
        "#/properties/a~1b",
    ),
    "lookahead": ({"properties": {"a": {"pattern": "^(?!x)"}}}, "pattern", "#/properties/a"),
    "back reference": ({"pattern": "(a)\\1"}, "pattern", "#"),
    "lookahead in a name": (
        {"patternProperties": {"^(?!x)": {}}, "additionalProperties": False},
        "patternProperties",
        "#",
    ),
    "patterns that overlap": ({"patternProperties": {"^a": {}, "b$": TEXT}}, "patternProperties", "#"),
    "a far reference": ({"items": {"$ref": "https://x.test/y.json"}}, "$ref", "#/items"),
    "a reference to nothing": ({"items": {"$ref": "#/$defs/none"}}, "$ref", "#/items"),
    "a reference to itself": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "$ref",
        "#",
    ),
    "minProperties": ({**POINT, "minProperties": 3}, "minProperties", "#"),
    "propertyNames": ({"propertyNames": {"format": "email"}}, "propertyNames", "#"),
    "unevaluatedProperties": ({"allOf": [POINT], "unevaluatedProperties": False}, "unevaluatedProperties", "#"),
    "required of draft 3": ({"properties": {"a": {"type": "string", "required": True}}}, "required", "#/properties/a"),
    "many dependencies": ({"dependencies": {str(i): ["a"] for i in range(9)}}, "dependencies", "#"),
}

BROKEN: dict[str, tuple[Any, str]] = {
    "type": ({"properties": {"a": {"type": "text"}}}, "'type' at #/properties/a is 'text'"),
    "types": ({"type": []}, "'type' at #"),
    "enum": ({"enum": []}, "'enum' at #"),
    "minimum": ({"minimum": "3"}, "'minimum' at #"),
    "multipleOf": ({"multipleOf": 0}, "'multipleOf' at #"),
    "minLength": ({"minLength": -1}, "'minLength' at #"),
    "pattern": ({"pattern": 3}, "'pattern' at #"),
    "properties": ({"properties": []}, "'properties' at #"),
    "a property": ({"properties": {"a": 3}}, "'a' at #/properties"),
    "required": ({"required": [1]}, "'required' at #"),
    "anyOf": ({"items": {"anyOf": []}}, "'anyOf' at #/items"),
    "items": ({"items": "x"}, "'items' at #"),
    "control characters": ({"properties": {"a\r\nb": {"type": "\r\nx: y"}}}, "'type' at #/properties/a??b"),
}


def deep(depth: int) -> Any:
    schema: Any = TEXT
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE = {
    "deep": deep(200),
    "deep by allOf": {
        "$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)} | {"a40": {}},
        "$ref": "#/$defs/a0",
    },
    "patterns": {"properties": {f"p{i}": {"pattern": f"^{i}"} for i in range(1000)}},
    "copies of copies": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {
                "allOf": [
                    {
                        "properties": {
                            str(i): {"allOf": [{"$ref": "#/$defs/a"}, {"minProperties": i}]} for i in range(40)
                        }
                    }
                ]
            }
        },
    },
    "oneOf of oneOf": {"oneOf": [{"oneOf": [{"oneOf": [{"oneOf": [{"minLength": 1}] * 60}] * 60}] * 60}] * 60},
    "references to and fro": {
        "$ref": "#/$defs/a0",
        "$defs": {
            f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{j}"} for j in range(0, 60, 7)], "minLength": 1} for i in range(60)
        },
    },
}
