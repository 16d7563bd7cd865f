"""Tool calls in the formats of real templates, damaged as small models damage them: repaired, or told to the model."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from quire.agent.engines.seam import ModelAnswer, ModelCall
from quire.agent.repair.reading import CallReading, read_answer
from quire.agent.tools.toolbox import Toolbox, built_in_tools
from quire.text.channels import ToolSpec, make_channel_parser
from quire.text.conversation import AssistantMessage
from tests.pure.malformed_calls import CALLS, FORMATS, MalformedCase, Meant, malformed_cases

TOOLS = Toolbox(built_in_tools()).schemas()
CASES = list(malformed_cases())
SPECS = tuple(ToolSpec(tool["function"]["name"], tool["function"]["parameters"]) for tool in TOOLS)
# Which of our parsers reads a format; the others' text reaches the agent as it is.
OWN_PARSERS = {
    "hermes": "hermes",
    "qwen coder": "qwen3_coder",
    "bare parameters": "llama3",
    "python tag": "llama3",
    "mistral list": "mistral_list",
    "mistral": "mistral",
    "deepseek": "deepseek",
    "deepseek fenced": "deepseek_fenced",
    "harmony": "harmony",
    "pythonic": "pythonic",
    "functionary": "functionary",
    "granite": "granite",
    "bare": "json",
}


def got(reading: CallReading) -> tuple[Meant, ...]:
    return tuple((call.name, call.arguments) for call in reading.calls)


def judge(case: MalformedCase, answer: ModelAnswer) -> str:
    reading = read_answer(answer, TOOLS)
    calls = got(reading)
    assert not (reading.problem and calls)
    if calls:
        return "right" if calls == (case.meant or ())[: len(calls)] else "wrong"  # the model sees what ran, and goes on
    return "reported" if reading.problem else "silent"


def parsed(case: MalformedCase, parser: str) -> ModelAnswer:
    """What our own server or engine makes of the text."""
    channel, message = make_channel_parser(parser, tools=SPECS), AssistantMessage()
    message.add(channel.push(case.text))
    message.add(channel.finish(cut=False))
    calls = [ModelCall(call.name, call.arguments, call.id, call.is_complete) for call in message.tool_calls]
    return ModelAnswer(message.content, message.reasoning, calls)


def check(judged: dict[str, str]) -> None:
    wrong = [name for name, verdict in judged.items() if verdict == "wrong"]
    assert not wrong, f"{len(wrong)} wrong calls would run: {wrong[:20]}"
    damaged = {name: verdict for name, verdict in judged.items() if "prose alone" not in name}
    silent = [name for name, verdict in damaged.items() if verdict == "silent"]
    assert len(silent) <= 0.05 * len(damaged), f"{len(silent)} of {len(damaged)} were taken for text: {silent[:20]}"


def test_text_with_a_damaged_call_is_repaired_or_reported() -> None:
    judged = {case.name: judge(case, ModelAnswer(case.text)) for case in CASES}
    assert len(judged) == len(CASES) >= 500
    check(judged)
    counts = Counter(judged.values())
    print(counts)
    assert counts["right"] > 1500  # it repairs, and does not only refuse
    for form in FORMATS:
        for meant in CALLS:
            assert judged[f"{form}: well formed: {meant[0]}"] == "right", form


def test_what_our_own_parsers_make_of_a_damaged_call() -> None:
    cases = [case for case in CASES if case.form in OWN_PARSERS]
    assert len(cases) >= 500
    check({case.name: judge(case, parsed(case, OWN_PARSERS[case.form])) for case in cases})


def test_an_answer_that_was_cut_runs_no_call_of_it() -> None:
    """The server says that the answer ended at its limit: then even a call that looks whole may have been longer."""
    for case in CASES:
        if ": cut at" in case.name:
            assert judge(case, ModelAnswer(case.text, finish_reason="length")) in ("reported", "silent"), case.name


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"command": "ls"}', {"command": "ls"}),
        ("{'command': 'ls',}", {"command": "ls"}),
        ('"{\\"command\\": \\"ls\\"}"', {"command": "ls"}),
        ('{"command": "ls"', None),
        ('{"command": "ls", "timeout": "5"}', {"command": "ls", "timeout": 5}),
        ('{"command": "ls", ', None),
        ('{"command": "rm -rf build', None),
        ('{"command": "say "hi""}', None),
        ('{"command": ["ls"]}', None),
        ("", None),
        ("ls", None),
    ],
)
def test_arguments_of_a_call_that_a_server_has_read(arguments: str, expected: dict[str, Any] | None) -> None:
    reading = read_answer(ModelAnswer(calls=[ModelCall("shell", arguments, "c0")]), TOOLS)
    assert got(reading) == (() if expected is None else (("shell", expected),))
    assert bool(reading.problem) is (expected is None)


def test_answers_that_are_no_calls_stay_text() -> None:
    for text in (
        'Use `shell` with {"command": ...} for that.',
        '```json\n{"name": "Ada", "age": 36}\n```',
        json.dumps({"name": "quire", "version": "0.1.0"}),
        "def read_file(path):\n    return open(path).read()",
        "search(pattern) looks for a pattern.",
        "The file holds:\n\n```\nshell: bash\n```\n",
    ):
        reading = read_answer(ModelAnswer(text), TOOLS)
        assert not reading.calls and not reading.problem, text
