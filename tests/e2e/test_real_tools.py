"""Tool calls that are enforced, by the real small model through both clients: it knows no tools, so whatever is right
about its calls is the grammar's doing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.conftest import KEY, Started, need

jsonschema = pytest.importorskip("jsonschema")

MODEL = "smollm2"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
FIND = {"type": "object", "properties": {"in": {"enum": ["France", "Italy"]}}, "required": ["in"],
        "additionalProperties": False}  # fmt: skip
CLOCK = {"type": "object", "properties": {"zone": {"type": "string", "pattern": "^[A-Z]{3}$"}}, "required": ["zone"],
         "additionalProperties": False}  # fmt: skip
SCHEMAS = {"find": FIND, "clock": CLOCK}


def tools_for(api: str, **options: Any) -> list[Any]:
    if api == "chat":
        return [{"type": "function", "function": {"name": name, "parameters": schema, **options}}
                for name, schema in SCHEMAS.items()]  # fmt: skip
    if api == "responses":
        return [{"type": "function", "name": name, "parameters": schema, **options} for name, schema in SCHEMAS.items()]
    return [{"name": name, "input_schema": schema, **options} for name, schema in SCHEMAS.items()]


def check(name: str, arguments: Any) -> None:
    jsonschema.validate(json.loads(arguments) if isinstance(arguments, str) else arguments, SCHEMAS[name])


@pytest.fixture(scope="module")
def openai(real: Started):  # type: ignore[no-untyped-def]
    need("openai")
    from openai import OpenAI

    return OpenAI(base_url=f"{real.url}/v1", api_key=KEY, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def anthropic(real: Started):  # type: ignore[no-untyped-def]
    need("anthropic")
    from anthropic import Anthropic

    return Anthropic(base_url=real.url, api_key=KEY, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def bias(real: Started) -> Callable[..., dict[str, float]]:
    import httpx

    def towards(*texts: str) -> dict[str, float]:
        bodies = [{"prompt": text, "add_special_tokens": False} for text in texts]
        replies = [httpx.post(f"{real.url}/tokenize", json=body, headers={"x-api-key": KEY}) for body in bodies]
        return {str(reply.json()["tokens"][0]): 100.0 for reply in replies}

    return towards


@pytest.fixture(scope="module")
def brace(bias: Callable[..., dict[str, float]]) -> dict[str, float]:
    """The model begins like a call: with `auto` it would rather talk."""
    return bias("{", '{"')


def chat(openai: Any, **options: Any) -> Any:
    kept: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 64, "temperature": 0}
    return openai.chat.completions.create(**{**kept, **options})


def test_a_named_tool(openai: Any) -> None:
    choice = {"type": "function", "function": {"name": "clock"}}
    reply = chat(openai, tools=tools_for("chat"), tool_choice=choice, parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in reply.message.tool_calls] == ["clock"]
    assert reply.finish_reason == "tool_calls" and reply.message.content is None
    check("clock", reply.message.tool_calls[0].function.arguments)


def test_a_named_tool_streamed(openai: Any) -> None:
    choice = {"type": "function", "function": {"name": "find"}}
    chunks = list(chat(openai, tools=tools_for("chat"), tool_choice=choice, parallel_tool_calls=False, stream=True))
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert parts[0].function.name == "find" and parts[0].id and len(parts) > 3, "arguments as they arrive"
    check("find", "".join(part.function.arguments or "" for part in parts))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_required_and_parallel(openai: Any, bias: Callable[..., dict[str, float]]) -> None:
    """Biased towards a list with commas, as a model would be that was asked for two things."""
    options = {"tools": tools_for("chat"), "tool_choice": "required", "max_tokens": 120, "logit_bias": bias("[", ",")}
    calls = chat(openai, **options).choices[0].message.tool_calls
    assert len(calls) >= 2 and len({call.id for call in calls}) == len(calls)
    for call in calls[:-1]:  # the last one may be cut short
        check(call.function.name, call.function.arguments)
    (call,) = chat(openai, **options, parallel_tool_calls=False).choices[0].message.tool_calls
    check(call.function.name, call.function.arguments)


def called_before(times: int = 3) -> list[dict[str, Any]]:
    """A conversation in which every question was answered by a call, which the small model then repeats."""
    arguments = json.dumps({"in": "France"})
    messages: list[dict[str, Any]] = []
    for index in range(times):
        call = {"id": f"call{index:05d}", "type": "function", "function": {"name": "find", "arguments": arguments}}
        messages += [
            *QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "Paris"},
            {"role": "assistant", "content": "Paris."},
        ]
    return [*messages, *QUESTION]


def test_strict_binds_the_arguments_where_calling_is_free(openai: Any) -> None:
    talk = chat(openai, tools=tools_for("chat", strict=True), max_tokens=12).choices[0]
    assert talk.message.tool_calls is None and talk.message.content, "it may still just answer"
    options: dict[str, Any] = {"messages": called_before(), "parallel_tool_calls": False}
    reply = chat(openai, tools=tools_for("chat", strict=True), **options).choices[0]
    (call,) = reply.message.tool_calls
    check(call.function.name, call.function.arguments)


def test_a_schema_and_tools_together(openai: Any, brace: dict[str, float]) -> None:
    schema = {"type": "object", "properties": {"big": {"type": "boolean"}}, "required": ["big"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = chat(openai, tools=tools_for("chat"), response_format=form, logit_bias=brace).choices[0]
    if reply.message.tool_calls:
        check(reply.message.tool_calls[0].function.name, reply.message.tool_calls[0].function.arguments)
    else:
        assert isinstance(json.loads(reply.message.content)["big"], bool)


def test_responses(openai: Any) -> None:
    tools = tools_for("responses", strict=True)
    reply = openai.responses.create(model=MODEL, input=QUESTION[0]["content"], tools=tools,
                                    tool_choice={"type": "function", "name": "find"}, max_output_tokens=64,
                                    temperature=0, store=False, parallel_tool_calls=False)  # fmt: skip
    (call,) = reply.output
    assert (call.type, call.name) == ("function_call", "find")
    check(call.name, call.arguments)


@pytest.mark.parametrize("choice,streamed", [({"type": "tool", "name": "find"}, True), ({"type": "any"}, False)])
def test_anthropics_choices(anthropic: Any, choice: dict[str, Any], streamed: bool) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    options: Any = {"model": MODEL, "max_tokens": 64, "messages": QUESTION, "tools": tools_for("messages"),
                    "tool_choice": choice, "extra_body": {"temperature": 0}}  # fmt: skip
    if streamed:
        with anthropic.messages.stream(**options) as stream:
            reply = stream.get_final_message()
    else:
        reply = anthropic.messages.create(**options)
    assert reply.stop_reason == "tool_use"
    (block,) = reply.content
    assert block.type == "tool_use" and block.name == choice.get("name", block.name)
    check(block.name, block.input)


def test_anthropics_strict_tools(anthropic: Any) -> None:
    history: list[Any] = []
    for index in range(3):
        use = {"type": "tool_use", "id": f"call{index:05d}", "name": "find", "input": {"in": "France"}}
        history += [
            *QUESTION,
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "Paris"}]},
            {"role": "assistant", "content": "Paris."},
        ]
    reply = anthropic.messages.create(model=MODEL, max_tokens=64, messages=[*history, *QUESTION],
                                      tools=tools_for("messages", strict=True),
                                      tool_choice={"type": "auto", "disable_parallel_tool_use": True},
                                      extra_body={"temperature": 0})  # fmt: skip
    (block,) = [block for block in reply.content if block.type == "tool_use"]
    check(block.name, block.input)


def test_a_required_call_that_is_cut_never_shows_as_text(openai, anthropic) -> None:  # type: ignore[no-untyped-def]
    for limit in (1, 3, 6, 9, 14):
        options: Any = {"model": MODEL, "messages": QUESTION, "extra_body": {"temperature": 0}}
        choice = openai.chat.completions.create(
            **options, tools=tools_for("chat"), tool_choice="required", max_tokens=limit
        ).choices[0]
        assert not choice.message.content, (limit, choice)
        message = anthropic.messages.create(
            **options, tools=tools_for("messages"), tool_choice={"type": "any"}, max_tokens=limit
        )
        assert {block.type for block in message.content} <= {"tool_use"}, (limit, message.content)
        if message.usage.output_tokens == limit:
            assert (choice.finish_reason, message.stop_reason) == ("length", "max_tokens"), limit
        reply = openai.responses.create(
            model=MODEL, input=QUESTION, temperature=0, tools=tools_for("responses"), tool_choice="required",
            max_output_tokens=limit,
        )  # fmt: skip
        assert {item.type for item in reply.output} <= {"function_call"}, (limit, reply.output)
        if reply.status == "incomplete" and reply.output:
            assert reply.output[0].status == "incomplete", reply.output
