"""Everything a client can get wrong: the right status, an error in the API's own shape, a request id, and no harm."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.e2e.conftest import ADMIN_KEY, KEY, Started, need

USER = {"role": "user", "content": "hi"}
CHAT, COMPLETE, CLAUDE = "/v1/chat/completions", "/v1/completions", "/v1/messages"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
WRONG_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
NAMED_G = {"type": "function", "function": {"name": "g"}}


@pytest.fixture(scope="module")
def http(stub: Started):  # type: ignore[no-untyped-def]
    need("httpx")
    import httpx

    with httpx.Client(base_url=stub.url, headers={"authorization": f"Bearer {KEY}"}, timeout=30) as client:
        yield client


def check_error(reply: Any, status: int, code: str, param: str | None = None) -> str:
    assert reply.status_code == status, reply.text
    assert reply.headers["x-request-id"] and reply.headers["content-type"].startswith("application/json")
    body = reply.json()
    assert "Traceback" not in reply.text and ".py" not in reply.text
    error = body["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert error["message"] and error["type"]
    return error["message"]


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], **fields}


CASES = [
    ("unknown field", CHAT, chat(temprature=1), 400, "unknown_field", "temprature"),
    ("wrong type", CHAT, chat(temperature="hot"), 400, "invalid_value", "temperature"),
    ("a number in quotes", CHAT, chat(max_tokens="5"), 400, "invalid_value", "max_tokens"),
    ("out of range", CHAT, chat(temperature=-1), 400, "invalid_parameter", "temperature"),
    ("no messages", CHAT, {"messages": []}, 400, "invalid_value", "messages"),
    ("messages missing", CHAT, {}, 400, "missing_field", "messages"),
    ("unknown role", CHAT, {"messages": [{"role": "king", "content": "x"}]}, 400, "invalid_value", "messages[0].role"),
    ("no content", CHAT, {"messages": [{"role": "user"}]}, 400, "missing_field", "messages[0].content"),
    ("an image", CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     400, "unsupported_content", "messages[0].content[0]"),
    ("an image for a response", "/v1/responses",
     {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 400, "unsupported_content",
     "input[0].content[0]"),
    ("too many messages", CHAT, {"messages": [USER] * 65}, 400, "too_many_messages", "messages"),
    ("blank prompt", COMPLETE, {"prompt": ""}, 400, "empty_prompt", "prompt"),
    ("no prompt", COMPLETE, {}, 400, "missing_field", "prompt"),
    ("a token that is none", COMPLETE, {"prompt": [99999999]}, 400, "invalid_prompt", "prompt"),
    ("unknown model", CHAT, chat(model="gpt-9"), 404, "model_not_found", "model"),
    ("no tokens", CHAT, chat(max_tokens=0), 400, "invalid_parameter", "max_tokens"),
    ("no tokens, in newer words", CHAT, chat(max_completion_tokens=0), 400, "invalid_parameter",
     "max_completion_tokens"),
    ("n too large", CHAT, chat(n=17), 400, "invalid_parameter", "n"),
    ("n of nonsense", CHAT, chat(n=0), 400, "invalid_parameter", "n"),
    ("too many stops", CHAT, chat(stop=["x"] * 65), 400, "invalid_value", "stop"),
    ("an empty stop", CHAT, chat(stop=[""]), 400, "invalid_parameter", "stop"),
    ("stream options alone", CHAT, chat(stream_options={}), 400, "invalid_value", "stream_options"),
    ("top_logprobs alone", CHAT, chat(top_logprobs=2), 400, "invalid_value", "top_logprobs"),
    ("too many logprobs", CHAT, chat(logprobs=True, top_logprobs=999), 400, "invalid_parameter", "top_logprobs"),
    ("bias on no token", CHAT, chat(logit_bias={"x": 1}), 400, "invalid_value", "logit_bias"),
    ("bias beyond the vocabulary", CHAT, chat(logit_bias={"999999": 1}), 400, "invalid_parameter", "logit_bias"),
    ("too many tools", CHAT, chat(tools=[TOOL] * 9), 400, "too_many_tools", "tools"),
    ("two tools of one name", CHAT, chat(tools=[TOOL] * 2), 400, "invalid_tool", "tools"),
    ("a tool without a name", CHAT, chat(tools=[{"type": "function", "function": {}}]), 400, "missing_field",
     "tools[0].function.name"),
    ("a tool with a wrong schema", CHAT,
     chat(tools=[WRONG_TOOL]), 400, "invalid_tool",
     "tools[0].function.parameters"),
    ("a choice without tools", CHAT, chat(tool_choice="required"), 400, "invalid_value", "tool_choice"),
    ("a choice of another tool", CHAT,
     chat(tools=[TOOL], tool_choice=NAMED_G), 400, "invalid_value", "tool_choice"),
    ("a format without schema", CHAT, chat(response_format={"type": "json_schema"}), 400, "missing_field",
     "response_format.json_schema"),
    ("a huge schema", CHAT,
     chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"title": "y" * 300_000}}}),
     400, "schema_too_large", "response_format"),
    ("two structures", CHAT, chat(structured_outputs={"regex": "a", "choice": ["b"]}), 400, "invalid_value",
     "structured_outputs"),
    ("a template variable that is not allowed", CHAT, chat(chat_template_kwargs={"messages": []}), 400, "invalid_value",
     "chat_template_kwargs"),
    ("echo of best_of", COMPLETE, {"prompt": "x", "best_of": 3}, 400, "unsupported_parameter", "best_of"),
    ("half a surrogate pair", COMPLETE, {"prompt": "\ud800"}, 400, "invalid_text", None),
    ("half a pair in a message", CHAT, {"messages": [{**USER, "content": "\ud800"}]}, 400, "invalid_text", None),
    ("half a pair in a stop", CHAT, chat(stop="\ud800"), 400, "invalid_text", None),
    ("half a pair in a model's name", CHAT, chat(model="\ud800"), 400, "invalid_text", None),
    ("half a pair in a pattern", CHAT, chat(structured_outputs={"regex": "\ud800"}), 400, "invalid_text", None),
    ("half a pair in a field's name", CHAT, chat(**{"\ud800": 1}), 400, "invalid_text", None),
]  # fmt: skip


@pytest.mark.parametrize("path,body,status,code,param", [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_bodies(http, path: str, body: dict[str, Any], status: int, code: str, param: str | None) -> None:
    content = json.dumps(body)
    reply = http.post(path, content=content, headers={"content-type": "application/json"})
    check_error(reply, status, code, param)


def test_over_long_prompt_says_both_counts(http) -> None:
    reply = http.post(COMPLETE, json={"prompt": "word " * 3000, "max_tokens": 100})
    message = check_error(reply, 400, "context_length_exceeded", "prompt")
    assert message == (
        "This model's maximum context length is 2048 tokens. However, you requested 3101 tokens (3001 in the prompt, "
        "100 in the completion). Please reduce the length of the prompt or completion."
    )


def test_a_prompt_that_was_not_counted_to_its_end_says_at_least(http) -> None:
    message = check_error(http.post(CHAT, json=chat(messages=[{"role": "user", "content": "word " * 100_000}])), 400,
                          "context_length_exceeded", "messages")  # fmt: skip
    assert re.fullmatch(
        r"This model's maximum context length is 2048 tokens\. However, you requested at least (\d+) tokens \(at least "
        r"(\d+) in the messages, 1 in the completion\)\. Please reduce the length of the messages or completion\.",
        message,
    ), message


def test_wrong_json_and_wrong_content_type(http) -> None:
    json_type = {"content-type": "application/json"}
    check_error(http.post(CHAT, content="{", headers=json_type), 400, "invalid_json")
    check_error(http.post(CHAT, content="[]", headers=json_type), 400, "invalid_value")
    check_error(http.post(CHAT, content="", headers=json_type), 400, "missing_field")
    check_error(http.post(CHAT, content=b"\xff\xfe", headers=json_type), 400, "invalid_json")
    check_error(http.post(CHAT, content="[" * 100_000, headers=json_type), 400, "invalid_json")
    check_error(http.post(CHAT, content="a=b", headers={"content-type": "text/plain"}), 415, "unsupported_media_type")
    check_error(http.post(CHAT, data={"a": "b"}), 415, "unsupported_media_type")


def test_oversized_body(http) -> None:
    big = json.dumps(chat(user="x" * (1 << 21)))
    check_error(http.post(CHAT, content=big, headers={"content-type": "application/json"}), 413, "body_too_large")

    def chunks():  # type: ignore[no-untyped-def]
        for _ in range(40):
            yield b" " * 65536

    reply = http.post(CHAT, content=chunks(), headers={"content-type": "application/json"})
    check_error(reply, 413, "body_too_large")


def test_unknown_route_and_wrong_method(http) -> None:
    check_error(http.get("/v2/anything"), 404, "unknown_route")
    reply = http.get(CHAT)
    check_error(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    reply = http.put("/v1/responses/resp_1", json={})
    check_error(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "DELETE, GET, HEAD"


def test_keys(stub: Started) -> None:
    import httpx

    with httpx.Client(base_url=stub.url, timeout=30) as client:
        reply = client.get("/v1/models")
        check_error(reply, 401, "missing_api_key")
        assert reply.headers["www-authenticate"].startswith("Bearer")
        wrong = {"authorization": "Bearer sk-wrong"}
        check_error(client.get("/v1/models", headers=wrong), 401, "invalid_api_key")
        check_error(client.get("/metrics", headers=wrong), 401, "invalid_api_key")
        assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200
        assert client.get("/v1/models", headers={"x-api-key": KEY}).status_code == 200
        check_error(client.get("/admin/engine", headers={"x-api-key": KEY}), 401, "invalid_api_key")
        assert client.get("/admin/engine", headers={"authorization": f"Bearer {ADMIN_KEY}"}).json()["pid"] > 0


def test_the_request_id_of_the_client_comes_back_if_it_is_one(http) -> None:
    assert http.get("/healthz", headers={"x-request-id": "my-id.1"}).headers["x-request-id"] == "my-id.1"
    assert http.get("/healthz", headers={"x-request-id": "x" * 500}).headers["x-request-id"].startswith("req_")


def test_no_cors_unless_asked_for(http) -> None:
    reply = http.get("/healthz", headers={"origin": "https://elsewhere.example"})
    assert not [name for name in reply.headers if name.startswith("access-control")]
    preflight = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
    assert http.options(CHAT, headers=preflight).status_code == 403
