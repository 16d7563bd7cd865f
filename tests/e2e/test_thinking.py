"""Thinking budgets and grammars after reasoning, on the real engine: where the prompt opens the reasoning, and where
the model does so itself. The tiny model is made to write the marker by a bias; what it thinks is its own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.conftest import KEY, Started, need
from tests.e2e.test_operation import client_of, until

CHAT, RESPONSES, CLAUDE = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKED = [{"role": "user", "content": "why is the sky blue"}]
SCHEMA = {"type": "object", "properties": {"blue": {"type": "boolean"}}, "required": ["blue"],
          "additionalProperties": False}  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "sky", "schema": SCHEMA}}
OPENED = {"chat_template_kwargs": {"enable_thinking": True}}
FREE = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def http(tiny: Started):  # type: ignore[no-untyped-def]
    with client_of(tiny) as client:
        yield client


def marker_bias(http: Any) -> dict[str, Any]:
    """The model opens its reasoning itself, and never stops to; it can't end it by itself."""
    reply = http.post("/tokenize", json={"prompt": "<think></think>", "add_special_tokens": False}).json()
    opens, closes = reply["tokens"]
    return {"logit_bias": {str(opens): 100, str(closes): -100}}


def answer(http: Any, **fields: Any) -> tuple[dict[str, Any], int]:
    reply = http.post(CHAT, json={"messages": ASKED, "max_tokens": 60, **FREE, **fields})
    assert reply.status_code == 200, reply.text
    body = reply.json()
    return body["choices"][0]["message"], body["usage"]["completion_tokens_details"]["reasoning_tokens"]


@pytest.mark.parametrize("budget", [0, 1, 12])
def test_a_budget_where_the_prompt_opens_reasoning(http: Any, budget: int) -> None:
    message, num_reasoning = answer(http, **OPENED, thinking_budget=budget, logit_bias=no_end(http))
    assert message["content"], "it went on to answer"
    assert num_reasoning <= budget


def no_end(http: Any) -> dict[str, float]:
    return {token: value for token, value in marker_bias(http)["logit_bias"].items() if value < 0}


def test_without_a_budget_it_thinks_on(http: Any) -> None:
    message, num_reasoning = answer(http, **OPENED, logit_bias=no_end(http))
    assert message["content"] == "" and num_reasoning == 60


@pytest.mark.parametrize("budget", [0, 12])
def test_a_budget_where_the_model_opens_reasoning(http: Any, budget: int) -> None:
    thought, _ = answer(http, **marker_bias(http))
    assert thought["content"] == "" and thought["reasoning_content"].startswith("<think><think>")
    message, _ = answer(http, **marker_bias(http), thinking_budget=budget)
    assert message.get("reasoning_content", "").count("<think>") == budget, "counted from the marker on"
    assert message["content"].startswith("<think>"), "what follows is text, whatever it looks like"


def test_a_schema_binds_after_reasoning_that_the_model_opened(http: Any) -> None:
    fields = {"response_format": FORM, "ignore_eos": False, "max_tokens": 200}
    at_once, num_reasoning = answer(http, **fields, logit_bias={})
    assert set(json.loads(at_once["content"])) == {"blue"} and num_reasoning == 0
    message, _ = answer(http, **fields, **marker_bias(http), thinking_budget=5)
    assert message["reasoning_content"].count("<think>") == 5
    assert set(json.loads(message["content"])) == {"blue"}
    message, _ = answer(http, **{**fields, **OPENED}, thinking_budget=5, logit_bias=no_end(http))
    assert message["reasoning_content"] and set(json.loads(message["content"])) == {"blue"}


def test_the_same_budget_in_the_other_apis(http: Any, tiny: Started) -> None:
    bias = marker_bias(http)
    body = {"input": ASKED[0]["content"], "max_output_tokens": 60, "store": False, **FREE, **bias, "thinking_budget": 4}
    reply = http.post(RESPONSES, json=body).json()
    assert [item["type"] for item in reply["output"]] == ["reasoning", "message"]
    assert reply["output"][0]["content"][0]["text"].count("<think>") == 4
    need("anthropic")
    from anthropic import Anthropic

    client = Anthropic(base_url=tiny.url, api_key=KEY, max_retries=0, timeout=60)
    for streamed in (False, True):
        options: Any = {"model": "tiny", "max_tokens": 60, "messages": ASKED, "extra_body": {**FREE, **bias},
                        "thinking": {"type": "enabled", "budget_tokens": 6}}  # fmt: skip
        if streamed:
            with client.messages.stream(**options) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**options)
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[0].thinking.count("<think>") <= 6


def test_the_trace_shows_masks_between_forward_and_sampling_and_the_clients_own_ids(http: Any, tiny: Started) -> None:
    body = {"messages": ASKED, "max_tokens": 30, "structured_outputs": {"regex": "[a-c]{8}"}}
    assert tiny.trace is not None

    def events() -> list[dict[str, Any]]:
        lines = tiny.trace.read_text().rpartition("\n")[0].splitlines()[1:]  # the last one may be half written
        return [json.loads(line.rstrip(",")) for line in lines]

    for name in ("trace-me", "and-me"):  # an answer is there a moment before its last lines are
        assert http.post(CHAT, json=body, headers={"x-request-id": name}).status_code == 200
        until(lambda name=name: any(name in str(event.get("id2")) and event["ph"] == "e" for event in events()))
    spans = {(e["name"], e["args"].get("step")): e for e in events() if e["ph"] == "X"}
    steps = [step for name, step in spans if name == "mask"]
    assert len(steps) >= 8
    for step in steps:
        forward, mask, sample = (spans[name, step] for name in ("forward", "mask", "sample"))
        assert forward["ts"] <= mask["ts"] and mask["ts"] + mask["dur"] <= sample["ts"]
