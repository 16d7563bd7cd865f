"""What tools of other servers ask for: tokens in vLLM's and llama.cpp's form, probes, versions; and blank content."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import quire
from tests.e2e.conftest import KEY, Started
from tests.e2e.test_bad_input import TOOL, check_error
from tests.e2e.test_security import client_of

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def http(stub: Started) -> Iterator[Any]:
    with client_of(stub, KEY) as client:
        yield client


def test_tokenize_takes_a_conversation_as_vllm_does(http: Any) -> None:
    for more in ({}, {"tools": [TOOL]}, {"add_generation_prompt": False}):
        shown = http.post("/render", json={"messages": [USER], **more}).json()
        reply = http.post("/tokenize", json={"messages": [USER], "return_token_strs": True, **more}).json()
        assert (reply["tokens"], reply["count"]) == (shown["tokens"], shown["count"])
        assert "".join(reply["token_strs"]) == shown["prompt"] and reply["max_model_len"] == 2048


def test_tokenize_takes_content_as_llama_cpp_does(http: Any) -> None:
    text = "one 🧵"
    plain = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert http.post("/tokenize", json={"content": text}).json()["tokens"] == plain
    pieces = http.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == plain and pieces[0]["piece"] == "one"
    parts = [piece["piece"] if isinstance(piece["piece"], list) else [*piece["piece"].encode()] for piece in pieces]
    assert bytes(byte for part in parts for byte in part).decode() == text
    back = http.post("/detokenize", json={"tokens": plain}).json()
    assert back["content"] == back["prompt"] == text


def test_tokenize_wants_one_of_them(http: Any) -> None:
    check_error(http.post("/tokenize", json={}), 400, "missing_field", "prompt")
    check_error(http.post("/tokenize", json={"prompt": "a", "content": "a"}), 400, "invalid_value", "content")
    check_error(http.post("/tokenize", json={"prompt": "a", "tools": [TOOL]}), 400, "invalid_value", "tools")
    special = {"messages": [USER], "add_special_tokens": True}
    check_error(http.post("/tokenize", json=special), 400, "unsupported_parameter", "add_special_tokens")
    check_error(http.post("/tokenize", json={"messages": []}), 400, "invalid_value", "messages")


def test_tokenizer_info_has_what_harnesses_ask_for(http: Any) -> None:
    info = http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and info["bos_token"] == "<|im_start|>"
    assert 2 in info["eos_token_ids"] and info["vocab_size"] == 49152 and info["model_max_length"] == 2048
    assert "<tool_call>" in info["chat_template"] and info["tool_format"] == "hermes"


def test_version_and_probes(http: Any, stub: Started) -> None:
    assert http.get("/version").json() == {"version": quire.__version__}
    with client_of(stub, None) as nobody:
        assert nobody.get("/version").status_code == nobody.get("/tokenizer_info").status_code == 401
        for reply in (nobody.get("/health"), nobody.get("/ping"), nobody.post("/ping")):
            assert reply.status_code == 200 and reply.json()["status"] == "ok"


@pytest.mark.parametrize("blank", ["", " ", "\n\t"])
def test_blank_content_is_a_message_like_others(http: Any, blank: str) -> None:
    message = [{"role": "user", "content": blank}]
    blocks = [{"role": "user", "content": [{"type": "text", "text": blank}]}]
    for path, body in (
        ("/v1/chat/completions", {"messages": message}),
        ("/v1/chat/completions", {"messages": blocks}),
        ("/v1/responses", {"input": blank}),
        ("/v1/messages", {"messages": message, "max_tokens": 4}),
        ("/v1/messages", {"messages": blocks, "max_tokens": 4}),
    ):
        reply = http.post(path, json=body)
        assert reply.status_code == 200, (path, body, reply.text)
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        reply = http.post(path, json={field: blank})
        if blank:
            assert reply.status_code == 200, (path, reply.text)
        else:
            check_error(reply, 400, "empty_prompt", field)


def test_content_that_is_missing_is_refused(http: Any) -> None:
    for message in ({"role": "user"}, {"role": "user", "content": None}):
        reply = http.post("/v1/chat/completions", json={"messages": [message]})
        check_error(reply, 400, "missing_field", "messages[0].content")
