"""OpenAI's Responses API through OpenAI's own client: create, stream, go on, get, delete, input items."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import KEY, Started, need
from tests.e2e.test_openai import CALL

TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}]


@pytest.fixture(scope="module")
def client(stub: Started):  # type: ignore[no-untyped-def]
    need("openai")
    from openai import OpenAI

    return OpenAI(base_url=f"{stub.url}/v1", api_key=KEY, max_retries=0, timeout=30)


def test_create_get_items_delete(client) -> None:
    import openai

    reply = client.responses.create(model="parrot", input="Hello there!", instructions="Repeat.", metadata={"a": "b"})
    assert reply.status == "completed" and reply.output_text == "Hello there!" and reply.error is None
    assert reply.usage.output_tokens > 2 and reply.usage.total_tokens > reply.usage.output_tokens
    again = client.responses.retrieve(reply.id)
    assert again.output_text == reply.output_text and again.metadata == {"a": "b"}
    items = client.responses.input_items.list(reply.id).data
    assert [item.content[0].text for item in items] == ["Hello there!"]
    client.responses.delete(reply.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(reply.id)


def test_events_come_in_the_full_order(client) -> None:
    events = list(client.responses.create(model="parrot", input="Hello there!", stream=True))
    kinds = [event.type for event in events]
    assert [kind for kind, last in zip(kinds, [None, *kinds], strict=False) if kind != last] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 2 and "".join(deltas) == events[-1].response.output_text == "Hello there!"
    assert client.responses.retrieve(events[-1].response.id).output_text == "Hello there!"


def test_a_conversation_goes_on_from_a_stored_response(client) -> None:
    import openai

    first = client.responses.create(model="parrot", input="My name is Polly.")
    second = client.responses.create(model="parrot", input="And yours?", previous_response_id=first.id)
    assert second.output_text == "And yours?" and second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    third = client.responses.create(model="parrot", input="x", previous_response_id=second.id, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="parrot", input="x", previous_response_id=third.id)


def test_length_makes_it_incomplete(client) -> None:
    reply = client.responses.create(model="parrot", input="one two three four", max_output_tokens=2)
    assert reply.status == "incomplete" and reply.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(model="parrot", input="one two three", max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete"
    done = next(event for event in events if event.type == "response.output_item.done")
    assert done.item.status == events[-1].response.output[0].status == reply.output[0].status == "incomplete"
    said = "Let me see. " + CALL + " and on and on"
    whole = client.responses.create(model="parrot", input=said, tools=TOOLS).usage.output_tokens
    reply = client.responses.create(model="parrot", input=said, tools=TOOLS, max_output_tokens=whole - 3)
    assert reply.status == "incomplete", "what was complete before the end stays so"
    assert [item.status for item in reply.output] == ["completed", "completed", "incomplete"], reply.output


def test_the_parameters_in_force_are_told(client) -> None:
    """Of what is left out the model's own defaults, not the API's."""
    told = [client.responses.create(model="parrot", input="x", **given) for given in ({}, {"temperature": 0.5})]
    assert [reply.temperature for reply in told] == [1.0, 0.5]
    assert [reply.top_p for reply in told] == [0.95, 0.95]


def test_function_calls_and_their_results(client) -> None:
    reply = client.responses.create(model="parrot", input="Let me see. " + CALL, tools=TOOLS)
    assert [item.type for item in reply.output] == ["message", "function_call"]
    call = reply.output[1]
    assert call.name == "weather" and json.loads(call.arguments) == {"city": "Bern", "days": 2}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    more = client.responses.create(
        model="parrot",
        input=[result, {"role": "user", "content": [{"type": "input_text", "text": "Thanks!"}]}],
        previous_response_id=reply.id,
        tools=TOOLS,
    )
    assert more.output_text == "Thanks!"
    events = list(client.responses.create(model="parrot", input=CALL, tools=TOOLS, stream=True))
    kinds = [event.type for event in events]
    assert "response.function_call_arguments.delta" in kinds and "response.content_part.added" not in kinds
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert json.loads(done.arguments) == {"city": "Bern", "days": 2}


def test_the_output_goes_back_in_as_it_came(client) -> None:
    reply = client.responses.create(model="parrot", input="Let me see. " + CALL, tools=TOOLS)
    history = [item.model_dump(exclude_none=True) for item in reply.output]
    result = {"type": "function_call_output", "call_id": history[1]["call_id"], "output": "sunny"}
    user = {"role": "user", "content": "done"}
    assert client.responses.create(model="parrot", input=[*history, result, user]).output_text == "done"


def test_bad_input(client) -> None:
    import openai

    for fields, param in (
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="parrot", input="x", extra_body=fields)
        assert caught.value.body["param"] == param


def test_logprobs_come_with_the_deltas(client) -> None:
    events = list(client.responses.create(model="parrot", input="one two three", top_logprobs=1, stream=True))
    told = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    whole = events[-1].response.output[0].content[0].logprobs
    assert len(whole) == 4 and [entry.token for entry in told] == [entry.token for entry in whole[: len(told)]]
    assert len(told) >= 3


def test_functions_in_a_namespace(client) -> None:
    """As Codex sends them: the model knows a function by both names, the client gets them back as two."""
    space = {"type": "namespace", "name": "agents", "description": "Others.", "tools": TOOLS}
    said = CALL.replace('"weather"', '"agents.weather"')
    for streamed in (False, True):
        reply = client.responses.create(model="parrot", input=said, tools=[space, *TOOLS], stream=streamed)
        if streamed:
            events = list(reply)
            done = next(event for event in events if event.type == "response.function_call_arguments.done")
            assert done.name == "weather"
            reply = events[-1].response
        (call,) = reply.output
        assert (call.type, call.name, call.namespace) == ("function_call", "weather", "agents")
    back = [{"role": "user", "content": "x"}, call.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
            {"role": "user", "content": "Thanks."}]  # fmt: skip
    again = client.responses.create(model="parrot", input=back, tools=[space])
    assert again.output_text == "Thanks."
