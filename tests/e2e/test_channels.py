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


def beginnings(whole: Any) -> list[str]:
    """Every text that the JSON of `whole` begins with."""
    text = json.dumps(whole)
    return [text[:end] for end in range(len(text) + 1)]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_cut_by_the_limit_stays_a_call_in_chat(stub: Started, streamed: bool) -> None:
    """As OpenAI's API: finish_reason length, the arguments as far as they came, and no part of a marker as content."""
    seen = set()
    for limit in range(2, 60, 4):
        body = {"messages": USER, "tools": TOOLS, "max_tokens": limit, "stream": streamed}
        content, calls, reason = chat_reply(post(stub, "/v1/chat/completions", body), streamed)
        assert "I look.".startswith(content.strip()), (limit, content)
        assert reason == ("length" if len(calls) < 2 or calls[-1] not in map(json.dumps, CITIES) else reason)
        for arguments, city in zip(calls, CITIES, strict=False):
            assert arguments in beginnings(city), (limit, calls)
            seen.add(arguments)
    assert len(seen) > 2 and json.dumps(CITIES[0]) in seen, seen


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_cut_by_the_limit_is_an_incomplete_item_in_responses(stub: Started, streamed: bool) -> None:
    tools: Any = [{"type": "function", **TOOLS[0]["function"]}]
    statuses = set()
    for limit in range(18, 46, 3):
        body = {"input": SAID, "tools": tools, "max_output_tokens": limit, "stream": streamed}
        reply = post(stub, "/v1/responses", body)
        if streamed:
            events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
            done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
            answer = events[-1]["response"]
            assert [item["status"] for item in done] == [item["status"] for item in answer["output"]]
        else:
            answer = reply.json()
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        for item in calls:
            is_whole = item["arguments"] in map(json.dumps, CITIES)
            assert item["status"] == ("completed" if is_whole else "incomplete"), (limit, item)
            statuses.add(item["status"])
        text = "".join(item["content"][0]["text"] for item in answer["output"] if item["type"] == "message")
        assert "I look.".startswith(text.strip()), (limit, text)
    assert statuses == {"completed", "incomplete"}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_cut_by_the_limit_is_a_tool_use_block_in_messages(stub: Started, streamed: bool) -> None:
    tools = [{"name": "weather", "input_schema": TOOLS[0]["function"]["parameters"]}]
    seen = []
    for limit in range(16, 40, 3):
        body = {"messages": USER, "tools": tools, "max_tokens": limit, "stream": streamed}
        reply = post(stub, "/v1/messages", body)
        if streamed:
            events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
            texts = [event["delta"]["text"] for event in events if event.get("delta", {}).get("type") == "text_delta"]
            reason = next(event["delta"] for event in events if event["type"] == "message_delta")["stop_reason"]
        else:
            texts = [block["text"] for block in reply.json()["content"] if block["type"] == "text"]
            inputs = [block["input"] for block in reply.json()["content"] if block["type"] == "tool_use"]
            reason = reply.json()["stop_reason"]
            seen += [value["city"] for value in inputs if value]
            assert all(set(value) <= {"city"} for value in inputs), inputs
        assert reason == "max_tokens" and "I look.".startswith("".join(texts).strip()), (limit, texts, reason)
    assert streamed or {"", "Bern"} <= set(seen) | {""}, seen


def post(stub: Started, path: str, body: dict[str, Any]) -> Any:
    import httpx

    reply = httpx.post(stub.url + path, json={"model": "parrot", **body}, headers={"x-api-key": KEY}, timeout=30)
    assert reply.status_code == 200, reply.text
    return reply


def chat_reply(reply: Any, streamed: bool) -> tuple[str, list[str], str]:
    """The content, the arguments of each call, and the finish reason."""
    if not streamed:
        choice = reply.json()["choices"][0]
        calls = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())]
        return choice["message"]["content"] or "", calls, choice["finish_reason"]
    content, calls, reason = "", [], ""
    for line in reply.text.splitlines():
        if not line.startswith("data: {"):
            continue
        choice = json.loads(line[6:])["choices"][0]
        content += choice["delta"].get("content") or ""
        for part in choice["delta"].get("tool_calls", ()):
            calls += [""] if "id" in part else []
            calls[part["index"]] += part["function"].get("arguments", "")
        reason = choice["finish_reason"] or reason
    return content, calls, reason
