"""Makes JSON schemas of varied kinds from a seed; the grammar tests and the benchmark of grammar engines use them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
WORDS = ("id", "name", "price", "city", "tags", "size", "when", "kind", "note", "é", "a b", "is_ok", "x-y", "0")
PATTERNS = ("^[a-z]{2,5}$", "^\\d{3}-\\d{4}$", "^(red|green|blue)$", "^[A-Z][a-z]+( [A-Z][a-z]+)*$", "^#[0-9a-f]{6}$")
FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4")


def make_schema(rng: random.Random, depth: int = 3) -> Schema:
    """An object schema, as structured output wants it."""
    return _object(rng, depth)


def _any(rng: random.Random, depth: int) -> Schema:
    leaves: list[Callable[[random.Random], Schema]] = [_string, _number, _integer, _enum, _constant, _flag, _pattern]
    if depth <= 0:
        return rng.choice(leaves)(rng)
    nested: list[Callable[[random.Random, int], Schema]] = [_object, _array, _union, _referring, _map, _tuple]
    return rng.choice(nested)(rng, depth - 1) if rng.random() < 0.5 else rng.choice(leaves)(rng)


def _object(rng: random.Random, depth: int) -> Schema:
    keys = rng.sample(WORDS, rng.randrange(1, 6))
    required = [key for key in keys if rng.random() < 0.7]
    schema: Schema = {"type": "object", "properties": {key: _any(rng, depth) for key in keys}, "required": required}
    if rng.random() < 0.7:
        schema["additionalProperties"] = False
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randrange(3)
    return {"type": "array", "items": _any(rng, depth), "minItems": low, "maxItems": low + rng.randrange(1, 4)}


def _tuple(rng: random.Random, depth: int) -> Schema:
    items = [_any(rng, depth) for _ in range(rng.randrange(1, 4))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _map(rng: random.Random, depth: int) -> Schema:
    return {"type": "object", "additionalProperties": _any(rng, depth)}


def _union(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randrange(2, 4))]}


def _referring(rng: random.Random, depth: int) -> Schema:
    tree = {"type": "object", "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["value"], "additionalProperties": False}  # fmt: skip
    return {"$ref": "#/$defs/node", "$defs_needed": tree}


def _string(rng: random.Random) -> Schema:
    schema: Schema = {"type": "string"}
    if rng.random() < 0.5:
        schema["maxLength"] = rng.randrange(1, 20)
    if rng.random() < 0.3:
        schema = {"type": "string", "format": rng.choice(FORMATS)}
    return schema


def _pattern(rng: random.Random) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def _number(rng: random.Random) -> Schema:
    return rng.choice(
        [{"type": "number"}, {"type": "number", "minimum": 0, "maximum": 100}, {"type": ["number", "null"]}]
    )


def _integer(rng: random.Random) -> Schema:
    low = rng.randrange(-50, 50)
    return rng.choice(
        [{"type": "integer"}, {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 5000)}]
    )


def _enum(rng: random.Random) -> Schema:
    return {"enum": rng.sample(["red", "green", 3, None, True, 'quote"d', "a\nb", "日本"], rng.randrange(1, 6))}


def _constant(rng: random.Random) -> Schema:
    return {"const": rng.choice(["fixed", 7, False])}


def _flag(rng: random.Random) -> Schema:
    return {"type": "boolean"}


def settled(schema: Schema) -> Schema:
    """The schema with the definitions its references need at its top."""
    nodes: list[Schema] = []

    def clean(part: Any) -> Any:
        if isinstance(part, dict):
            if "$defs_needed" in part:
                nodes.append(part["$defs_needed"])
            return {key: clean(value) for key, value in part.items() if key != "$defs_needed"}
        return [clean(value) for value in part] if isinstance(part, list) else part

    cleaned = clean(schema)
    return {**cleaned, "$defs": {"node": nodes[0]}} if nodes else cleaned


def make_schemas(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [json.dumps(settled(make_schema(rng))) for _ in range(count)]


def test_schemas_are_varied_and_come_from_the_seed() -> None:
    made = make_schemas(200, 1)
    assert made == make_schemas(200, 1) and len(set(made)) > 190
    for word in ("anyOf", "$ref", "prefixItems", "pattern", "format", "enum", "minItems", "const", "maximum"):
        assert sum(word in schema for schema in made) >= 5, word
