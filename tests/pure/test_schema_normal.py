"""JSON schemas as the grammar engine enforces them: what fits the grammar fits the schema (jsonschema is the oracle);
what can not be enforced is named."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from quire.engine.grammar.matcher import GrammarCompiler
from quire.text.schema import normalise
from quire.types import GrammarSpec, QuireError
from tests.pure.schemas_enforced import ENFORCED
from tests.pure.schemas_refused import BROKEN, HOSTILE, NAMED

jsonschema = pytest.importorskip("jsonschema")

TOKENS = [bytes([byte]) for byte in range(256)] + [b"<eos>"]
EOS = 256


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENS, (EOS,), special_ids=(EOS,), encode=lambda text: list(text.encode()))
    yield made
    made.close()


def takes(compiler: GrammarCompiler, schema: Any, text: str, *, strict: bool = True) -> bool:
    grammar = compiler.compile(GrammarSpec.json(schema, strict=strict))
    ids = list(text.encode())
    grammar.advance(ids)
    return grammar.error is None and grammar.accepts_end


def oracle(schema: Any) -> Any:
    made = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return made(schema, format_checker=made.FORMAT_CHECKER)


@pytest.mark.parametrize("name", ENFORCED)
def test_what_is_enforced_takes_the_right_values_and_no_others(compiler: GrammarCompiler, name: str) -> None:
    schema, good, bad = ENFORCED[name]
    check = oracle(schema)
    assert normalise(schema, strict=True).notes == ()
    for value in good:
        assert check.is_valid(value), f"the example {value!r} is wrong"
        assert takes(compiler, schema, json.dumps(value, ensure_ascii=False)), value
    for value in bad:
        assert not takes(compiler, schema, json.dumps(value, ensure_ascii=False)), value


@pytest.mark.parametrize("name", ENFORCED)
def test_whatever_the_grammar_writes_fits_the_schema(compiler: GrammarCompiler, name: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    schema = ENFORCED[name][0]
    check, ended = oracle(schema), 0
    for _ in range(12):
        grammar, ids = compiler.compile(GrammarSpec.json(schema)), []
        for _ in range(120):
            mask = grammar.mask(ids)
            found = [token for token in range(EOS) if mask[token >> 3] >> (token & 7) & 1 and token not in b" \n\t"]
            if grammar.accepts_end and (not found or rng.random() < 0.5):
                value = json.loads(bytes(ids))
                if isinstance(value, str) and value.startswith("0000-"):
                    break  # a year of RFC 3339, but not of Python's calendar, with which the oracle reads dates
                assert check.is_valid(value), (value, next(iter(check.iter_errors(value))).message)
                ended += 1
                break
            likely = [token for token in found if token in b'"}],:01\\n']  # an end is found soon
            ids.append(rng.choice(likely if likely and rng.random() < 0.6 else found))
    assert ended or name == "an empty schema"


@pytest.mark.parametrize("name", NAMED)
def test_what_can_not_be_enforced_is_named(compiler: GrammarCompiler, name: str) -> None:
    schema, keyword, place = NAMED[name]
    notes = normalise(schema, strict=False).notes
    assert [(note.keyword, note.place) for note in notes] == [(keyword, place)], notes
    compiler.compile(GrammarSpec.json(schema, strict=False))
    with pytest.raises(QuireError) as caught:
        compiler.compile(GrammarSpec.json(schema))
    assert caught.value.code == "invalid_schema" and f"'{keyword}' at {place}" in caught.value.what
    for word in ("guidance", "coerce", "lenient", "Option", "Unimplemented", "\n"):
        assert word not in str(caught.value) and word not in str(notes[0])


def test_what_is_left_out_allows_what_the_schema_allows(compiler: GrammarCompiler) -> None:
    values = {
        "uniqueItems": {"tags": ["a", "b"]},
        "lookahead in a name": {"a": 1},
        "patterns that overlap": {"ab": "x"},
        "a far reference": [1, {}],
        "back reference": "aa",
        "oneOf that may overlap": "ab",
    }
    for name, value in values.items():
        assert takes(compiler, NAMED[name][0], json.dumps(value), strict=False), name


@pytest.mark.parametrize("name", BROKEN)
def test_what_means_nothing_is_refused_by_keyword_and_place(name: str) -> None:
    schema, said = BROKEN[name]
    for strict in (False, True):
        with pytest.raises(QuireError) as caught:
            normalise(schema, strict=strict)
        assert caught.value.code == "invalid_schema" and said in caught.value.what, caught.value
        assert str(caught.value).isascii() and str(caught.value).isprintable()


def test_notes_are_short_lines_for_a_header() -> None:
    schema = {"properties": {"é\r\nx-evil: 1" * 50: {"format": "né\r\n" * 90}}}
    (note,) = normalise(schema, strict=False).notes
    assert str(note).isascii() and str(note).isprintable() and len(str(note)) < 400


KEYWORDS = [
    "type",
    "enum",
    "const",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "multipleOf",
    "minLength",
    "pattern",
    "format",
    "items",
    "prefixItems",
    "additionalItems",
    "minItems",
    "maxItems",
    "uniqueItems",
    "contains",
    "unevaluatedItems",
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "unevaluatedProperties",
    "anyOf",
    "allOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "$ref",
    "$dynamicRef",
    "$defs",
    "$id",
    "id",
    "$anchor",
    "$schema",
    "title",
    "a",
    "b",
]
VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2.5,
    1e308,
    float("inf"),
    "",
    "a",
    "string",
    "object",
    "#",
    "#/$defs/a",
    "#/properties/a",
    "(",
    "^a",
    "[[]",
    "date",
    "\r\n",
    [],
    {},
    ["a"],
    ["string", "null"],
    [1, "a"],
    [[]],
    [{}],
    "é" * 9,
]


def junk(rng: random.Random, depth: int) -> Any:
    kind = rng.random()
    if depth <= 0 or kind < 0.25:
        return rng.choice(VALUES)
    if kind < 0.4:
        return [junk(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYWORDS): junk(rng, depth - 1) for _ in range(rng.randrange(1, 5))}


def test_any_junk_is_rewritten_or_refused() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    num_taken = 0
    for _ in range(3000):
        schema = junk(rng, rng.randrange(1, 6))
        try:
            json.dumps(normalise(schema, strict=False).schema)
            num_taken += 1
        except QuireError as error:
            assert error.code in ("invalid_schema", "grammar_too_complex") and str(error).isprintable(), error
    assert num_taken > 100


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_cost_little_and_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused or rewritten, after a bounded number of looks."""
    from quire.text.schema import exclusive, normal, refs

    count = 0
    look, walk = refs.References.may_look, normal.Walk.schema

    def counted_look(self: Any, steps: int = 1) -> bool:
        nonlocal count
        count += 1
        return look(self, steps)

    def counted_walk(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return walk(self, *args, **options)

    monkeypatch.setattr(refs.References, "may_look", counted_look)
    monkeypatch.setattr(normal.Walk, "schema", counted_walk)
    try:
        normalise(HOSTILE[name], strict=False)
    except QuireError as error:
        assert error.code == "grammar_too_complex", error
    assert count < 2 * (normal.MAX_SCHEMAS + refs.MAX_WORK) and exclusive.MAX_DEPTH < 10


def test_what_is_looked_at_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"oneOf": [{"const": value} for value in range(100)]}
    assert normalise(schema, strict=False).notes == ()
    monkeypatch.setattr("quire.text.schema.refs.MAX_WORK", 1000)
    assert [note.keyword for note in normalise(schema, strict=False).notes] == ["oneOf"]


@pytest.mark.parametrize("name", ["deep", "patterns"])
def test_limits_of_a_schema_are_refusals(name: str) -> None:
    for strict in (False, True):
        with pytest.raises(QuireError) as caught:
            normalise(HOSTILE[name], strict=strict)
        assert caught.value.code == "grammar_too_complex" and str(caught.value).isprintable()


def test_schema_text_without_torch_or_server() -> None:
    import subprocess
    import sys

    code = "import sys, quire.text.schema; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'fastapi')])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
