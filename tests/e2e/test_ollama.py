"""Ollama's API: whole and streamed replies, tools, formats, models, and errors in its shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import KEY, Started
from tests.e2e.test_security import client_of

USER = {"role": "user", "content": "one two three"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def http(stub: Started) -> Iterator[Any]:
    with client_of(stub, KEY) as client:
        yield client


def ask(http: Any, path: str, **fields: Any) -> dict[str, Any]:
    reply = http.post(path, json={"model": "parrot", "stream": False, **fields})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def lines(http: Any, path: str, **fields: Any) -> list[dict[str, Any]]:
    reply = http.post(path, json={"model": "parrot", **fields})
    assert reply.status_code == 200 and reply.headers["content-type"] == "application/x-ndjson", reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


def test_chat(http: Any) -> None:
    whole = ask(http, "/api/chat", messages=[USER], model="parrot:latest")
    assert whole["message"] == {"role": "assistant", "content": "one two three"} and whole["model"] == "parrot:latest"
    assert (whole["done"], whole["done_reason"], whole["eval_count"]) == (True, "stop", 4)
    assert whole["total_duration"] >= whole["eval_duration"] >= 0 and whole["prompt_eval_count"] > 3
    parts = lines(http, "/api/chat", messages=[USER])
    assert "".join(part["message"]["content"] for part in parts) == "one two three"
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    cut = ask(http, "/api/chat", messages=[USER], options={"num_predict": 2, "num_ctx": 4096, "temperature": 0})
    assert (cut["message"]["content"], cut["done_reason"]) == ("one two", "length")
    assert (
        ask(http, "/api/chat", messages=[USER], options={"num_predict": -1, "stop": [" three"]})["message"]["content"]
        == "one two"
    )


def test_tools(http: Any) -> None:
    fields = {"messages": [{"role": "user", "content": CALL}], "tools": [TOOL]}
    wanted = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    whole = ask(http, "/api/chat", **fields)
    assert whole["message"]["tool_calls"] == wanted and whole["message"]["content"] == ""
    parts = lines(http, "/api/chat", **fields)
    assert [call for part in parts for call in part["message"].get("tool_calls", ())] == wanted
    back = [USER, whole["message"], {"role": "tool", "tool_name": "f", "content": "2"}, USER]
    assert ask(http, "/api/chat", messages=back, tools=[TOOL])["message"]["content"] == "one two three"


def test_generate(http: Any) -> None:
    assert ask(http, "/api/generate", prompt="one two", system="Be kind.")["response"] == "one two"
    assert "".join(part["response"] for part in lines(http, "/api/generate", prompt="one two")) == "one two"
    raw = ask(http, "/api/generate", prompt="one two", raw=True, options={"num_predict": 2})
    assert raw["response"] and raw["eval_count"] == 2
    for path, part in (
        ("/api/generate", {"response": ""}),
        ("/api/chat", {"message": {"role": "assistant", "content": ""}}),
    ):
        loaded = ask(http, path, keep_alive="5m")
        assert loaded["done_reason"] == "load" and loaded.items() >= part.items()


def test_embed(http: Any) -> None:
    found = ask_embed(http, input=["one", "two words"])
    assert len(found["embeddings"]) == 2 and found["prompt_eval_count"] >= 3
    assert len(ask_embed(http, input="one", dimensions=2)["embeddings"][0]) == 2
    assert ask_embed(http, input="word " * 3000)["prompt_eval_count"] == 2047, "a long text is cut"
    refused = http.post("/api/embed", json={"model": "parrot", "input": "word " * 3000, "truncate": False})
    assert refused.status_code == 400 and refused.json()["param"] == "input"


def ask_embed(http: Any, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = http.post("/api/embed", json={"model": "parrot", **fields}).json()
    return found


def test_models(http: Any) -> None:
    assert [model["name"] for model in http.get("/api/tags").json()["models"]] == ["parrot", "claude-parrot"]
    assert http.get("/api/ps").json()["models"][0]["context_length"] == 2048 and http.get("/api/version").json()
    shown = http.post("/api/show", json={"model": "parrot"}).json()
    assert "tools" in shown["capabilities"] and "<tool_call>" in shown["template"]
    assert shown["model_info"]["parrot.context_length"] == 2048 and shown["details"]["format"] == "gguf"


@pytest.mark.parametrize(
    "path,fields,status,code,param",
    [
        ("chat", {"model": "other"}, 404, "model_not_found", "model"),
        ("show", {"model": "other"}, 404, "model_not_found", "model"),
        ("show", {}, 400, "missing_field", "model"),
        ("chat", {"messages": [{**USER, "images": ["AA=="]}]}, 400, "unsupported_content", "messages[0].images"),
        ("chat", {"messages": [USER], "options": {"mirostat": 2}}, 400, "invalid_value", "options.mirostat"),
        ("chat", {"messages": [USER], "options": {"typical_p": 0.5}}, 400, "invalid_value", "options.typical_p"),
        ("chat", {"messages": [USER], "options": {"heat": 2}}, 400, "unknown_field", "options.heat"),
        ("chat", {"messages": [USER], "options": {"num_predict": 0}}, 400, "invalid_parameter", "num_predict"),
        ("chat", {"messages": [USER], "format": {"type": "no-such-type"}}, 400, "invalid_schema", "format"),
        ("chat", {"messages": [{**USER, "content": "word " * 3000}]}, 400, "context_length_exceeded", "messages"),
        ("generate", {"prompt": "a", "context": [1]}, 400, "unsupported_parameter", "context"),
        ("generate", {"prompt": "a", "suffix": "b"}, 400, "unsupported_parameter", "suffix"),
        ("embed", {"input": "a", "dimensions": 0}, 400, "invalid_value", "dimensions"),
    ],
)
def test_errors(http: Any, path: str, fields: dict[str, Any], status: int, code: str, param: str) -> None:
    body = fields if path == "show" else {"model": "parrot", **fields}
    reply = http.post(f"/api/{path}", json=body)
    found = reply.json()
    assert (reply.status_code, found["code"], found["param"]) == (status, code, param), reply.text
    assert isinstance(found["error"], str) and set(found) == {"error", "code", "param"}


def test_keys_apply(stub: Started) -> None:
    with client_of(stub, None) as nobody:
        assert (
            nobody.get("/api/tags").status_code == nobody.post("/api/chat", json={"model": "parrot"}).status_code == 401
        )
