"""What clients of vLLM, llama.cpp and OpenAI's older API send: taken where it has one meaning, else refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import KEY, Started, start, stub_command
from tests.e2e.test_bad_input import check_error
from tests.e2e.test_security import client_of

CHAT, COMPLETE, RESPOND = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = {"role": "user", "content": "hi"}
F = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.fixture(scope="module")
def http(stub: Started) -> Iterator[Any]:
    with client_of(stub, KEY) as client:
        yield client


def chat(http: Any, text: str = "hi", **fields: Any) -> dict[str, Any]:
    reply = http.post(CHAT, json={"messages": [{"role": "user", "content": text}], **fields})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": -1},
        {"max_tokens": -1},
        {"max_completion_tokens": -1},
        {"stop": ""},
        {"repeat_penalty": 1.1},
        {"include_stop_str_in_output": True},
        {"cache_prompt": True},
        {"verbosity": "medium"},
        {"cache_control": {"type": "ephemeral"}},
    ],
)
def test_spellings_with_one_meaning(http: Any, fields: dict[str, Any]) -> None:
    assert chat(http, **fields)["choices"][0]["message"]["content"] == "hi"


@pytest.mark.parametrize(
    "path,fields,code,param",
    [
        (CHAT, {"top_k": -2}, "invalid_parameter", "top_k"),
        (CHAT, {"max_tokens": -2}, "invalid_parameter", "max_tokens"),
        (CHAT, {"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "invalid_value", "repeat_penalty"),
        (CHAT, {"cache_prompt": False}, "invalid_value", "cache_prompt"),
        (CHAT, {"guided_json": "{", "messages": [USER]}, "invalid_schema", "guided_json"),
        (CHAT, {"guided_regex": "a", "guided_choice": ["a"]}, "invalid_value", "guided_regex"),
        (CHAT, {"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "invalid_value", "guided_regex"),
        (CHAT, {"guided_regex": "a", "response_format": {"type": "json_object"}}, "invalid_value", "guided_regex"),
        (CHAT, {"guided_decoding_backend": "x"}, "unknown_field", "guided_decoding_backend"),
        (CHAT, {"mirostat": 2}, "unknown_field", "mirostat"),
        (CHAT, {"functions": [F], "tools": []}, "invalid_value", "functions"),
        (CHAT, {"functions": [F], "function_call": "auto", "tool_choice": "auto"}, "invalid_value", "function_call"),
        (CHAT, {"verbosity": "low"}, "unsupported_parameter", "verbosity"),
        (CHAT, {"verbosity": "loud"}, "invalid_value", "verbosity"),
        (CHAT, {"chat_template_kwargs": {"tools": []}}, "invalid_value", "chat_template_kwargs"),
        (RESPOND, {"include": ["file_search_call.results"]}, "unsupported_parameter", "include[0]"),
        (RESPOND, {"max_tool_calls": 0}, "invalid_value", "max_tool_calls"),
        (RESPOND, {"text": {"verbosity": "high"}}, "unsupported_parameter", "text.verbosity"),
        (COMPLETE, {"prompt": "a", "suffix": "b"}, "unsupported_parameter", "suffix"),
        (COMPLETE, {"prompt": ["a"], "suffix": "b"}, "invalid_value", "prompt"),
        ("/infill", {"input_prefix": "a"}, "unsupported_parameter", "suffix"),
        ("/infill", {"input_suffix": "a"}, "missing_field", "input_prefix"),
    ],
)
def test_what_is_refused_by_name(http: Any, path: str, fields: dict[str, Any], code: str, param: str) -> None:
    body = {"messages": [USER]} if path == CHAT else {"input": "hi"} if path == RESPOND else {}
    check_error(http.post(path, json={**body, **fields}), 400, code, param)


def test_guided_output_is_checked_like_structured_output(http: Any) -> None:
    """The stub's device ignores masks, so what is seen here is that a grammar is asked for: a wrong one is refused."""
    for fields, param in (
        ({"guided_json": {"type": "no-such-type"}}, "guided_json"),
        ({"guided_json": json.dumps({"type": "no-such-type"})}, "guided_json"),
        ({"json_schema": {"type": "no-such-type"}}, "json_schema"),
        ({"response_format": {"type": "json_object", "schema": {"type": "no-such-type"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "schema": {"type": "no-such-type"}}}, "response_format"),
    ):
        check_error(http.post(CHAT, json={"messages": [USER], **fields}), 400, "invalid_schema", param)
        check_error(http.post(COMPLETE, json={"prompt": "a", **fields}), 400, "invalid_schema", param)


def test_functions_of_the_older_api(http: Any) -> None:
    said = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    whole = chat(http, said, functions=[F], function_call="auto")["choices"][0]
    assert whole["finish_reason"] == "function_call" and "tool_calls" not in whole["message"]
    assert whole["message"]["function_call"]["name"] == "f"
    assert json.loads(whole["message"]["function_call"]["arguments"]) == {"a": 1}
    reply = http.post(CHAT, json={"messages": [{**USER, "content": said}], "functions": [F], "stream": True})
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"].get("function_call", {}) for chunk in chunks]
    assert [delta["name"] for delta in deltas if "name" in delta] == ["f"]
    assert json.loads("".join(delta.get("arguments", "") for delta in deltas)) == {"a": 1}
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"
    old = [USER, whole["message"], {"role": "function", "name": "f", "content": "2"}]
    call = {"id": "call_1", "type": "function", "function": whole["message"]["function_call"]}
    new = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "f", "content": "2", "tool_call_id": "call_1"},
    ]
    tools = [{"type": "function", "function": F}]
    shown = [
        http.post("/v1/chat/render", json={"messages": messages, "tools": tools}).json() for messages in (old, new)
    ]
    assert shown[0] == shown[1] and '"a": 1' in shown[0]["prompt"], shown


def test_cache_control_anywhere_changes_nothing(http: Any) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    marked = {
        "messages": [{**USER, **mark, "content": [{"type": "text", "text": "hi", **mark}]}],
        "tools": [{"type": "function", "function": {**F, **mark}, **mark}],
    }
    plain = {"messages": [USER], "tools": [{"type": "function", "function": F}]}
    assert http.post("/render", json=marked).json() == http.post("/v1/chat/render", json=plain).json()


def test_token_ids_are_returned(http: Any) -> None:
    text = "one two three"
    prompt = http.post("/render", json={"messages": [{"role": "user", "content": text}]}).json()["tokens"]
    whole = chat(http, text, return_token_ids=True)
    ids = whole["choices"][0]["token_ids"]
    assert whole["prompt_token_ids"] == prompt
    assert http.post("/detokenize", json={"tokens": ids, "skip_special_tokens": True}).json()["prompt"] == text
    body = {"messages": [{"role": "user", "content": text}], "return_token_ids": True, "stream": True}
    lines = http.post(CHAT, json=body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())] == ids
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [prompt]
    body = {"prompt": text, "max_tokens": 3, "return_token_ids": True}
    choice = http.post(COMPLETE, json=body).json()["choices"][0]
    assert len(choice["token_ids"]) == 3 and len(choice["prompt_token_ids"]) >= 3
    lines = http.post(COMPLETE, json={**body, "stream": True}).text.splitlines()
    parts = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert [token for part in parts for token in part.get("token_ids", ())] == choice["token_ids"]
    assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [choice["prompt_token_ids"]]


def test_a_full_context_drops_the_oldest_turns(http: Any) -> None:
    old = [
        {"role": role, "content": f"{number} " + "word " * 150} for number in range(8) for role in ("user", "assistant")
    ]
    messages = [{"role": "system", "content": "Be kind."}, *old, {"role": "user", "content": "the last"}]
    body = {"messages": messages, "max_tokens": 64}
    check_error(http.post(CHAT, json=body), 400, "context_length_exceeded", "messages")
    reply = http.post(CHAT, json={**body, "truncation": "auto", "return_token_ids": True}).json()
    dropped = reply["usage"]["dropped_messages"]
    assert reply["choices"][0]["message"]["content"] == "the last"
    assert 0 < dropped < 16 and dropped % 2 == 0, "turns are dropped whole"
    kept = [messages[0], *messages[1 + dropped :]]
    shown = http.post("/render", json={"messages": kept}).json()
    assert shown["tokens"] == reply["prompt_token_ids"] and shown["count"] <= 2048 - 64
    more = http.post("/render", json={"messages": [messages[0], *messages[dropped - 1 :]]}).json()
    assert more["count"] > 2047 - 64, "no more are dropped than must be"
    items = {"input": messages[1:], "instructions": "Be kind.", "max_output_tokens": 64, "truncation": "auto"}
    assert http.post(RESPOND, json=items).json()["usage"]["dropped_messages"] == dropped
    long = [{"role": "user", "content": "word " * 3000}]
    one = http.post(CHAT, json={"messages": [*old[:2], *long], "truncation": "auto"})
    check_error(one, 400, "context_length_exceeded", "messages")
    assert "dropped_messages" not in chat(http, truncation="auto")["usage"]


def test_include_adds_what_it_says(http: Any) -> None:
    names = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    plain = http.post(RESPOND, json={"input": "hi"}).json()
    assert plain["output"][0]["content"][0]["logprobs"] == []
    reply = http.post(RESPOND, json={"input": "hi", "include": names, "max_tool_calls": 3}).json()
    assert reply["output"][0]["content"][0]["logprobs"] and reply["max_tool_calls"] == 3


@pytest.fixture(scope="module")
def lenient(model_here: None) -> Iterator[Any]:
    started = start(stub_command("--lenient", "--max-model-len", "512"))
    with client_of(started, None) as client:
        yield client
    started.stop()


def test_lenient_ignores_unknown_fields_and_says_which(lenient: Any) -> None:
    body = {"messages": [{**USER, "mood": 1}], "mirostat": 2, "stream_options": {"odd": 1}, "stream": True}
    reply = lenient.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-quire-ignored"] == "messages[0].mood, mirostat, stream_options.odd"
    assert "x-quire-ignored" not in lenient.post(CHAT, json={"messages": [USER]}).headers
    check_error(lenient.post(CHAT, json={"messages": [USER], "top_k": "5", "x": 1}), 400, "invalid_value", "top_k")
    large = {"input": ["word"] * 9000, "mirostat": 1}  # read by a worker
    check_error(lenient.post("/v1/embeddings", json=large), 400, "invalid_parameter", "input")
    check_error(
        lenient.post(CHAT, json={"messages": [{"role": "king\r\nx: y"}], "a\r\nb": 1}),
        400,
        "invalid_value",
        "messages[0].role",
    )
