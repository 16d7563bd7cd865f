"""`tool_choice` as a grammar: whatever it lets through is read back by the same format's parser as a valid call."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from quire.engine.grammar.matcher import Grammar, GrammarCompiler
from quire.text.channels import (
    FORMATS,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    ToolSpec,
    make_channel_parser,
    merge,
    tool_grammar,
)
from quire.types import GrammarSpec, QuireError
from tests.cpu.grammar_cases import cases

WEATHER = ToolSpec(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    strict=True,
)
CLOCK = ToolSpec("clock", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (WEATHER, CLOCK)
SPECIALS = ["[TOOL_CALLS]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"]  # fmt: skip
TOKENS = [*(bytes([byte]) for byte in range(256)), b"<eos>", *(text.encode() for text in SPECIALS)]
EOS = 256


SPECIAL_IDS = {text: 257 + index for index, text in enumerate(SPECIALS)}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENS, (EOS,), special_ids=range(EOS, len(TOKENS)))
    yield made
    made.close()


def compile_for(compiler: GrammarCompiler, name: str, choice: str, **options: Any) -> Grammar:
    spec = tool_grammar(FORMATS[name], TOOLS, choice, specials=SPECIAL_IDS, **options)
    assert spec is not None and spec.kind == "ebnf"
    return compiler.compile(spec)


def walk(grammar: Grammar, rng: random.Random, start: str = "") -> str | None:
    """A random text the grammar lets through, printable where it is free; None if it did not end soon."""
    tokens = encode(start)
    printable = {*range(97, 103), *b'"{}[]:, \n<>/=\\', *range(EOS, len(TOKENS))}
    for _ in range(400):
        mask = grammar.mask(tokens)
        assert grammar.error is None, (decode(tokens), str(grammar.error))
        found = [i for i in range(len(TOKENS)) if mask[i >> 3] >> (i & 7) & 1]
        if EOS in found and rng.random() < 0.5:
            return decode(tokens)
        usual = [i for i in found if i in printable and i != EOS] or [i for i in found if i != EOS]
        if not usual:
            return decode(tokens)
        closing = [i for i in usual if i in (34, 125, 60)]  # a quote, a brace, an angle
        tokens.append(rng.choice(closing if closing and rng.random() < 0.6 else usual))
    return None


def encode(text: str) -> list[int]:
    tokens: list[int] = []
    while text:
        special = next((s for s in SPECIALS if text.startswith(s)), None)
        tokens += [257 + SPECIALS.index(special)] if special else list(text[0].encode())
        text = text[len(special) if special else 1 :]
    return tokens


def decode(tokens: list[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens).decode("utf-8", "replace")


def read_calls(name: str, text: str) -> tuple[list[tuple[str, Any]], str]:
    parser = make_channel_parser(name, tools=TOOLS)
    events = merge(parser.push(text) + parser.finish())
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    arguments = [json.loads(event.arguments) for event in events if isinstance(event, ToolCallDelta)]
    return list(zip(names, arguments, strict=True)), "".join(e.text for e in events if isinstance(e, TextDelta))


def check_call(call: tuple[str, Any]) -> None:
    name, arguments = call
    if name == "clock":
        assert arguments == {}
        return
    assert name == "get_weather" and set(arguments) <= {"city", "days", "unit"}
    assert isinstance(arguments["city"], str) and arguments["unit"] in ("C", "F")
    assert "days" not in arguments or 1 <= arguments["days"] <= 9


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("choice", ["required", "clock", "get_weather"])
@pytest.mark.parametrize("name", FORMATS)
def test_required_and_named(compiler: GrammarCompiler, name: str, choice: str, parallel: bool) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    grammar, finished = compile_for(compiler, name, choice, parallel=parallel), 0
    for _ in range(6):
        text = walk(grammar, rng)
        if text is None:
            continue
        finished += 1
        calls, rest = read_calls(name, text)
        assert calls and rest == "", text
        assert parallel or len(calls) == 1, text
        for call in calls:
            check_call(call)
            assert choice in ("required", call[0])
    assert finished or choice != "clock"


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral", "mistral_list", "deepseek", "deepseek_fenced"])
def test_auto_with_a_strict_tool_leaves_text_free_and_binds_calls(compiler: GrammarCompiler, name: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    grammar = compile_for(compiler, name, "auto")
    tokens = encode("Any words, {1} < 2.")
    assert grammar.mask(tokens)[EOS >> 3] >> (EOS & 7) & 1
    text = None
    for _ in range(20):
        text = walk(grammar, rng, "So: " + FORMATS[name].trigger)
        calls, _ = read_calls(name, text) if text is not None else ([], "")
        if calls:
            check_call(calls[0])
            return
    raise AssertionError(f"no call came of it: {text!r}")


@pytest.mark.parametrize("name", ["llama3", "json"])
def test_auto_without_a_trigger(compiler: GrammarCompiler, name: str) -> None:
    grammar = compile_for(compiler, name, "auto")
    assert grammar.mask(encode("Any words {")) and grammar.accepts_end
    mask = grammar.mask(encode("{"))
    assert [i for i in range(256) if mask[i >> 3] >> (i & 7) & 1] == [ord('"')] and not grammar.accepts_end


def test_nothing_to_enforce_and_what_makes_no_sense() -> None:
    assert tool_grammar(FORMATS["hermes"], TOOLS, "none") is None
    assert tool_grammar(FORMATS["hermes"], [CLOCK], "auto") is None
    for tools, choice in ((TOOLS, "missing"), ((), "required")):
        with pytest.raises(QuireError) as caught:
            tool_grammar(FORMATS["hermes"], tools, choice)
        assert caught.value.param == "tool_choice"


def test_marker_is_its_special_token_where_there_is_one(compiler: GrammarCompiler) -> None:
    spec = tool_grammar(FORMATS["mistral"], TOOLS, "required", specials=SPECIAL_IDS, leads=True)
    assert spec is not None and "<[257]>" in spec.value and "TOOL_CALLS" not in spec.value
    grammar = compiler.compile(replace(spec, after_reasoning=(7,)))
    for thinking in ([7], [7, 10, 10]):
        mask = grammar.mask(thinking)
        found = [i for i in range(len(TOKENS)) if mask[i >> 3] >> (i & 7) & 1]
        assert 257 in found and set(found) <= {257, *b" \n\t"}
    assert '"[TOOL_CALLS]"' in tool_grammar(FORMATS["mistral"], TOOLS, "required").value  # type: ignore[union-attr]


ANSWERS = [
    (GrammarSpec.json({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                       "additionalProperties": False}), '{"ok": true}'),
    (GrammarSpec.json(), '{"any": [1]}'),
    (GrammarSpec.regex("a/[0-9]+"), "a/12"),
    (GrammarSpec.choice("yes", "no"), "no"),
]  # fmt: skip


@pytest.mark.parametrize("spec,good", ANSWERS)
@pytest.mark.parametrize("name", FORMATS)
def test_with_tools_an_answer_that_is_bound_may_also_be_a_call(
    compiler: GrammarCompiler, name: str, spec: GrammarSpec, good: str
) -> None:
    grammar = compile_for(compiler, name, "auto", answer=spec)
    required = compile_for(compiler, name, "clock", parallel=False)
    rng = random.Random(5)
    calls = [text for text in (walk(required, rng) for _ in range(20)) if text is not None]
    for text in (good, calls[0]):
        tokens: list[int] = []
        for token in encode(text):
            mask = grammar.mask(tokens)
            assert mask[token >> 3] >> (token & 7) & 1, (text, decode(tokens))
            tokens.append(token)
        assert grammar.mask(tokens)[EOS >> 3] >> (EOS & 7) & 1
    for wrong in ("Well, ", "[1"):
        tokens = encode(wrong)
        assert grammar.advance(tokens) is None and grammar.error is not None, "free text is neither"
    assert tool_grammar(FORMATS[name], [CLOCK], "auto", answer=GrammarSpec.ebnf('start: "a"')) is None


def test_the_cases_of_the_figures_can_be_written(compiler: GrammarCompiler) -> None:
    """`python -m tests.cpu.grammar_figures` runs by hand only; its functions and schemas must stay usable."""
    found = cases()
    kinds = Counter(kind for kind, *_ in found)
    assert kinds["functions"] >= 20 and kinds["schemas"] >= 40
    for _, _, spec, _, _ in found:
        grammar = compiler.compile(spec)
        assert grammar.error is None and any(grammar.mask([]))
