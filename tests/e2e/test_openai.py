"""OpenAI's own Python client against a server whose model repeats what the user said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.conftest import KEY, Started, need

HELLO = [{"role": "user", "content": "Hello there, parrot!"}]


@pytest.fixture(scope="module")
def client(stub: Started):  # type: ignore[no-untyped-def]
    need("openai")
    from openai import OpenAI

    return OpenAI(base_url=f"{stub.url}/v1", api_key=KEY, max_retries=0, timeout=30)


def test_models(client) -> None:
    assert [model.id for model in client.models.list()] == ["parrot", "claude-parrot"]
    assert client.models.retrieve("parrot").id == "parrot"


def test_chat(client) -> None:
    reply = client.chat.completions.create(model="parrot", messages=HELLO)
    choice = reply.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        HELLO[0]["content"],
        "stop",
    )
    assert reply.usage.completion_tokens > 3
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_chat_stream_gives_the_same_text_and_usage(client) -> None:
    messages = [{"role": "system", "content": "Repeat every word that you hear. " * 4}, *HELLO]
    whole = client.chat.completions.create(model="parrot", messages=messages)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="parrot", messages=messages, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0, "the second time the prompt is in the cache"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    options["stream_options"]["continuous_usage_stats"] = True
    chunks = list(client.chat.completions.create(model="parrot", messages=messages, **options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == whole.usage.completion_tokens


def test_chat_n_and_logprobs(client) -> None:
    reply = client.chat.completions.create(model="parrot", messages=HELLO, n=3, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    for choice in reply.choices:
        assert choice.message.content == HELLO[0]["content"]
        entries = choice.logprobs.content
        assert b"".join(bytes(entry.bytes) for entry in entries).decode().startswith("Hello there")
        assert all(len(entry.top_logprobs) == 2 and entry.logprob == -0.5 for entry in entries)
    assert reply.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in reply.choices)


def test_chat_stream_of_n_samples_with_logprobs(client) -> None:
    texts, num_logprobs = ["", ""], [0, 0]
    for chunk in client.chat.completions.create(model="parrot", messages=HELLO, n=2, logprobs=True, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        num_logprobs[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
    assert texts == [HELLO[0]["content"]] * 2 and num_logprobs[0] == num_logprobs[1] > 3


def test_stop_strings_and_length(client) -> None:
    reply = client.chat.completions.create(model="parrot", messages=HELLO, stop=[", par", "zzz"])
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("Hello there", "stop")
    assert reply.usage.prompt_tokens > 0 and reply.usage.completion_tokens < 6
    reply = client.chat.completions.create(model="parrot", messages=HELLO, max_completion_tokens=2)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("Hello there", "length")
    streamed = client.chat.completions.create(model="parrot", messages=HELLO, stop=", par", stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "Hello there"


def test_continue_final_message(client) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "I am"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    reply = client.chat.completions.create(model="parrot", messages=messages, max_tokens=3, extra_body=extra)
    assert reply.usage.completion_tokens == 3


def test_every_sampling_field_is_taken(client) -> None:
    extra = {
        "top_k": 5, "min_p": 0.1, "top_n_sigma": 1.0, "repetition_penalty": 1.1, "dry_multiplier": 0.5, "dry_base": 1.5,
        "dry_allowed_len": 3, "dry_range": 64, "dry_breakers": ["\n"], "bad_words": ["xyzzy"], "stop_token_ids": [5],
        "include_stop": True, "ignore_eos": False, "min_tokens": 1, "skip_special_tokens": True, "priority": -1,
        "timeout": 30.0, "cache_salt": "mine", "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    reply = client.chat.completions.create(
        model="parrot", messages=HELLO, temperature=0.5, top_p=0.9, presence_penalty=0.1, frequency_penalty=0.1, seed=7,
        logit_bias={"100": -1.5}, user="me", metadata={"a": "b"}, store=False, extra_body=extra,
    )  # fmt: skip
    assert reply.choices[0].message.content == HELLO[0]["content"]


def test_a_salt_keeps_prompts_apart(client) -> None:
    messages = [{"role": "user", "content": "word " * 60}]
    for salt, cached in (("one", False), ("one", True), ("two", False)):
        reply = client.chat.completions.create(model="parrot", messages=messages, extra_body={"cache_salt": salt})
        assert (reply.usage.prompt_tokens_details.cached_tokens > 0) is cached


def test_completions(client) -> None:
    reply = client.completions.create(model="parrot", prompt="one two three", max_tokens=6)
    assert reply.choices[0].text == "one two threeone two three" and reply.choices[0].finish_reason == "length"
    reply = client.completions.create(model="parrot", prompt=["one two", "red green blue"], max_tokens=2, n=2)
    assert [choice.text for choice in reply.choices] == ["one two", "one two", "red green", "red green"]
    assert reply.usage.prompt_tokens == 5 and reply.usage.completion_tokens == 8
    ids = client.completions.create(model="parrot", prompt=[[504, 505], [506]], max_tokens=1)
    assert len(ids.choices) == 2


def test_completions_stream_and_echo(client) -> None:
    chunks = client.completions.create(model="parrot", prompt="one two", max_tokens=2, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one twoone two"


def test_echo_with_logprobs_scores_the_prompt(client) -> None:
    reply = client.completions.create(model="parrot", prompt="one two three", max_tokens=0, echo=True, logprobs=1)
    logprobs = reply.choices[0].logprobs
    assert reply.choices[0].text == "one two three" and logprobs.tokens == ["one", " two", " three"]
    assert logprobs.token_logprobs == [None, -0.5, -0.5] and logprobs.text_offset == [0, 3, 7]
    assert reply.usage.completion_tokens == 0


def test_text_offsets_point_into_the_echoed_text(client) -> None:
    prompt: Any = "one<|im_end|> 😀🧵 two"
    options: Any = {"model": "parrot", "max_tokens": 12, "logprobs": 1, "extra_body": {"ignore_eos": True}}
    for streamed in (False, True):
        if streamed:
            chunks = list(client.completions.create(prompt=prompt, stream=True, **options))
            text = "".join(chunk.choices[0].text for chunk in chunks)
            told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
            tokens = [token for one in told for token in one.tokens]
            offsets = [offset for one in told for offset in one.text_offset]
        else:
            choice = client.completions.create(prompt=prompt, echo=True, **options).choices[0]
            text, tokens, offsets = choice.text, choice.logprobs.tokens, choice.logprobs.text_offset
        assert offsets == sorted(offsets) and any(token.startswith("bytes:") for token in tokens), tokens
        for token, offset in zip(tokens, offsets, strict=True):
            if not token.startswith("bytes:") and token != "<|im_end|>":
                assert text.startswith(token, offset), (token, offset, text)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]


def test_a_tool_call_whole_and_streamed(client) -> None:
    messages = [{"role": "user", "content": "Let me see. " + CALL}]
    choice = client.chat.completions.create(model="parrot", messages=messages, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    call = choice.message.tool_calls[0]
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Bern", "days": 2}
    arguments, names, pieces = "", [], 0
    for chunk in client.chat.completions.create(model="parrot", messages=messages, tools=TOOLS, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            names += [part.function.name] if part.function.name else []
            arguments += part.function.arguments or ""
            pieces += 1
    assert names == ["weather"] and json.loads(arguments) == {"city": "Bern", "days": 2} and pieces > 3


def test_without_tools_or_with_none_a_call_is_text(client) -> None:
    messages = [{"role": "user", "content": CALL}]
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = client.chat.completions.create(model="parrot", messages=messages, **options).choices[0]
        assert choice.message.content == CALL and choice.message.tool_calls is None


def test_tool_results_go_back_in(client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "now?"}]},
    ]
    reply = client.chat.completions.create(model="parrot", messages=messages, tools=TOOLS)
    assert reply.choices[0].message.content == "And\nnow?"
