"""Schemas for `test_schema_normal`: what must be enforced whole."""

from __future__ import annotations

from typing import Any

TEXT = {"type": "string"}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x"]}
CLOSED = {**POINT, "additionalProperties": False}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "hound"]}}, "required": ["kind"]}
TREE = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/node"}},
    "required": ["next"],
    "$defs": {"node": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
    "additionalProperties": False,
}

# What must be enforced whole: schema, values that must be possible, values that must not.
ENFORCED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "oneOf by a constant": ({"oneOf": [CAT, DOG]}, [{"kind": "cat", "lives": 9}, {"kind": "dog"}], [{"kind": "x"}, {}]),
    "oneOf by type": ({"oneOf": [TEXT, {"type": "integer"}, POINT]}, ["a", 3, {"x": 1}], [1.5, None, {"y": 1}]),
    "oneOf by required and closed": (
        {
            "oneOf": [
                CLOSED,
                {"type": "object", "properties": {"z": TEXT}, "required": ["z"], "additionalProperties": False},
            ]
        },
        [{"x": 1}, {"z": "a"}],
        [{"x": 1, "z": "a"}, {}],
    ),
    "oneOf of references": (
        {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": CAT, "dog": DOG}},
        [{"kind": "hound"}, {"kind": "cat"}],
        [{"kind": 1}],
    ),
    "oneOf of numbers": (
        {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 7}]},
        [3, 7],
        [5],
    ),
    "oneOf of lists of values": ({"oneOf": [{"enum": [1, "a"]}, {"enum": ["b", None]}]}, ["a", "b", None, 1], [2, "c"]),
    "one of one": ({"oneOf": [TEXT]}, ["a"], [1]),
    "anyOf beside oneOf": (
        {"anyOf": [TEXT, {"type": "null"}], "oneOf": [{"type": "null"}, {"type": "array"}]},
        [None],
        ["a", []],
    ),
    "not a type": ({"not": {"type": ["object", "array", "number"]}}, ["a", None, True], [1, {}, []]),
    "not listed": ({"enum": ["a", "b", 3], "not": {"const": "b"}}, ["a", 3], ["b"]),
    "not required": ({**POINT, "not": {"required": ["z"]}}, [{"x": 1}, {"x": 1, "y": 2}], [{"x": 1, "z": 3}]),
    "neither of two": (
        {**POINT, "not": {"anyOf": [{"required": ["z"]}, {"required": ["y"]}]}},
        [{"x": 1}],
        [{"x": 1, "y": 2}, {"x": 1, "z": 1}],
    ),
    "if by a listed value": (
        {
            "type": "object",
            "properties": {"how": {"enum": ["card", "cash"]}, "number": TEXT},
            "required": ["how"],
            "additionalProperties": False,
            "if": {"properties": {"how": {"const": "card"}}},
            "then": {"required": ["number"]},
        },
        [{"how": "cash"}, {"how": "card", "number": "1"}, {"how": "cash", "number": "1"}],
        [{"how": "card"}],
    ),
    "if and else": (
        {
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "a": TEXT, "b": TEXT},
            "required": ["on"],
            "additionalProperties": False,
            "if": {"properties": {"on": {"const": True}}, "required": ["on"]},
            "then": {"required": ["a"]},
            "else": {"required": ["b"]},
        },
        [{"on": True, "a": "1"}, {"on": False, "b": "1"}],
        [{"on": True, "b": "1"}, {"on": False, "a": "1"}],
    ),
    "dependencies": (
        {**CLOSED, "required": [], "dependencies": {"y": ["x"]}},
        [{}, {"x": 1}, {"x": 1, "y": 1}],
        [{"y": 1}],
    ),
    "dependentRequired": ({**CLOSED, "required": [], "dependentRequired": {"y": ["x"]}}, [{}, {"x": 1}], [{"y": 1}]),
    "dependentSchemas": (
        {**CLOSED, "required": [], "dependentSchemas": {"y": {"properties": {"x": {"minimum": 5}}, "required": ["x"]}}},
        [{}, {"x": 1}, {"x": 5, "y": 1}],
        [{"x": 4, "y": 1}, {"y": 1}],
    ),
    "local references": ({"$ref": "#/definitions/a<b>", "definitions": {"a<b>": POINT}}, [{"x": 1}], [{"y": 1}]),
    "a reference to a property": (
        {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"$ref": "#/properties/a"}}, "required": ["b"]},
        [{"b": 1}, {"a": 2, "b": 2}],
        [{"b": 3}],
    ),
    "a reference by anchor": ({"$ref": "#here", "$defs": {"p": {"$anchor": "here", **POINT}}}, [{"x": 1}], [{}]),
    "a reference by $id": (
        {"$ref": "https://x.test/p", "$defs": {"p": {"$id": "https://x.test/p", **POINT}}},
        [{"x": 1}],
        [{}],
    ),
    "a reference with others beside it": (
        {"$ref": "#/$defs/p", "required": ["y"], "$defs": {"p": POINT}},
        [{"x": 1, "y": 2}],
        [{"x": 1}, {"y": 2}],
    ),
    "recursion": (TREE, [{"next": None}, {"next": {"next": None}}], [{}, {"next": 1}]),
    "recursion within allOf": (
        {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": {
                    "type": "object",
                    "properties": {"of": {"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"k": {"const": 1}}}]}},
                }
            },
        },
        [{}, {"of": {"of": {}, "k": 1}, "k": 2}],
        [{"of": {"k": 2}}, {"of": {"of": {"k": 2}}}, {"of": 1}],
    ),
    "allOf": (
        {"allOf": [POINT, {"properties": {"x": {"minimum": 5}}}, {"required": ["y"]}]},
        [{"x": 5, "y": 1}],
        [{"x": 4, "y": 1}, {"x": 6}],
    ),
    "const": ({"const": {"a": [1, None, "é"]}}, [{"a": [1, None, "é"]}], [{"a": [1]}, 1]),
    "enum of all types": (
        {"enum": [1, "a", None, True, {"x": 1}, [2]]},
        [1, "a", None, True, {"x": 1}, [2]],
        [2, False],
    ),
    "enum and type": ({"type": ["string", "null"], "enum": ["a", None, 3]}, ["a", None], [3]),
    "several types": ({"type": ["integer", "string"], "minimum": 3, "maxLength": 2}, [3, "ab"], [2, "abc", None]),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "^b": TEXT}, "additionalProperties": False},
        [{}, {"a1": 1, "b": "x"}],
        [{"a": "x"}, {"c": 1}],
    ),
    "patternProperties beside properties": (
        {
            "type": "object",
            "properties": {"id": TEXT},
            "patternProperties": {"^x-": {"type": "integer"}},
            "additionalProperties": False,
        },
        [{"id": "a", "x-1": 2}],
        [{"id": 1}, {"x-1": "a"}, {"y": 1}],
    ),
    "propertyNames by pattern": (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": TEXT},
        [{}, {"ab": "x"}],
        [{"A": "x"}, {"ab": 1}],
    ),
    "propertyNames listed": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
        [{}, {"a": 1, "b": 2}],
        [{"c": 1}],
    ),
    "a schema for the other properties": (
        {**POINT, "additionalProperties": TEXT},
        [{"x": 1, "z": "a"}],
        [{"x": 1, "z": 1}],
    ),
    "unevaluatedProperties": ({**POINT, "unevaluatedProperties": False}, [{"x": 1}], [{"x": 1, "z": 1}]),
    "minProperties of required": ({**POINT, "minProperties": 1}, [{"x": 1}], [{}]),
    "minProperties 1 of few": ({**CLOSED, "required": [], "minProperties": 1}, [{"y": 1}, {"x": 1}], [{}]),
    "maxProperties of a map": (
        {"type": "object", "additionalProperties": TEXT, "maxProperties": 1},
        [{}, {"a": "b"}],
        [{"a": "b", "c": "d"}],
    ),
    "arrays": (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        [[1], [1, 2]],
        [[], [1, 2, 3], ["a"]],
    ),
    "tuples": (
        {"type": "array", "prefixItems": [TEXT, {"type": "integer"}], "items": False},
        [["a", 1], ["a"], []],
        [["a", 1, 2], [1]],
    ),
    "tuples of draft 7": (
        {
            "type": "array",
            "items": [TEXT],
            "additionalItems": {"type": "null"},
            "$schema": "http://json-schema.org/draft-07/schema#",
        },
        [["a", None]],
        [["a", 1]],
    ),
    "unique of one": ({"type": "array", "items": TEXT, "uniqueItems": True, "maxItems": 1}, [["a"], []], [["a", "b"]]),
    "unique is false": ({"type": "array", "uniqueItems": False}, [[1, 1]], ["a"]),
    "true and false": (
        {"type": "object", "properties": {"a": True, "b": False}, "required": ["a"]},
        [{"a": 1}, {"a": None}],
        [{"a": 1, "b": 1}, {}],
    ),
    "no items": ({"type": "array", "items": False}, [[]], [[1]]),
    "bounds of draft 4": (
        {
            "type": "integer",
            "minimum": 3,
            "exclusiveMinimum": True,
            "maximum": 9,
            "exclusiveMaximum": False,
            "$schema": "http://json-schema.org/draft-04/schema#",
        },
        [4, 9],
        [3, 10],
    ),
    "bounds": ({"type": "integer", "exclusiveMinimum": 3, "maximum": 5, "multipleOf": 2}, [4], [3, 5, 6]),
    "a pattern in ECMAScript's dialect": (
        {"type": "string", "pattern": "^[[&~]\\/\\d$"},
        ["[/1", "&/2"],
        ["]/1", "x/1"],
    ),
    "json-pointer": ({"type": "string", "format": "json-pointer"}, ["", "/a/b~1c"], ["a", "/~"]),
    "uri-reference": (
        {"type": "string", "format": "uri-reference"},
        ["", "a/b", "../x?y#z", "https://x.test/a:b", "#a"],
        ["a b", "1:2", "%zz", "[", "a#b#c"],
    ),
    "date": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "x"]),
    "a format of something else": ({"type": "integer", "format": "int32"}, [3], ["a"]),
    "annotations": (
        {**POINT, "title": "t", "default": {}, "examples": [1], "x-order": 3, "nullable": True},
        [{"x": 1}],
        [{}],
    ),
    "an empty schema": ({}, [1, "a", None, {}], []),
}
