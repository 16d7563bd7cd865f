"""Anthropic's own Python client against a server whose model repeats what the user said."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import KEY, Started, need
from tests.e2e.test_bad_input import check_error
from tests.e2e.test_openai import CALL

HELLO = [{"role": "user", "content": "Hello there, parrot!"}]
TOOLS = [{"name": "weather", "description": "The weather", "input_schema": {"type": "object", "properties": {}}}]


@pytest.fixture(scope="module")
def client(stub: Started):  # type: ignore[no-untyped-def]
    need("anthropic")
    from anthropic import Anthropic

    return Anthropic(base_url=stub.url, api_key=KEY, max_retries=0, timeout=30)


def test_message(client) -> None:
    reply = client.messages.create(model="claude-parrot", max_tokens=50, messages=HELLO, system="Repeat.")
    assert (reply.type, reply.role, reply.model, reply.stop_reason) == (
        "message",
        "assistant",
        "claude-parrot",
        "end_turn",
    )
    assert [block.type for block in reply.content] == ["text"] and reply.content[0].text == HELLO[0]["content"]
    assert reply.usage.input_tokens > 0 and reply.usage.output_tokens > 3


def test_stream_events_come_in_order(client) -> None:
    kinds: list[str] = []
    with client.messages.stream(model="parrot", max_tokens=50, messages=HELLO) as stream:
        for event in stream:
            if event.type in ("text", "input_json"):
                continue  # made up by the client
            if not (kinds and kinds[-1] == event.type == "content_block_delta"):
                kinds.append(event.type)
        final = stream.get_final_message()
    assert [kind for kind in kinds if kind != "ping"] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert final.content[0].text == HELLO[0]["content"] and final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 3


def test_stop_sequence_and_max_tokens(client) -> None:
    reply = client.messages.create(model="parrot", max_tokens=50, messages=HELLO, stop_sequences=[", par", "zzz"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", ", par")
    assert reply.content[0].text == "Hello there"
    reply = client.messages.create(model="parrot", max_tokens=2, messages=HELLO)
    assert (reply.stop_reason, reply.content[0].text) == ("max_tokens", "Hello there")


def test_tool_use_whole_and_streamed(client) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Let me see. " + CALL}]}]
    reply = client.messages.create(model="parrot", max_tokens=99, messages=messages, tools=TOOLS)
    assert reply.stop_reason == "tool_use" and [block.type for block in reply.content] == ["text", "tool_use"]
    assert reply.content[1].name == "weather" and reply.content[1].input == {"city": "Bern", "days": 2}
    with client.messages.stream(model="parrot", max_tokens=99, messages=messages, tools=TOOLS) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(pieces) > 3 and json.loads("".join(pieces)) == final.content[1].input == {"city": "Bern", "days": 2}


def test_tool_results_thinking_and_prefill(client) -> None:
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hmm", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "Thanks, and now?"},
            ],
        },
    ]
    reply = client.messages.create(model="parrot", max_tokens=50, messages=messages, tools=TOOLS)
    assert reply.content[0].text == "Thanks, and now?"
    begun = [*HELLO, {"role": "assistant", "content": "I was about"}]
    assert client.messages.create(model="parrot", max_tokens=3, messages=begun).usage.output_tokens == 3


def test_count_tokens_is_what_the_message_takes(client) -> None:
    counted = client.messages.count_tokens(model="parrot", messages=HELLO, system="Be brief.", tools=TOOLS)
    reply = client.messages.create(model="parrot", max_tokens=1, messages=HELLO, system="Be brief.", tools=TOOLS)
    assert counted.input_tokens == reply.usage.input_tokens + reply.usage.cache_read_input_tokens


def test_volatile_header_lines_do_not_break_the_prefix_cache(client) -> None:
    for number in range(2):
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.{number}; cch={number}abc;"},
            {"type": "text", "text": "You are a careful assistant. " * 20},
        ]
        reply = client.messages.create(model="parrot", max_tokens=1, messages=HELLO, system=system)
    assert reply.usage.cache_read_input_tokens > 50


def test_errors_have_anthropics_shape(client, stub: Started) -> None:
    import anthropic
    import httpx

    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="parrot", max_tokens=5, messages=HELLO, extra_body={"temperature": -1})
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude-9", max_tokens=5, messages=HELLO)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    with pytest.raises(anthropic.BadRequestError, match="text only"):
        client.messages.create(model="parrot", max_tokens=5, messages=[{"role": "user", "content": [image]}])
    with httpx.Client(base_url=stub.url, headers={"x-api-key": KEY}, timeout=30) as http:
        check_error(http.post("/v1/messages", json={"messages": HELLO}), 400, "missing_field", "max_tokens")
        reply = http.get("/v1/messages")
        check_error(reply, 405, "method_not_allowed")
        assert reply.json()["type"] == "error" and reply.json()["request_id"] == reply.headers["request-id"]
        check_error(http.post("/v1/messages", json={}, headers={"x-api-key": "no"}), 401, "invalid_api_key")
