"""Schemas over HTTP: what can't be enforced is told in a header, or refused where `strict` asks for all of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import KEY, Started, need

TAGS = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "maxItems": 2}},
    "required": ["tags"],
    "additionalProperties": False,
}
PLAIN = {
    "type": "object",
    "properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "null"}]}},
    "required": ["a"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Tags?"}]
SAID = "'uniqueItems' at #/properties/tags"


def body_of(route: str, schema: Any, strict: bool | None) -> dict[str, Any]:
    asked = {"name": "x", "schema": schema, **({} if strict is None else {"strict": strict})}
    if route == "/v1/completions":
        return {"prompt": "Tags:", "response_format": {"type": "json_schema", "json_schema": asked}}
    if route == "/v1/responses":
        return {"input": "Tags?", "text": {"format": {"type": "json_schema", **asked}}}
    if route == "/v1/messages":
        return {"messages": MESSAGES, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    return {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": asked}}


def send(real: Started, route: str, **body: Any) -> Any:
    need("httpx")
    import httpx

    length = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
    whole = {"model": "smollm2", length: 60, "temperature": 0, **body}
    return httpx.post(real.url + route, json=whole, headers={"authorization": f"Bearer {KEY}"}, timeout=120)


ROUTES = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
PARAMS = dict(zip(ROUTES, ["response_format", "response_format", "text.format", "output_config.format"], strict=True))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_left_out_is_told_in_a_header(real: Started, route: str, stream: bool) -> None:
    reply = send(real, route, **body_of(route, TAGS, None), stream=stream)
    assert reply.status_code == 200, reply.text
    assert SAID in reply.headers["x-quire-warning"]
    whole = send(real, route, **body_of(route, PLAIN, None), stream=stream)
    assert whole.status_code == 200 and "x-quire-warning" not in whole.headers


@pytest.mark.parametrize("route", ROUTES[:3])
def test_strict_refuses_by_keyword_and_place(real: Started, route: str) -> None:
    reply = send(real, route, **body_of(route, TAGS, True))
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_schema", PARAMS[route])
    assert SAID in error["message"] and "guidance" not in error["message"]
    assert send(real, route, **body_of(route, PLAIN, True)).status_code == 200


@pytest.mark.parametrize("strict", [False, True])
def test_tools(real: Started, strict: bool) -> None:
    tool = {"type": "function", "function": {"name": "tag", "parameters": TAGS, "strict": strict}}
    reply = send(real, ROUTES[0], messages=MESSAGES, tools=[tool], tool_choice="required")
    if strict:
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_schema", "tools")
        assert "Tool 'tag'" in error["message"] and SAID in error["message"]
    else:
        assert reply.status_code == 200, reply.text
        assert f"Tool 'tag': {SAID}" in reply.headers["x-quire-warning"]


def test_structured_outputs_are_tolerant(real: Started) -> None:
    reply = send(real, ROUTES[0], messages=MESSAGES, structured_outputs={"json": TAGS})
    assert reply.status_code == 200 and SAID in reply.headers["x-quire-warning"]


def test_a_header_holds_no_lines_of_the_client(real: Started) -> None:
    schema = {"type": "object", "properties": {"a\r\nx-evil: é": {"type": "string", "format": "b\r\nc"}}}
    reply = send(real, ROUTES[0], **body_of(ROUTES[0], schema, None))
    assert reply.status_code == 200 and "x-evil" not in reply.headers
    assert reply.headers["x-quire-warning"].isascii()
