"""Bodies of both dialects to conversations, and what errors in them are called."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("starlette")

import msgspec
from pydantic import ValidationError

from quire.server.anthropic import translate as anthropic
from quire.server.anthropic.schemas import MessagesBody
from quire.server.http.encoding import to_json
from quire.server.http.errors import (
    INTERNAL_MESSAGE,
    ApiError,
    counting_output,
    error_body,
    from_quire_error,
    from_validation,
)
from quire.server.openai.response_schemas import InputItem
from quire.server.openai.response_translate import messages_of
from quire.server.openai.schemas import ChatBody, CompletionBody
from quire.server.openai.translate import chat_params, conversation_of
from quire.server.textwork.tasks import TaskRefusal, raise_refusal
from quire.types import PromptTooLong, QuireError


def error_of(kind: Any, body: Any) -> ApiError:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    return from_validation(errors)


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "fields,param,words",
    [
        ({"max_tokens": 0}, "max_tokens", "max_tokens=0 must"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens=0 must"),
        ({"max_completion_tokens": 3, "min_tokens": 9}, "min_tokens", "larger than max_completion_tokens=3"),
        ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs", "top_logprobs=1000000 must"),
    ],
)  # fmt: skip
def test_a_value_that_is_refused_is_called_what_the_client_calls_it(fields: dict[str, Any], param: str,
                                                                   words: str) -> None:  # fmt: skip
    with pytest.raises(QuireError) as caught:
        chat_params(ChatBody.model_validate({"messages": [USER], **fields}))
    error = from_quire_error(caught.value, route="/v1/chat/completions")
    assert error.param == param and words in error.message


@pytest.mark.parametrize(
    "body,code,param",
    [
        ({"messages": [USER], "tempature": 1}, "unknown_field", "tempature"),
        ({"messages": [{**USER, "odd-name": 1}]}, "unknown_field", "messages[0].odd-name"),
        ({"messages": [USER, {"content": "x"}]}, "missing_field", "messages[1].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "invalid_value",
         "messages[0].content[0].text"),
        ({"messages": [USER], "n": "3"}, "invalid_value", "n"),
        ({"messages": [USER], "n": True}, "invalid_value", "n"),
        ({"messages": [USER], "stop": ["x"] * 65}, "invalid_value", "stop"),
        ({"messages": [USER], "tool_choice": "maybe"}, "invalid_value", "tool_choice"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_as_the_client_wrote_it(body: dict[str, Any], code: str, param: str) -> None:
    error = error_of(ChatBody, body)
    assert (error.status, error.code, error.param) == (400, code, param), error.message


def test_prompts_of_all_four_kinds() -> None:
    for prompt in ("x", ["x", "y"], [1, 2], [[1], [2, 3]]):
        assert CompletionBody.model_validate({"prompt": prompt}).prompt == prompt
    for prompt in ([], [[]], ["x", 1], {"a": 1}, 5, None, [-1], [True]):
        assert error_of(CompletionBody, {"prompt": prompt}).code == "invalid_value", prompt


def test_errors_of_the_engine_are_not_shown_but_those_of_the_caller_are() -> None:
    inside = from_quire_error(QuireError("step_failed", "AttributeError: 'x' in file.py"))
    assert inside.status == 500 and "AttributeError" not in inside.message
    kernel = from_quire_error(QuireError("kernel_failed", "The kernel of /home/x/kernels.py failed.", "", "kernels"))
    assert (kernel.status, kernel.message) == (500, INTERNAL_MESSAGE), "which kernel it was is for the log"
    refused = from_quire_error(QuireError("template_error", "The chat template refused."))
    assert refused.status == 400 and refused.message == "The chat template refused."
    busy = from_quire_error(QuireError("queue_full", "full"), retry_after=7)
    assert busy.status == 429 and busy.headers == {"retry-after": "7"}


def test_both_shapes_of_an_error() -> None:
    error = ApiError(429, "queue_full", "full", "n")
    assert error_body("openai", error)["error"] == {
        "message": "full", "type": "rate_limit_error", "param": "n", "code": "queue_full",
    }  # fmt: skip
    body = error_body("anthropic", error, "req_1")
    assert body["type"] == "error" and body["error"]["type"] == "rate_limit_error" and body["request_id"] == "req_1"


def test_json_never_fails_on_text() -> None:
    assert json.loads(to_json({"a": "half \ud800 pair"})) == {"a": "half \ud800 pair"}
    assert to_json({"a": "é"}) == '{"a":"é"}'.encode()


def claude(**fields: Any) -> MessagesBody:
    return MessagesBody.model_validate({"max_tokens": 5, "messages": [USER], **fields})


@pytest.mark.parametrize(
    "text,left",
    [
        ("x-anthropic-billing-header: a=1; b=2;", ""),
        ("x-anthropic-billing-header: a=1\nYou are helpful.", "You are helpful."),
        ("\nx-anthropic-billing-header: a=1\nYou\n", "You\n"),
        ("You are helpful.\nx-anthropic-billing-header: a=1", "You are helpful.\nx-anthropic-billing-header: a=1"),
        ("\n\n  Mind the gap.  \n", "\n\n  Mind the gap.  \n"),
        ("", ""),
    ],
)
def test_volatile_headers_go_and_nothing_else_is_touched(text: str, left: str) -> None:
    assert anthropic.without_volatile_headers(text) == left


def test_results_of_tools_come_before_what_the_user_says_with_them() -> None:
    content = [
        {"type": "tool_result", "tool_use_id": "a", "content": "one"},
        {"type": "tool_result", "tool_use_id": "b", "content": "two", "is_error": True},
        {"type": "text", "text": "so?"},
    ]
    conversation = anthropic.conversation_of(claude(messages=[{"role": "user", "content": content}]))
    assert [(message["role"], message["content"]) for message in conversation.messages] == [
        ("tool", "one"), ("tool", "Error: two"), ("user", "so?"),
    ]  # fmt: skip


def test_an_assistant_message_at_the_end_is_continued() -> None:
    begun = claude(messages=[USER, {"role": "assistant", "content": "Well"}])
    assert anthropic.conversation_of(begun).continue_final and not anthropic.conversation_of(claude()).continue_final


@pytest.mark.parametrize(
    "choice,meant", [({"type": "any"}, "required"), ({"type": "none"}, "none"), ({"type": "tool", "name": "f"}, "f")]
)
def test_tool_choices(choice: dict[str, str], meant: str) -> None:
    assert anthropic.conversation_of(claude(tool_choice=choice)).tool_choice == meant


def test_chat_options_reach_the_template() -> None:
    body = ChatBody.model_validate(
        {"messages": [{"role": "developer", "content": "x"}], "reasoning_effort": "none", "parallel_tool_calls": False}
    )
    conversation = conversation_of(body)
    assert conversation.messages == [{"role": "system", "content": "x"}] and not conversation.parallel_tools
    assert conversation.template_kwargs == {"reasoning_effort": "none", "enable_thinking": False}


def test_calls_that_follow_one_another_are_one_message() -> None:
    items = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
    ]
    messages = messages_of([InputItem.model_validate(item) for item in items])
    assert [message["role"] for message in messages] == ["assistant", "tool", "tool"]
    assert [call["id"] for call in messages[0]["tool_calls"]] == ["1", "2"]
    assert messages[0]["reasoning_content"] == "hm" and messages[2]["content"] == "two"


@pytest.mark.parametrize(
    "route,param,message",
    [
        (
            "/v1/chat/completions",
            "messages",
            "This model's maximum context length is 100 tokens. However, you requested 157 tokens (150 in the "
            "messages, 7 in the completion). Please reduce the length of the messages or completion.",
        ),
        (
            "/v1/responses",
            "input",
            "This model's maximum context length is 100 tokens. However, you requested 157 tokens (150 in the input, "
            "7 in the completion). Please reduce the length of the input or completion.",
        ),
        (
            "/v1/embeddings",
            "input",
            "This model's maximum context length is 99 tokens. However, your input resulted in 150 tokens. Please "
            "reduce the length of the input.",
        ),
        ("/v1/messages", "messages", "prompt is too long: 150 tokens > 99 maximum"),
        ("/v1/messages/count_tokens", "messages", "prompt is too long: 150 tokens > 99 maximum"),
    ],
)
def test_too_long_a_prompt_is_told_in_the_sentence_clients_know(route: str, param: str, message: str) -> None:
    with pytest.raises(PromptTooLong) as caught, counting_output(7):
        raise PromptTooLong(150, 99)
    error = from_quire_error(caught.value, route=route)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", param)
    assert error.message == message
    kind = error_body("anthropic" if "messages" in route[:12] else "openai", error)["error"]["type"]
    assert kind == "invalid_request_error"


def test_a_prompt_not_counted_to_its_end_is_at_least_that_long() -> None:
    error = from_quire_error(PromptTooLong(150, 99, at_least=True), route="/v1/completions")
    assert "you requested at least 151 tokens (at least 150 in the prompt, 1 in the completion)" in error.message
    error = from_quire_error(PromptTooLong(150, 99, at_least=True), route="/v1/messages")
    assert error.message == "prompt is too long: at least 150 tokens > 99 maximum"
    error = from_quire_error(PromptTooLong(150, 99), route="/tokenize")
    assert error.code == "text_too_long", "the model's context is not this route's limit"


def test_the_counts_cross_the_boundary_of_the_text_worker() -> None:
    refused = msgspec.msgpack.decode(msgspec.msgpack.encode(TaskRefusal("prompt_too_long", "x", counts=(5, 4, True))),
                                     type=TaskRefusal)  # fmt: skip
    with pytest.raises(PromptTooLong) as caught:
        raise_refusal(refused)
    assert (caught.value.count, caught.value.limit, caught.value.at_least) == (5, 4, True)
