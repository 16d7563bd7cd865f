"""Reasoning, text and calls in one answer, the same in all three APIs, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.conftest import KEY, Started, need
from tests.e2e.test_openai import TOOLS

CALLS = "".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>\n'
    for city in ("Bern", "Rome")
)
SAID = f"<think>\nWhere is it?\n</think>\n\nI look. {CALLS}"
USER = [{"role": "user", "content": SAID}]
CITIES = [{"city": "Bern"}, {"city": "Rome"}]


@pytest.fixture(scope="module")
def client(stub: Started):  # type: ignore[no-untyped-def]
    need("openai")
    from openai import OpenAI

    return OpenAI(base_url=f"{stub.url}/v1", api_key=KEY, max_retries=0, timeout=30)


def test_the_format_was_read_off_the_template(client, stub: Started) -> None:
    import httpx

    reply = httpx.get(f"{stub.url}/v1/stats", headers={"x-api-key": KEY})
    assert reply.json()["model"]["tool_format"] == "hermes"


def test_chat(client) -> None:
    message = client.chat.completions.create(model="parrot", messages=USER, tools=TOOLS).choices[0].message
    assert message.reasoning_content.strip() == "Where is it?" and message.content == "I look."
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == CITIES
    assert len({call.id for call in message.tool_calls}) == 2


def test_chat_streamed(client) -> None:
    text, reasoning, calls = "", "", {}
    for chunk in client.chat.completions.create(model="parrot", messages=USER, tools=TOOLS, stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for part in delta.tool_calls or ():
            calls.setdefault(part.index, "")
            calls[part.index] += part.function.arguments or ""
    assert reasoning.strip() == "Where is it?" and text == "I look."
    assert [json.loads(arguments) for arguments in calls.values()] == CITIES


def test_reasoning_tokens_are_counted(client) -> None:
    said = [{"role": "user", "content": "<think>one two three</think>four"}]
    whole = client.chat.completions.create(model="parrot", messages=said)
    counted = whole.usage.completion_tokens_details.reasoning_tokens
    assert 1 <= counted < whole.usage.completion_tokens and whole.choices[0].message.content == "four"


@pytest.mark.parametrize("streamed", [False, True])
def test_responses(client, streamed: bool) -> None:
    tools: Any = [{"type": "function", **TOOLS[0]["function"]}]
    reply = client.responses.create(model="parrot", input=SAID, tools=tools, stream=streamed)
    if streamed:
        events = list(reply)
        kinds = [event.type for event in events]
        assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
        reply = events[-1].response
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call", "function_call"]
    assert reply.output[0].content[0].text.strip() == "Where is it?" and reply.output_text == "I look."
    assert [json.loads(item.arguments) for item in reply.output[2:]] == CITIES
    assert reply.usage.output_tokens_details.reasoning_tokens >= 1


@pytest.mark.parametrize("streamed", [False, True])
def test_messages(stub: Started, streamed: bool) -> None:
    need("anthropic")
    from anthropic import Anthropic

    client = Anthropic(base_url=stub.url, api_key=KEY, max_retries=0, timeout=30)
    tools = [{"name": "weather", "input_schema": TOOLS[0]["function"]["parameters"]}]
    options = {"model": "parrot", "max_tokens": 200, "messages": USER, "tools": tools, "thinking": {"type": "adaptive"}}
    if streamed:
        with client.messages.stream(**options) as stream:
            reply = stream.get_final_message()
    else:
        reply = client.messages.create(**options)
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert reply.content[0].thinking.strip() == "Where is it?" and reply.content[1].text == "I look."
    assert [block.input for block in reply.content[2:]] == CITIES and reply.stop_reason == "tool_use"
    back = [*USER, {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]}]
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"} for block in reply.content[2:]]
    back.append({"role": "user", "content": [*results, {"type": "text", "text": "Thanks."}]})
    again = client.messages.create(model="parrot", max_tokens=20, messages=back, tools=tools)
    assert again.content[0].text == "Thanks."
