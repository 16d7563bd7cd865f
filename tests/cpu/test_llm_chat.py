"""`LLM.chat` with tools: required calls are enforced, answers are split, wrong arguments are refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, GrammarSpec, QuireError, SamplingParams
from tests.cpu.tiny_llm import TEMPLATE, make_tiny_llm

KNOBS = {"dtype": "float32", "max_model_len": 400, "num_pages": 100, "max_rows": 8, "max_batch_tokens": 64}
WITH_TOOLS = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + TEMPLATE
HELLO = [{"role": "user", "content": "why"}]
UNITS = ["celsius", "kelvin"]


def tool(name: str, field: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {field: {"enum": UNITS}},
        "required": [field],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("get_weather", "unit"), tool("convert", "to")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llm(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), **KNOBS, chat_template=WITH_TOOLS)


def calls_of(output: Any) -> list[tuple[str, dict[str, Any]]]:
    """At least one complete call, whose arguments fit the schema, and no text. The token limit may cut the last one."""
    assert output.message is not None and output.message.content == "", output.text
    *_, last = output.message.tool_calls
    complete = [call for call in output.message.tool_calls if call.is_complete]
    assert complete and all(call.is_complete or call is last for call in output.message.tool_calls)
    assert last.is_complete or output.finish_reason == "length"
    for call in complete:
        assert call.id.startswith("call_")
        (value,) = json.loads(call.arguments).values()
        assert value in UNITS
    return [(call.name, json.loads(call.arguments)) for call in complete]


def test_required_and_named_calls_are_enforced(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=200)
    output = llm.chat(HELLO, params, tools=TOOLS[:1], tool_choice="required")[0]
    assert {name for name, _ in calls_of(output)} == {"get_weather"}
    assert '"get_weather"' in output.text, "the text stays as the model wrote it"
    outputs = llm.chat([HELLO, HELLO], [params, params], tools=TOOLS, tool_choice="convert")
    assert [{name for name, _ in calls_of(one)} for one in outputs] == [{"convert"}] * 2


def test_every_sample_has_its_message(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=200)
    output = llm.chat(HELLO, params, tools=TOOLS[:1], tool_choice="required")[0]
    assert [calls_of(sample)[0][0] for sample in output.samples] == ["get_weather"] * 3
    assert output.message is output.samples[0].message


def test_a_message_goes_back_into_the_conversation(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200)
    message = llm.chat(HELLO, params, tools=TOOLS[:1], tool_choice="required")[0].message
    assert message is not None
    answer = message.as_message()
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "cold"}
    again = llm.chat([*HELLO, answer, result], SamplingParams(max_tokens=4), tools=TOOLS)[0]
    assert "cold" in llm.tokenizer.decode(again.prompt_token_ids)


def test_an_answers_grammar_holds_beside_tools(llm: LLM) -> None:
    params = SamplingParams(max_tokens=100, seed=2, grammar=GrammarSpec.choice("sky", "light"))
    output = llm.chat(HELLO, params)[0]
    assert output.message is not None and output.message.content == output.text and output.text in ("sky", "light")


def test_wrong_arguments_are_refused(llm: LLM) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"tools": TOOLS, "tool_choice": "search"}, "tool_choice", "'search', which is not among the tools"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "of type dict"),
        ({"tools": [{"name": "bare"}]}, "tools", r"tools\[0\] has no function"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "same name"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools", "no object"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools[0].function.parameters",
         "type object"),
    ]  # fmt: skip
    for options, param, why in cases:
        with pytest.raises(QuireError, match=why) as caught:
            llm.chat(HELLO, SamplingParams(max_tokens=1), **options)
        assert caught.value.param == param and "\n" not in str(caught.value)
    broken = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    with pytest.raises(QuireError, match=r"messages\[1\] holds a tool call without"):
        llm.chat([*HELLO, broken], SamplingParams(max_tokens=1))


def test_async_chat_has_tools_too(folder: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(str(folder), **KNOBS, chat_template=WITH_TOOLS) as engine:
            params = SamplingParams(temperature=1.0, seed=4, max_tokens=200)
            output = await engine.chat(HELLO, params, tools=TOOLS, tool_choice="get_weather")
            assert calls_of(output)[0][1]["unit"] in UNITS

    asyncio.run(main())
