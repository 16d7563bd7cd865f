"""Bodies cost a small multiple of their size, right or wrong: validation ends early and holds little."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("zmq")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")
pytest.importorskip("tokenizers")

from pydantic import ValidationError

from quire.server.http.bodies import INLINE_BODY, HeldBodies, body_models, decode_json, validate_body
from quire.server.http.errors import ApiError
from tests.fuzz.fake_server import FakeServer

MANY = 20_000  # items: a body of them stays below INLINE_BODY
USER = {"role": "user", "content": "x"}
WRONG_BODIES = [
    ("/v1/completions", {"prompt": [1] * MANY + [-1]}, "prompt[20000]"),
    ("/v1/completions", {"prompt": [[1]] * MANY + [1]}, "prompt[0]"),
    ("/v1/completions", {"prompt": "x", "stop": [1] * MANY}, "stop[0]"),
    ("/v1/embeddings", {"input": [1] * MANY + [-1]}, "input[20000]"),
    ("/v1/chat/completions", {"messages": [1] * MANY}, "messages[0]"),
    ("/v1/chat/completions", {"messages": [{**USER, "tool_calls": [{}] * MANY}]}, "messages[0].tool_calls[0].id"),
    ("/v1/chat/completions", {"messages": [USER], **{f"a{i}": 1 for i in range(4000)}}, "a0"),
    ("/v1/chat/completions", {"messages": [{**USER, **{f"a{i}": 1 for i in range(4000)}}]}, "messages[0].a0"),
    ("/v1/chat/completions", {"messages": [USER], "logit_bias": {str(i): "x" for i in range(4000)}}, "logit_bias"),
    ("/v1/chat/completions", {"messages": [USER], "logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias"),
    ("/v1/responses", {"input": [1] * MANY}, "input[0]"),
    ("/v1/responses", {"input": "x", "tools": [{}] * MANY}, "tools[0].type"),
    ("/v1/messages", {"messages": [1] * MANY, "max_tokens": 1}, "messages[0]"),
    ("/v1/messages", {"messages": [{**USER, "content": [{}] * MANY}], "max_tokens": 1}, "messages[0].content[0]"),
    ("/detokenize", {"tokens": [1] * MANY + ["x"]}, "tokens[20000]"),
]


@pytest.fixture(scope="module")
def post(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    async def make() -> FakeServer:
        return FakeServer(tmp_path_factory.mktemp("bodies"))

    with asyncio.Runner() as runner:
        server = runner.run(make())
        yield lambda path, body: runner.run(server.post(path, body))


@pytest.mark.parametrize("path,value,param", WRONG_BODIES, ids=[f"{p} {w}" for p, _, w in WRONG_BODIES])
def test_validation_ends_at_the_first_errors(post: Any, path: str, value: Any, param: str) -> None:
    with pytest.raises(ValidationError) as wrong:
        body_models()[path].model_validate(value)
    assert wrong.value.error_count() <= 5
    body = json.dumps(value).encode()
    assert len(body) < 3 * INLINE_BODY
    post(path, body)  # what is made once is not this body's cost
    tracemalloc.start()
    try:
        status, answer = post(path, body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    error = json.loads(answer)["error"]
    assert status == 400 and error["param"] == param and len(error["message"]) < 500, error
    assert peak < 40 * len(body), "values of the body, and next to nothing for its errors"


def test_every_list_of_a_body_ends_at_its_first_wrong_item_and_has_a_bound() -> None:
    """The rule holds for fields that are added later, too."""
    found = 0
    for path, model in body_models().items():
        for place, schema in _nodes(model.__pydantic_core_schema__):
            if schema.get("type") == "list":
                found += 1
                assert schema.get("fail_fast") and schema.get("max_length") is not None, f"{path} {place}: {schema}"
    assert found > 40


def _nodes(schema: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        yield place, schema
        for name, inner in schema.items():
            if name not in ("metadata", "serialization"):
                yield from _nodes(inner, f"{place}.{name}")
    elif isinstance(schema, (list, tuple)):
        for index, inner in enumerate(schema):
            yield from _nodes(inner, f"{place}[{index}]")


def test_a_key_of_the_clients_is_not_repeated_at_length() -> None:
    with pytest.raises(ApiError) as refused:
        validate_body("/v1/chat/completions", {"messages": [USER], "logit_bias": {"a" * 60_000: "x"}})
    assert len(refused.value.message) < 500 and len(refused.value.param or "") < 500


@pytest.mark.parametrize(
    "body,code",
    [
        (b'{"prompt": "\\ud800"}', "invalid_text"),
        (b'{"prompt": "\\ud83d\\ude00 \\udc00"}', "invalid_text"),
        (b'{"temperature": NaN}', None),
        (b'{"temperature": -Infinity}', None),
        (b'{"temperature": 1e999}', None),
        (b'{"prompt": "\xff"}', None),
        (b"[" * 60_000, None),
        (b"[" * 202 + b"]" * 202, None),
        (b'{"a":' * 202 + b"1" + b"}" * 202, None),
    ],
)
def test_json_is_read_strictly(body: bytes, code: str | None) -> None:
    with pytest.raises(ApiError if code else json.JSONDecodeError) as refused:
        decode_json(body)
    assert code is None or refused.value.code == code  # type: ignore[union-attr]
    assert decode_json(b"[" * 200 + b"]" * 200)
    assert decode_json(b'{"prompt": "\\ud83d\\ude00"}') == {"prompt": "\U0001f600"}


def test_bodies_together_have_a_bound() -> None:
    held = HeldBodies(limit=1000)
    held.take(900)
    with pytest.raises(ApiError, match="900 bytes") as refused:
        held.take(101)
    assert refused.value.status == 503 and "retry-after" in refused.value.headers
    held.give_back(900)
    held.take(1000)


def test_a_prompt_is_scored_and_shown_once(post: Any) -> None:
    ask = {"prompt": [[65] * 50, [66] * 50], "n": 3, "max_tokens": 1, "prompt_logprobs": 1, "logprobs": 0}
    for echo in (False, True):
        status, answer = post("/v1/completions", json.dumps({**ask, "echo": echo}).encode())
        choices = json.loads(answer)["choices"]
        assert status == 200
        assert [len(choice.get("prompt_logprobs", ())) for choice in choices] == [50, 0, 0, 50, 0, 0]
        assert {len(choice["logprobs"]["tokens"]) for choice in choices} == {51 if echo else 1}
    chat = {"messages": [USER], "n": 3, "max_tokens": 1, "prompt_logprobs": 1}
    choices = json.loads(post("/v1/chat/completions", json.dumps(chat).encode())[1])["choices"]
    assert ["prompt_logprobs" in choice for choice in choices] == [True, False, False]


@pytest.mark.parametrize(
    "path,fields,param",
    [
        ("/v1/completions", {"prompt": [[65] * 400] * 21, "prompt_logprobs": 64}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": [65] * 400, "echo": True, "logprobs": 31, "n": 42}, "prompt_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 64, "n": 64, "max_tokens": 150}, "top_logprobs"),
    ],
)
def test_a_reply_that_would_hold_too_much_is_refused_beforehand(
    post: Any, path: str, fields: dict[str, Any], param: str
) -> None:
    ask = {"messages": [USER]} if "chat" in path else {}
    status, answer = post(path, json.dumps({"max_tokens": 1, **ask, **fields}).encode())
    error = json.loads(answer)["error"]
    assert (status, error["code"], error["param"]) == (400, "reply_too_large", param), error
    assert "131072" in error["message"] and "Ask for fewer" in error["message"]


FLOATS = ("temperature", "top_p", "min_p", "top_n_sigma", "repetition_penalty", "presence_penalty",
          "frequency_penalty", "dry_multiplier", "dry_base", "timeout")  # fmt: skip


@pytest.mark.parametrize("value", ["1e39", "-1e39", "1e308", "1e999", "NaN", "Infinity"])
@pytest.mark.parametrize("field", [*FLOATS, "logit_bias"])
def test_numbers_beyond_float32_are_refused(post: Any, field: str, value: str) -> None:
    shown = f'{{"65": {value}}}' if field == "logit_bias" else value
    body = f'{{"prompt": [65], "max_tokens": 1, "{field}": {shown}}}'
    status, answer = post("/v1/completions", body.encode())
    error = json.loads(answer)["error"]
    assert status == 400, answer
    assert error["param"] == field or error["code"] == "invalid_json", error


@pytest.mark.parametrize("value", ["0", "1e-300", "1e-38", "9e-4", "-1"])
def test_a_repetition_penalty_that_makes_logits_infinite_is_refused(post: Any, value: str) -> None:
    body = f'{{"prompt": [65], "max_tokens": 1, "repetition_penalty": {value}}}'
    status, answer = post("/v1/completions", body.encode())
    assert (status, json.loads(answer)["error"]["param"]) == (400, "repetition_penalty"), answer


@pytest.mark.parametrize("field", ["top_k", "dry_allowed_len", "dry_range", "min_tokens", "max_tokens", "seed", "n"])
@pytest.mark.parametrize("value", [1 << 63, -(1 << 64), 10**30])
def test_whole_numbers_beyond_their_range_are_refused(post: Any, field: str, value: int) -> None:
    status, answer = post("/v1/completions", json.dumps({"prompt": [65], field: value}).encode())
    assert status == 400 and json.loads(answer)["error"]["param"] == field, answer


def test_a_wrong_value_is_not_repeated_at_length(post: Any) -> None:
    body = {"prompt": [65], "bad_words": ["x" * 50_000]}
    status, answer = post("/v1/completions", json.dumps(body).encode())
    assert status == 400 and len(answer) < 500 and b"bad_words='xxx" in answer


PLACES = [
    {"metadata": {"a": "HERE"}},
    {"metadata": {"HERE": 1}},
    {"input": [{"role": "user", "content": "HERE"}]},
    {"input": [{"role": "user", "content": "x", "id": "HERE"}]},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "annotations": [{"a": "HERE"}]}]}]},
    {"instructions": "HERE"},
    {"user": "HERE"},
    {"tools": [{"type": "function", "name": "f", "description": "HERE", "parameters": {"a": "HERE"}}]},
]
NO_TEXT = {"half a pair": '"\\ud800"', "NaN": "NaN", "infinity": "-Infinity", "1e999": "1e999",
           "depth": "[" * 250 + "]" * 250}  # fmt: skip


@pytest.mark.parametrize("what", NO_TEXT)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_responses_refuse_at_creation_what_they_could_not_show(post: Any, place: dict[str, Any], what: str) -> None:
    body = json.dumps({"input": "x", "max_output_tokens": 1, **place}).replace('"HERE"', NO_TEXT[what])
    for stream in ("false", "true"):
        status, answer = post("/v1/responses", (body[:-1] + f', "stream": {stream}}}').encode())
        error = json.loads(answer)["error"]
        assert status == 400 and error["code"] in ("invalid_text", "invalid_json"), answer


def test_what_responses_take_they_show(post: Any) -> None:
    metadata = {"a": {"b": [1.5, None, "\U0001f600"]}, "deep": json.loads("[" * 150 + "]" * 150)}
    body = json.dumps({"input": "x", "max_output_tokens": 1, "metadata": metadata}).encode()
    status, answer = post("/v1/responses", body)
    assert status == 200 and json.loads(answer)["metadata"] == metadata
