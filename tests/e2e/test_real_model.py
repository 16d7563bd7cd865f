"""The real small model behind both clients: what only a model can show."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.conftest import KEY, Started, need

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def client(real: Started):  # type: ignore[no-untyped-def]
    need("openai")
    from openai import OpenAI

    return OpenAI(base_url=f"{real.url}/v1", api_key=KEY, max_retries=0, timeout=120)


def test_a_seeded_answer_is_the_same_whole_and_streamed(client) -> None:
    options = {"model": "smollm2", "messages": QUESTION, "max_tokens": 12, "seed": 5, "temperature": 0.7}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and text
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 16


def test_the_model_knows_paris(client) -> None:
    reply = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=8, temperature=0)
    assert "Paris" in reply.choices[0].message.content


def test_logprobs_are_the_models(client) -> None:
    reply = client.completions.create(model="smollm2", prompt="The capital of France is", max_tokens=2, logprobs=2,
                                      echo=True, temperature=0)  # fmt: skip
    logprobs = reply.choices[0].logprobs
    assert "".join(logprobs.tokens) == reply.choices[0].text and logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])


def test_openais_client_on_every_route(client) -> None:
    """Whole and streamed give the same greedy words; what a route answers is what the other says of it."""
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").object == "model"
    raw = {"model": "smollm2", "prompt": "One, two, three,", "max_tokens": 5, "temperature": 0}
    whole = client.completions.create(**raw).choices[0].text
    assert "four" in whole
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**raw, stream=True)) == whole
    asked = {"model": "smollm2", "temperature": 0, "max_output_tokens": 8}
    reply = client.responses.create(**asked, input=QUESTION[0]["content"])
    assert "Paris" in reply.output_text
    events = list(client.responses.create(**asked, input=QUESTION[0]["content"], stream=True))
    assert events[0].type == "response.created" and events[-1].response.output_text == reply.output_text
    assert client.responses.retrieve(reply.id).output_text == reply.output_text
    assert client.responses.input_items.list(reply.id).data[0].content[0].text == QUESTION[0]["content"]
    more = client.responses.create(**asked, input="And of Italy?", previous_response_id=reply.id)
    assert more.usage.input_tokens > reply.usage.total_tokens and more.usage.input_tokens_details.cached_tokens >= 32
    client.responses.delete(reply.id)
    vectors = client.embeddings.create(model="smollm2", input=["a cat", "a dog"]).data
    assert len(vectors) == 2 and len(vectors[0].embedding) == len(vectors[1].embedding) > 100


def test_anthropics_client(real: Started) -> None:
    need("anthropic")
    from anthropic import Anthropic

    client = Anthropic(base_url=real.url, api_key=KEY, max_retries=0, timeout=120)
    asked = {"model": "smollm2", "max_tokens": 6, "messages": QUESTION, "extra_body": {"temperature": 0}}
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text and final.content[0].text == text and final.usage.output_tokens <= 6
    whole = client.messages.create(**asked)
    assert whole.content[0].text == text
    count = client.messages.count_tokens(model="smollm2", messages=QUESTION).input_tokens
    assert count == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_text_routes(real: Started) -> None:
    import httpx

    with httpx.Client(base_url=real.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as http:
        shown = http.post("/render", json={"messages": QUESTION}).json()
        assert QUESTION[0]["content"] in shown["prompt"] and shown["count"] == len(shown["tokens"])
        given = {"prompt": shown["prompt"], "add_special_tokens": False}
        assert http.post("/tokenize", json=given).json()["tokens"] == shown["tokens"]
        assert http.post("/detokenize", json={"tokens": shown["tokens"]}).json()["prompt"] == shown["prompt"]


def test_the_http_process_has_no_torch(real: Started) -> None:
    maps = Path(f"/proc/{real.process.pid}/maps").read_text()
    assert "libtorch" not in maps and "zmq" in maps.lower()


def test_structured_output(client) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
              "required": ["city", "big"], "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    reply = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=48, temperature=0,
                                           response_format=form)  # fmt: skip
    value = json.loads(reply.choices[0].message.content)
    assert set(value) == {"city", "big"} and isinstance(value["big"], bool)
    for structure, pattern in (({"regex": "[a-c]{3}"}, "[a-c]{3}"), ({"choice": ["Rome", "Oslo"]}, "Rome|Oslo")):
        reply = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=12,
                                               extra_body={"structured_outputs": structure})  # fmt: skip
        assert re.fullmatch(pattern, reply.choices[0].message.content)


def test_a_required_tool_is_called_whatever_the_model_would_say(client) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {
        "type": "object", "properties": {"country": {"enum": ["France", "Italy"]}}, "required": ["country"],
        "additionalProperties": False}}}  # fmt: skip
    reply = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=96, temperature=0,
                                           tools=[tool], tool_choice="required", parallel_tool_calls=False)  # fmt: skip
    call = reply.choices[0].message.tool_calls[0]
    assert call.function.name == "look_up"
    assert json.loads(call.function.arguments)["country"] in ("France", "Italy")


def ask(client, **structure):  # type: ignore[no-untyped-def]
    extra = {"structured_outputs": structure}
    return client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=2, extra_body=extra)


def test_a_wrong_structure_is_refused(client) -> None:
    import openai

    for structure in ({"regex": "("}, {"grammar": "start: nothing"}, {"json": {"type": "no-such-type"}}):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, **structure)
        assert caught.value.body["code"] == "invalid_schema"


def test_a_hostile_structure_is_refused_or_bounded_while_others_go_on(client) -> None:
    import openai

    deep: dict = {"type": "string"}
    for _ in range(150):
        deep = {"type": "array", "items": deep, "minItems": 3}
    hostile = (
        {"regex": "(a|b){1,10000}c{1,10000}d{1,10000}" * 20},
        {"regex": "(a*)*" * 50 + "b"},
        {"json": deep},
        {"choice": [f"{number:06d}" for number in range(1024)]},
    )
    with ThreadPoolExecutor(len(hostile)) as pool:
        asked = [pool.submit(ask, client, **structure) for structure in hostile]
        other = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=2, temperature=0)
        assert other.choices[0].message.content
        for one in asked:
            try:
                assert one.result(60).choices
            except openai.BadRequestError as refused:
                assert refused.body["code"] in ("invalid_schema", "grammar_too_complex")
