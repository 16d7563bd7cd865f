"""A text that is cut in mid-course, by a limit of tokens or a stop string: a call's beginning never shows as text."""

from __future__ import annotations

import pytest

from quire.text.channels import (
    FORMATS,
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallEnd,
    make_channel_parser,
    merge,
)
from tests.pure.test_channels_cases import DS, TOOLS
from tests.pure.test_channels_parse import calls, text_of

TWO_IN_JSON = (
    '{"name": "get_weather", "arguments": {"city": "Aix \\"en\\" <b>"}}, {"name": "clock.now", "arguments": {}}'
)
# Two calls as each format's grammar writes them; where a call is marked, text before it.
TWO_CALLS = {
    "hermes": "I look.\n<tool_call>\n"
    + TWO_IN_JSON.replace("}, {", "}\n</tool_call>\n<tool_call>\n{")
    + "\n</tool_call>",
    "qwen3_coder": "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nAix\n</parameter>\n"
    "<parameter=days>\n12\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=clock.now>\n</function>\n</tool_call>",
    "llama3": TWO_IN_JSON.replace("}, {", "}; {").replace("arguments", "parameters"),
    "mistral": 'I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Aix"}[TOOL_CALLS]clock.now[ARGS]{}',
    "mistral_list": f"I look.[TOOL_CALLS][{TWO_IN_JSON}]",
    "deepseek": 'I look.{all}{call}get_weather{sep}{{"city": "Aix"}}{stop}{call}clock.now{sep}{{}}{stop}{end}'.format(
        **DS
    ),
    "deepseek_fenced": '{all}{call}function{sep}get_weather\n```json\n{{"city": "Aix"}}\n```{stop}'
    "{call}function{sep}clock.now\n```json\n{{}}\n```{stop}{end}".format(**DS),
    "json": f"[{TWO_IN_JSON}]",
    "harmony": '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Aix"}<|call|>'
    "<|start|>assistant<|channel|>commentary to=functions.clock.now <|constrain|>json<|message|>{}<|call|>",
    "gemma4": 'I look.<|tool_call>call:get_weather{city:<|"|>Aix<|"|>,days:12}<tool_call|>'
    "<|tool_call>call:clock.now{}<tool_call|>",
    "pythonic": "I look.<|tool_call_start|>[get_weather(city='Aix', days=12), clock.now()]<|tool_call_end|>",
    "functionary": 'get_weather\n{"city": "Aix"}>>>clock.now\n{}',
    "granite": f"I look.<|tool_call|>[{TWO_IN_JSON}]",
}
LOOSE = {
    "hermes": f"<tool_call>{TWO_IN_JSON}</tool_call>",
    "llama3": TWO_IN_JSON.replace("arguments", "parameters"),
    "json": TWO_IN_JSON,
}


def parse(name: str, text: str, *, must_call: bool = False, cut: bool = False, reasoning: bool = False) -> list[Event]:
    parser = make_channel_parser(name, tools=TOOLS, must_call=must_call, reasoning=reasoning)
    return merge(parser.push(text) + parser.finish(cut=cut))


def ends(events: list[Event]) -> list[bool]:
    return [event.is_whole for event in events if isinstance(event, ToolCallEnd)]


def test_every_format_is_here() -> None:
    assert set(TWO_CALLS) == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_cut_anywhere(name: str) -> None:
    """What shows is a beginning of what the whole text shows, and a call with broken arguments says so."""
    text = TWO_CALLS[name]
    whole = parse(name, text)
    names = ["get_weather", "clock.now"]
    assert [call[0] for call in calls(whole)] == names and ends(whole) == [True, True]
    lead = text_of(whole)
    for at in range(1, len(text)):
        events = parse(name, text[:at], must_call=not lead, cut=True)
        found = calls(events)
        shown = text_of(events).rstrip()
        assert lead.startswith(shown), (at, text[:at], events)
        assert [call[0] for call in found] == names[: len(found)], (at, text[:at])
        for (_, arguments), (_, all_of_it), is_whole in zip(found, calls(whole), ends(events), strict=False):
            assert is_whole == (arguments == all_of_it), (text[:at], arguments)
            assert is_whole or _begins(arguments, all_of_it), (text[:at], arguments)


def _begins(arguments: str, whole: str) -> bool:
    """A line break before a marker can't be told from the value."""
    return whole.startswith(arguments.removesuffix("\\n"))


@pytest.mark.parametrize("name", LOOSE)
def test_what_stands_between_calls_is_no_text(name: str) -> None:
    events = parse(name, LOOSE[name])
    assert [call[0] for call in calls(events)] == ["get_weather", "clock.now"] and text_of(events) == ""
    for at in range(len(LOOSE[name]) // 2, len(LOOSE[name])):
        assert text_of(parse(name, LOOSE[name][:at], cut=True)) == "", LOOSE[name][:at]


def test_a_name_that_is_whole_makes_a_call_without_arguments() -> None:
    texts = {
        "hermes": '<tool_call>{"name": "get_weather"',
        "json": '{"name": "get_weather", "arg',
        "mistral": "[TOOL_CALLS]get_weather[ARGS]",
        "llama3": '{"name": "get_weather", ',
    }
    for name, text in texts.items():
        events = parse(name, text, cut=True)
        assert calls(events) == [("get_weather", "")] and ends(events) == [False] and text_of(events) == "", name


def test_arguments_in_a_string_go_as_far_as_they_came() -> None:
    text = '<tool_call>{"name": "a", "arguments": "{\\"city\\": \\"A\\u00e9\\u00'
    assert calls(parse("hermes", text, cut=True)) == [("a", '{"city": "Aé')]


def test_without_a_cut_nothing_is_dropped() -> None:
    for text in ('<tool_call>{"na', "a <tool_c", '<tool_call>{"name": "a"', "x <"):
        assert parse("hermes", text) == [TextDelta(text)]


def test_text_that_is_no_call_stays_text() -> None:
    assert parse("hermes", "1 < 2", cut=True) == [TextDelta("1 < 2")]
    assert parse("json", '{"na', cut=True) == [TextDelta('{"na')]
    assert parse("json", '{"na', cut=True, must_call=True) == []
    assert parse("json", '{"name": "somebody", "age": 3', cut=True) == [TextDelta('{"name": "somebody", "age": 3')]
    assert parse("none", "a <tool_call>", cut=True) == [TextDelta("a <tool_call>")]
    assert parse("hermes", "<think>a </thi", cut=True, reasoning=True) == [ReasoningDelta("a")]
