"""The same mistakes made on every route: each gets the right status, an error in that API's own shape with `code` and
`param`, a request id, and the next request is answered as if nothing had been."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.conftest import KEY, Started
from tests.e2e.test_bad_input import check_error
from tests.e2e.test_operation import client_of

USER = {"role": "user", "content": "hi"}
LONG = "word " * 3000  # the server takes 2048
PARAMETERS = {"type": "string"}  # arguments are an object, always
SCHEMA = {"type": "no-such-type"}


@dataclass(frozen=True)
class Route:
    path: str
    good: dict[str, Any]
    blank: tuple[dict[str, Any], str, str] | None  # what is blank there, the code, the parameter
    prompt: str  # which field holds the prompt
    long: Any = LONG
    dialect: str = "openai"
    stop: str | None = "stop"
    length: str | None = "max_tokens"
    tool: dict[str, Any] | None = None  # one that is wrong
    tool_param: str = ""
    schema: dict[str, Any] | None = None  # fields that ask for a schema that is wrong
    schema_param: str = "response_format"


MESSAGES = {"messages": [USER]}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
ROUTES = {
    "completions": Route(
        "/v1/completions", {"prompt": "hi"}, ({"prompt": ""}, "empty_prompt", "prompt"), "prompt",
        schema={"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ),
    "chat": Route(
        "/v1/chat/completions", MESSAGES, ({"messages": []}, "invalid_value", "messages"), "messages",
        long=[{**USER, "content": LONG}], tool=FUNCTION, tool_param="tools[0].function.parameters",
        schema={"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ),
    "responses": Route(
        "/v1/responses", {"input": "hi"}, ({"input": []}, "invalid_value", "input"), "input",
        length="max_output_tokens", tool={"type": "function", "name": "f", "parameters": PARAMETERS},
        tool_param="tools[0].parameters",
        schema={"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, schema_param="text.format",
    ),
    "messages": Route(
        "/v1/messages", {**MESSAGES, "max_tokens": 4}, ({"messages": []}, "invalid_value", "messages"), "messages",
        long=[{**USER, "content": LONG}], dialect="anthropic", stop="stop_sequences",
        tool={"name": "f", "input_schema": PARAMETERS}, tool_param="tools[0].input_schema",
        schema={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        schema_param="output_config.format",
    ),
    "count_tokens": Route(
        "/v1/messages/count_tokens", MESSAGES, ({"messages": []}, "invalid_value", "messages"), "messages",
        dialect="anthropic", stop=None, length=None, long=None, tool={"name": "f", "input_schema": PARAMETERS},
        tool_param="tools[0].input_schema",
    ),
    "embeddings": Route(
        "/v1/embeddings", {"input": "hi"}, ({"input": ""}, "empty_prompt", "input"), "input", stop=None, length=None,
    ),
    "tokenize": Route("/tokenize", {"prompt": "hi"}, None, "prompt", stop=None, length=None, long=None),
}  # fmt: skip


@pytest.fixture(params=list(ROUTES))
def route(request: pytest.FixtureRequest) -> Route:
    return ROUTES[request.param]


@pytest.fixture(scope="module")
def http(stub: Started) -> Iterator[Any]:
    with client_of(stub) as client:
        yield client


def refuse(http: Any, route: Route, fields: dict[str, Any], status: int, code: str, param: str | None = None) -> str:
    """The request is refused like this, and a good one after it is answered."""
    message = check(http.post(route.path, json={**route.good, **fields}), route, status, code, param)
    assert http.post(route.path, json=route.good).status_code == 200, "nothing is lost for anyone else"
    return message


def check(reply: Any, route: Route, status: int, code: str, param: str | None = None) -> str:
    message = check_error(reply, status, code, param)
    body = reply.json()
    if route.dialect == "anthropic":
        assert body["type"] == "error" and body["request_id"] == reply.headers["request-id"]
        assert reply.headers["request-id"] == reply.headers["x-request-id"]
        assert set(body) == {"type", "error", "request_id"}
    else:
        assert set(body) == {"error"}
    assert set(body["error"]) == {"type", "message", "param", "code"}
    return message


def test_unknown_field(http: Any, route: Route) -> None:
    message = refuse(http, route, {"no_such_field": 1}, 400, "unknown_field", "no_such_field")
    assert "no_such_field" in message


def test_wrong_type(http: Any, route: Route) -> None:
    refuse(http, route, {"model": 5}, 400, "invalid_value", "model")
    refuse(http, route, {route.prompt: 5.5}, 400, "invalid_value", route.prompt)
    if route.length is not None:
        refuse(http, route, {"temperature": "hot"}, 400, "invalid_value", "temperature")
        refuse(http, route, {route.length: "5"}, 400, "invalid_value", route.length)
        refuse(http, route, {route.length: -2}, 400, "invalid_parameter", route.length)


def test_blank_prompt(http: Any, route: Route) -> None:
    if route.blank is not None:
        fields, code, param = route.blank
        refuse(http, route, fields, 400, code, param)
    missing = {name: value for name, value in route.good.items() if name != route.prompt}
    check(http.post(route.path, json=missing), route, 400, "missing_field", route.prompt)


def test_unknown_model(http: Any, route: Route) -> None:
    message = refuse(http, route, {"model": "gpt-9"}, 404, "model_not_found", "model")
    assert "gpt-9" in message and "parrot" in message


def test_over_long_prompt(http: Any, route: Route) -> None:
    if route.long is not None:
        message = refuse(http, route, {route.prompt: route.long}, 400, "context_length_exceeded", route.prompt)
        numbers = [int(number) for number in re.findall(r"\d+", message)]
        assert numbers[0] in (2047, 2048) or numbers[1] == 2047, message
        assert any(3000 <= number <= 3100 for number in numbers), "both counts"
        usual = "prompt is too long: " if route.dialect == "anthropic" else "This model's maximum context length is "
        assert message.startswith(usual)


def test_wrong_json_and_content_type(http: Any, route: Route) -> None:
    as_json = {"content-type": "application/json"}
    for content in ("{", "", "null", "[]", b"\xff\xfe", "[" * 50_000):
        reply = http.post(route.path, content=content, headers=as_json)
        code = reply.json()["error"]["code"]
        check(reply, route, 400, code)
        assert code in ("invalid_json", "missing_field", "invalid_value"), (content[:10], reply.text)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/xml"):
        content = json.dumps(route.good)
        reply = http.post(route.path, content=content, headers={"content-type": kind})
        check(reply, route, 415, "unsupported_media_type")


def test_oversized_body(http: Any, route: Route) -> None:
    content = json.dumps({**route.good, "user": "x" * (1 << 20)})
    reply = http.post(route.path, content=content, headers={"content-type": "application/json"})
    check(reply, route, 413, "body_too_large")


def test_wrong_method(http: Any, route: Route) -> None:
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        reply = http.request(method, route.path)
        check(reply, route, 405, "method_not_allowed")
        assert reply.headers["allow"] == "POST"


def test_unknown_route(http: Any, route: Route) -> None:
    check(http.post(f"{route.path}/no/such/thing", json=route.good), route, 404, "unknown_route")


def test_missing_and_wrong_key(stub: Started, route: Route) -> None:
    import httpx

    with httpx.Client(base_url=stub.url, timeout=30) as nobody:
        reply = nobody.post(route.path, json=route.good)
        check(reply, route, 401, "missing_api_key")
        assert reply.headers["www-authenticate"].startswith("Bearer")
        for headers in (
            {"authorization": "Bearer sk-wrong"},
            {"x-api-key": f"{KEY}x"},
            {"authorization": f"Basic {KEY}"},
        ):
            reply = nobody.post(route.path, json=route.good, headers=headers)
            code = "missing_api_key" if "Basic" in str(headers) else "invalid_api_key"
            check(reply, route, 401, code)


def test_invalid_tool(http: Any, route: Route) -> None:
    if route.tool is not None:
        refuse(http, route, {"tools": [route.tool]}, 400, "invalid_tool", route.tool_param)
        refuse(http, route, {"tools": "hammer"}, 400, "invalid_value", "tools")
    elif route.path != "/v1/completions":
        code = "invalid_value" if route.path == "/tokenize" else "unknown_field"  # there they belong to messages
        refuse(http, route, {"tools": []}, 400, code, "tools")


def test_n_too_large(http: Any, route: Route) -> None:
    if route.path in ("/v1/completions", "/v1/chat/completions"):
        for n in (17, 1000, -1):
            refuse(http, route, {"n": n}, 400, "invalid_parameter", "n")
    else:
        refuse(http, route, {"n": 2}, 400, "unknown_field", "n")  # these APIs have one answer


def test_stop_list_too_long(http: Any, route: Route) -> None:
    if route.stop is not None:
        refuse(http, route, {route.stop: ["x"] * 65}, 400, "invalid_value", route.stop)
        refuse(http, route, {route.stop: ["x" * 5000]}, 400, "invalid_parameter", route.stop)


def test_invalid_schema(tiny: Started, route: Route) -> None:
    """On the real engine: only there a grammar is compiled."""
    if route.schema is None:
        return
    with client_of(tiny) as client:
        for streamed in (False, True):
            reply = client.post(route.path, json={**route.good, **route.schema, "stream": streamed})
            check(reply, route, 400, "invalid_schema", route.schema_param)
            assert client.post(route.path, json={**route.good, route.length: 2}).status_code == 200
        if route.tool is not None:
            tool = json.loads(json.dumps(route.tool).replace('"string"', '"object", "properties": {"x": 5}'))
            choice = "required" if route.dialect == "openai" else {"type": "any"}
            reply = client.post(route.path, json={**route.good, "tools": [tool], "tool_choice": choice})
            check(reply, route, 400, "invalid_schema", "tools")


def test_no_stream_ever_begins_for_a_wrong_request(http: Any, route: Route) -> None:
    if route.stop is None:
        return
    for fields in ({"temperature": -1}, {"model": "gpt-9"}, {route.prompt: route.long}):
        reply = http.post(route.path, json={**route.good, **fields, "stream": True})
        assert reply.status_code in (400, 404) and reply.headers["content-type"].startswith("application/json")
        assert reply.content, "never an empty reply"
