"""Every sampling field of every API, on the real engine with a tiny model: each is taken, checked and works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.server.anthropic.schemas import MessagesBody
from quire.server.openai.response_schemas import ResponsesBody
from quire.server.openai.schemas import ChatBody, CompletionBody
from quire.server.schemas import Sampling, Service
from tests.e2e.conftest import Started
from tests.e2e.test_operation import client_of

WORDS = "why is the sky blue? zebras jump over 12345 lazy dogs"  # more than a page of tokens
GREEDY = {"temperature": 0, "ignore_eos": True}
HOT = {"temperature": 90.0, "seed": 7, "ignore_eos": True, "top_k": 0}
END = 0  # <|end|>
Ask = Callable[..., Any]


class Api:
    """One route in the words of all of them."""

    def __init__(
        self, client: Any, path: str, prompt: dict[str, Any], length: str, stop: str, text: Callable[..., str]
    ):
        self.client, self.path, self.prompt, self.length, self.stop, self._text = (
            client,
            path,
            prompt,
            length,
            stop,
            text,
        )

    def post(self, **fields: Any) -> Any:
        renamed = {
            {"max_tokens": self.length, "stop": self.stop}.get(name, name): value for name, value in fields.items()
        }
        return self.client.post(self.path, json={self.length: 24, **self.prompt, **renamed})

    def __call__(self, **fields: Any) -> str:
        reply = self.post(**fields)
        assert reply.status_code == 200, (self.path, fields, reply.text)
        return self._text(reply.json())

    def count(self, **fields: Any) -> int:
        """Output tokens."""
        usage = self.post(**fields).json()["usage"]
        return usage.get("completion_tokens", usage.get("output_tokens"))


MESSAGES = [{"role": "user", "content": WORDS}]
APIS = {
    "completions": ("/v1/completions", {"prompt": WORDS}, "max_tokens", "stop", lambda r: r["choices"][0]["text"]),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}, "max_completion_tokens", "stop",
             lambda r: r["choices"][0]["message"]["content"]),
    "responses": ("/v1/responses", {"input": WORDS, "store": False}, "max_output_tokens", "stop",
                  lambda r: "".join(part["text"] for item in r["output"] for part in item["content"])),
    "messages": ("/v1/messages", {"messages": MESSAGES}, "max_tokens", "stop_sequences",
                 lambda r: "".join(block["text"] for block in r["content"])),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(APIS))
def ask(request: pytest.FixtureRequest, tiny: Started):  # type: ignore[no-untyped-def]
    with client_of(tiny) as client:
        yield Api(client, *APIS[request.param])


@pytest.fixture(scope="module")
def plain(ask: Api) -> str:
    """What it says by itself; a random model soon repeats itself."""
    return ask(**GREEDY)


def ids_of(ask: Api, text: str) -> list[int]:
    return ask.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]


def test_every_field_is_in_every_body() -> None:
    for body in (ChatBody, CompletionBody, ResponsesBody, MessagesBody):
        assert set(Sampling.model_fields) <= set(body.model_fields)


def test_temperature_and_seed(ask: Api, plain: str) -> None:
    assert ask(**HOT) == ask(**HOT) != plain, "a seed gives the same again"
    assert ask(**{**HOT, "seed": 8}) != ask(**HOT)


@pytest.mark.parametrize("field", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_n_sigma": 1e-6}])
def test_filters_leave_only_the_best(ask: Api, plain: str, field: dict[str, Any]) -> None:
    assert ask(**{**HOT, **field}) == plain != ask(**HOT)


PENALTIES = [{"repetition_penalty": 50.0}, {"presence_penalty": 90.0}, {"frequency_penalty": 90.0}]


@pytest.mark.parametrize("field", PENALTIES)
def test_penalties_against_repetition(ask: Api, plain: str, field: dict[str, Any]) -> None:
    assert ask(**GREEDY, **field) != plain


OVERLOOKED = [{"dry_range": 1}, {"dry_allowed_len": 1000}, {"dry_base": 1.0, "dry_multiplier": 1e-6},
              {"dry_breakers": ["x"]}]  # fmt: skip


def test_dry(ask: Api) -> None:
    always_x = {**GREEDY, "logit_bias": {str(ids_of(ask, "x")[0]): 100, str(ids_of(ask, "y")[0]): 50}}
    assert ask(**always_x) == "x" * 24
    assert "y" in ask(**always_x, dry_multiplier=90.0), "what goes on and on is penalized"
    for field in OVERLOOKED:
        assert ask(**{**always_x, "dry_multiplier": 90.0, **field}) == "x" * 24, field


def test_bias_bad_words_and_stops(ask: Api, plain: str) -> None:
    x = ids_of(ask, "x")[0]
    assert ask(**GREEDY, logit_bias={str(x): 100}) == "x" * 24
    biased = {**GREEDY, "logit_bias": {str(x): 100, str(ids_of(ask, "y")[0]): 50}}
    assert ask(**biased, bad_words=["x"]) == "y" * 24
    assert ask(**biased, stop=["xxx"]) == "" and ask(**biased, stop=["xxx"], include_stop=True) == "xxx"
    assert ask(**biased, stop_token_ids=[x], skip_special_tokens=False) in ("", "x")
    assert ask.count(**biased, stop_token_ids=[x]) == 1


def test_where_it_ends(ask: Api) -> None:
    ends = {"temperature": 0, "logit_bias": {str(END): 100}}
    assert ask.count(**ends) == 1 and ask.count(**ends, min_tokens=5) == 6
    assert ask.count(**ends, ignore_eos=True) == 24 and ask.count(**ends, ignore_eos=True, max_tokens=3) == 3
    assert ask(**ends, ignore_eos=True) == "" or ask.path == "/v1/completions"
    shown = ask(**{**ends, "logit_bias": {"1": 100}}, skip_special_tokens=False)
    assert shown == "<|user|>" * 24 != ask(**{**ends, "logit_bias": {"1": 100}})


def test_priority_timeout_and_salt(ask: Api) -> None:
    def cached(salt: str) -> int:
        usage = ask.post(**GREEDY, cache_salt=salt, priority=-3, timeout=60).json()["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        return details.get("cached_tokens", usage.get("cache_read_input_tokens"))

    assert set(Service.model_fields) == {"model", "priority", "timeout", "cache_salt"}
    assert cached(f"{ask.path} one") == 0 and cached(f"{ask.path} one") >= 16 and cached(f"{ask.path} two") == 0


def test_samples_and_logprobs(tiny: Started) -> None:
    with client_of(tiny) as client:
        body = {"prompt": WORDS, "max_tokens": 5, "n": 3, "logprobs": 2, "prompt_logprobs": 1, **HOT}
        choices = client.post("/v1/completions", json=body).json()["choices"]
        assert len({choice["text"] for choice in choices}) == 3
        assert all(len(choice["logprobs"]["top_logprobs"][0]) in (2, 3) for choice in choices)
        prompt = choices[0]["prompt_logprobs"]
        assert prompt[0] is None and "".join(entry["token"] for entry in prompt[1:]) in WORDS
        assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 1 for entry in prompt[1:])
        chat = {"messages": MESSAGES, "max_tokens": 5, "n": 2, "logprobs": True, "top_logprobs": 3, **HOT}
        choices = client.post("/v1/chat/completions", json={**chat, "prompt_logprobs": 0}).json()["choices"]
        assert [len(choice["logprobs"]["content"]) for choice in choices] == [5, 5]
        assert len(choices[0]["logprobs"]["content"][0]["top_logprobs"]) == 3
        assert choices[0]["prompt_logprobs"][0] is None and len(choices[0]["prompt_logprobs"]) > 5
        refused = client.post("/v1/chat/completions", json={**chat, "prompt_logprobs": 0, "stream": True}).json()
        assert refused["error"]["param"] == "prompt_logprobs"


BAD = [
    ("temperature", -1),
    ("top_p", 2),
    ("top_k", -2),
    ("min_p", 3),
    ("top_n_sigma", -1),
    ("repetition_penalty", 0),
    ("presence_penalty", 1e9),
    ("frequency_penalty", -1e9),
    ("dry_multiplier", -1),
    ("dry_base", 0.5),
    ("dry_allowed_len", 0),
    ("dry_range", -1),
    ("dry_breakers", [""]),
    ("logit_bias", {"x": 1}),
    ("bad_words", [""]),
    ("stop", [""]),
    ("stop_token_ids", [-1]),
    ("include_stop", "yes"),
    ("ignore_eos", 1),
    ("min_tokens", -1),
    ("max_tokens", 0),
    ("seed", 1.5),
    ("skip_special_tokens", "no"),
    ("priority", 5000),
    ("timeout", 0),
    ("cache_salt", "x" * 257),
    ("speculate", "no"),
    ("repeat_penalty", 0),
    ("include_stop_str_in_output", "yes"),
    ("cache_prompt", False),
]


def test_every_field_is_checked(ask: Api) -> None:
    named = {name for name, _ in BAD} - {"stop", "max_tokens"} | {"model"}  # a wrong model is tried elsewhere
    assert named == set(Sampling.model_fields), "none is forgotten"
    for name, value in BAD:
        error = ask.post(**{**GREEDY, name: value})
        shown = {"max_tokens": ask.length, "stop": ask.stop}.get(name, name)
        assert error.status_code == 400, (name, error.text)
        assert error.json()["error"]["param"].partition("[")[0] in (name, shown), (name, error.text)
