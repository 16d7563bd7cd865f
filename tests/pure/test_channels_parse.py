"""What each tool-call and reasoning format means, and what becomes of text that only looks like it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.text.channels import (
    FORMATS,
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    make_channel_parser,
    merge,
)
from quire.types import QuireError
from tests.pure.test_channels_cases import CASES, DS, TOOLS


def parse(name: str | None, text: str, **options: Any) -> list[Event]:
    parser = make_channel_parser(name, tools=TOOLS, **options)
    return merge(parser.push(text) + parser.finish())


def calls(events: list[Event]) -> list[tuple[str, Any]]:
    """(name, arguments) of every call; checks that starts, deltas and ends are in order."""
    found: list[tuple[str, Any]] = []
    open_index = None
    for event in events:
        if isinstance(event, ToolCallStart):
            assert open_index is None and event.index == len(found)
            open_index = event.index
            found.append((event.name, ""))
        elif isinstance(event, ToolCallDelta):
            assert event.index == open_index
            found[-1] = (found[-1][0], found[-1][1] + event.arguments)
        elif isinstance(event, ToolCallEnd):
            assert event.index == open_index
            open_index = None
    assert open_index is None
    return found


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def loaded(events: list[Event]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls(events)]


def test_hermes() -> None:
    events = parse("hermes", CASES["hermes"][2])
    assert events == [
        TextDelta("Let me look."),
        ToolCallStart(0, "get_weather"),
        ToolCallDelta(0, '{"city": "Aix", "n": [1, {"a": "}"}]}'),
        ToolCallEnd(0),
    ]
    events = parse("hermes", CASES["hermes"][3])
    assert loaded(events) == [("a", {}), ("b", {"x": '"<tool_call>'})]
    assert text_of(events) == "and done. "
    assert loaded(parse("hermes", CASES["hermes"][4])) == [("a", {}), ("b", {})]
    assert loaded(parse("hermes", CASES["hermes"][5])) == [("a", {"x": 1})]


def test_hermes_with_a_brace_missing_is_still_a_call() -> None:
    events = parse("hermes", CASES["hermes"][6])
    assert loaded(events) == [("a", {"x": 1})] and text_of(events) == "after"


@pytest.mark.parametrize("text", ["<tool_call> I would call", '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
                                  '<tool_call>{"na', '<tool_call>{"name": "a", "arguments": [1]}</tool_call>',
                                  "a \n<tool_call>", '<tool_call>{"name": "a", "name": "b"}'])  # fmt: skip
def test_hermes_malformed_calls_are_text(text: str) -> None:
    assert parse("hermes", text) == [TextDelta(text)]


def test_hermes_call_that_breaks_off_is_ended_and_the_rest_is_text() -> None:
    events = parse("hermes", '<tool_call>{"name": "a", "arguments": {"x": <oops>}}</tool_call> tail')
    assert calls(events) == [("a", '{"x": ')]
    assert text_of(events) == "<oops>}}</tool_call> tail"
    events = parse("hermes", '<tool_call>{"name": "a", "arguments": {"x": "never ends')
    assert calls(events) == [("a", '{"x": "never ends')]


def test_qwen3_coder_types_follow_the_schema() -> None:
    events = parse("qwen3_coder", CASES["qwen3_coder"][1])
    assert loaded(events) == [
        ("get_weather", {"city": 'Aix "en"\nProvence\n', "days": 3, "tags": ["a", "b"], "unit": None, "when": "soon",
                         "any": {"k": 1}, "other": "5"})
    ]  # fmt: skip
    assert text_of(events) == "Sure.Done."
    assert loaded(parse("qwen3_coder", CASES["qwen3_coder"][2])) == [
        ("clock.now", {}),
        ("get_weather", {"city": "Rome"}),
    ]
    assert loaded(parse("qwen3_coder", CASES["qwen3_coder"][3])) == [("get_weather", {"city": "a < b </param> c"})]


def test_qwen3_coder_broken() -> None:
    events = parse("qwen3_coder", CASES["qwen3_coder"][4])
    assert loaded(events) == [("get_weather", {"city": "A"})]
    assert text_of(events) == "what is this?</function></tool_call>"
    assert calls(parse("qwen3_coder", CASES["qwen3_coder"][6])) == [("get_weather", '{"days": 12')]
    for text in CASES["qwen3_coder"][7:]:
        assert parse("qwen3_coder", text) == [TextDelta(text)]


def test_llama3() -> None:
    case = CASES["llama3"]
    assert loaded(parse("llama3", case[1])) == [("get_weather", {"city": "Aix"})]
    assert loaded(parse("llama3", case[2])) == [("get_weather", {"city": "Aix"}), ("clock.now", {})]
    for text in (case[0], case[3], case[4], case[8], case[9], case[10]):
        assert parse("llama3", text) == [TextDelta(text)]
    events = parse("llama3", case[5])
    assert loaded(events) == [("clock.now", {})] and text_of(events) == "and words"
    assert loaded(parse("llama3", case[6])) == [("get_weather", {"city": "Aix"})]
    events = parse("llama3", case[7])
    assert loaded(events) == [("brave_search", {"query": 'rain "now"', "count": 3, "safe": True})]
    assert text_of(events) == "Searching"


def test_mistral() -> None:
    case = CASES["mistral"]
    assert loaded(parse("mistral", case[1])) == [("a", {"x": "]"}), ("b", {})]
    events = parse("mistral", case[2])
    assert loaded(events) == [("a", {})] and text_of(events) == "Text.after"
    assert loaded(parse("mistral", case[3])) == [("get_weather", {"city": "Aix"}), ("clock.now", {})]
    events = parse("mistral", case[4])
    assert loaded(events) == [("get_weather", {"city": {"a": [1]}})] and text_of(events) == "bye"
    assert loaded(parse("mistral", case[5])) == [("get_weather", {"city": "Aix"})]
    for text in (case[0], case[6], case[8]):
        assert parse("mistral", text) == [TextDelta(text)]
    events = parse("mistral", case[7])
    assert loaded(events) == [("a", {})] and text_of(events) == ", oops]"


def test_deepseek() -> None:
    case = CASES["deepseek"]
    events = parse("deepseek", case[1])
    assert loaded(events) == [("get_weather", {"city": "Aix"}), ("clock.now", {})] and text_of(events) == "Let me see."
    events = parse("deepseek", case[2])
    assert loaded(events) == [("get_weather", {"city": "`"}), ("clock.now", {})] and text_of(events) == "after"
    assert loaded(parse("deepseek", case[3])) == [("get_weather", {"a": 1})]
    for text in (case[0], case[4], case[5]):
        assert parse("deepseek", text) == [TextDelta(text)]
    events = parse("deepseek", case[6])
    assert loaded(events) == [("get_weather", {"a": 1})] and text_of(events) == f"garbage {DS['stop']}{DS['end']}"


def test_bare_json() -> None:
    case = CASES["json"]
    assert loaded(parse("json", case[1])) == [("get_weather", {"city": "Aix"})]
    assert loaded(parse("json", case[2])) == [("get_weather", {"city": "Aix"}), ("clock.now", {})]
    events = parse("json", case[3])
    assert loaded(events) == [("get_weather", {}), ("clock.now", {})]
    for text in (case[0], case[4], case[5], case[6], case[7]):
        assert parse("json", text) == [TextDelta(text)]


def test_reasoning() -> None:
    text = "<think>\nHm <b>.\n</think>\n\nYes."
    assert parse("hermes", text, reasoning=True) == [ReasoningDelta("Hm <b>."), TextDelta("Yes.")]
    assert parse(None, text, reasoning=True) == [ReasoningDelta("Hm <b>."), TextDelta("Yes.")]
    assert parse(None, text) == [TextDelta(text)]
    opened = text.removeprefix("<think>")
    assert parse("hermes", opened, reasoning=True, reasoning_open=True) == [
        ReasoningDelta("Hm <b>."),
        TextDelta("Yes."),
    ]
    assert parse("hermes", text, reasoning=True, reasoning_open=True)[0] == ReasoningDelta("Hm <b>.")
    assert parse("hermes", "Yes. <think>no</think>", reasoning=True) == [TextDelta("Yes. <think>no</think>")]
    assert parse("hermes", "<think>never", reasoning=True) == [ReasoningDelta("never")]
    assert parse("hermes", "\n\nYes", reasoning=True) == [TextDelta("\n\nYes")]


def test_calls_within_reasoning_are_reasoning_and_after_it_calls() -> None:
    text = '<think>a <tool_call>{"name": "a"}</tool_call></think><tool_call>{"name": "b", "arguments": {}}</tool_call>'
    events = parse("hermes", text, reasoning=True)
    assert events[0] == ReasoningDelta('a <tool_call>{"name": "a"}</tool_call>')
    assert loaded(events) == [("b", {})]


@pytest.mark.parametrize("name", [*FORMATS, "none"])
def test_no_visible_character_outside_calls_is_lost(name: str) -> None:
    """Text without a call comes back whole; a broken call's text is in the call or in the text."""
    for text in CASES[name]:
        events = parse(name, text)
        if not calls(events):
            assert text_of(events) == text


def test_pushing_nothing_and_after_the_end() -> None:
    parser = make_channel_parser("hermes")
    assert parser.push("") == [] and parser.finish() == [] and parser.finish() == []
    assert parser.push("late") == []


def test_unknown_format() -> None:
    with pytest.raises(QuireError, match="not known"):
        make_channel_parser("nonsense")
