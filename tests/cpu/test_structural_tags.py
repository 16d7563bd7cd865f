"""Structural tags in both forms: what they let through and what they forbid, by the grammar library itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")

from llguidance import LLMatcher, LLTokenizer, grammar_from

from quire.text.channels.structural import structural_grammar
from quire.types import GrammarSpec, QuireError

CITY = {"properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "object", **CITY, "additionalProperties": False}
LEGACY = {
    "structures": [
        {"begin": "<function=weather>", "schema": WEATHER, "end": "</function>"},
        {"begin": "<function=now>", "schema": {"type": "object", "additionalProperties": False}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}
TAG = {"type": "tag", "begin": "<b>", "content": {"type": "any_text"}, "end": "</b>"}
FORMAT = {"format": {"type": "sequence", "elements": [TAG, {"type": "const_string", "value": "!"}]}}
NONE = {"type": "const_string", "value": "none"}
EITHER = {"format": {"type": "or", "elements": [{"type": "regex", "pattern": "[0-9]+"}, NONE]}}
LISTED = {"format": {"type": "tags_with_separator", "separator": ",", "at_least_one": True, "tags": [TAG]}}
NESTED = {"format": {"type": "triggered_tags", "triggers": ["<b"], "tags": [TAG], "at_least_one": True}}


class NoSpecials:
    special_spellings = ()


def accepts(tag: dict[str, Any], text: str) -> bool:
    spec = structural_grammar(GrammarSpec("structural_tag", json.dumps(tag)), NoSpecials(), "response_format")  # type: ignore[arg-type]
    assert spec.kind == "ebnf"
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar_from("ebnf", spec.value))
    assert not matcher.is_error(), (matcher.get_error(), spec.value)
    return bool(matcher.consume_tokens(list(text.encode()))) and matcher.is_accepting()


@pytest.mark.parametrize(
    "tag,good,bad",
    [
        (
            LEGACY,
            ["no call", 'a <function=weather>{"city": "Aix"}</function> b', "<function=now>{}</function>"],
            ["<function=other>{}</function>", '<function=weather>{"town": "Aix"}</function>', "<function=now>{}"],
        ),
        (FORMAT, ["<b>x</b>!", "<b></b>!"], ["<b>x</b>", "x!"]),
        (EITHER, ["123", "none"], ["", "nonee", "x"]),
        (LISTED, ["<b>x</b>", "<b>x</b>,<b>y</b>"], ["", "<b>x</b>,", "<b>x</b> <b>y</b>"]),
        (NESTED, ["one <b>x</b> two", "<b>x</b>"], ["none", "<bad>"]),
    ],
)
def test_what_is_let_through(tag: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(tag, text), text
    for text in bad:
        assert not accepts(tag, text), text


@pytest.mark.parametrize(
    "tag,words",
    [
        ({}, "structures is no list"),
        ({"structures": [{"begin": "a", "schema": {}}], "triggers": ["b"]}, "no tag begins with the trigger"),
        ({"structures": [{"begin": "a", "schema": {}}, {"begin": "b", "schema": {}}], "triggers": ["a"]}, "no trigger"),
        ({"structures": [{"begin": 5, "schema": {}}], "triggers": ["a"]}, "begin is no text"),
        ({"format": {"type": "qwen_xml"}}, "is not known"),
        ({"format": []}, "an object is missing"),
    ],
)
def test_what_is_refused(tag: dict[str, Any], words: str) -> None:
    with pytest.raises(QuireError, match=words) as caught:
        accepts(tag, "")
    assert (caught.value.code, caught.value.param) == ("invalid_schema", "response_format")
