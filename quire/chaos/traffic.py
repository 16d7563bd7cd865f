"""The requests of a chaos run, generated from its seed.

Every reply is streamed with the log-probability of each token, so that it can be compared with the undisturbed reply
token by token, and a difference can be distinguished from a near-tie.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from quire.bench.online.streamed_chat import WORDS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer"},
        "kind": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 10}},
            "required": ["word"],
            "additionalProperties": False,
        },
    },
}
KINDS = ("greedy", "seeded", "long", "schema", "tool", "penalties", "several", "stop", "copy", "predicted")


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """One request of the run, sent many times."""

    name: str
    kind: str
    body: dict[str, Any]

    @property
    def temperature(self) -> float:
        return float(self.body["temperature"])


def make_scripts(seed: int, count: int, max_tokens: int, long_words: int) -> list[ScriptedRequest]:
    rng = random.Random(seed)
    return [_script(rng, f"s{index}", KINDS[index % len(KINDS)], max_tokens, long_words) for index in range(count)]


def _script(rng: random.Random, name: str, kind: str, max_tokens: int, long_words: int) -> ScriptedRequest:
    words = " ".join(rng.choice(WORDS) for _ in range(long_words if kind == "long" else rng.randrange(3, 12)))
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"{name}: say something about {words}."}],
        "max_tokens": rng.randrange(max_tokens // 2, max_tokens + 1),
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
    }
    if kind == "seeded":
        body |= {"temperature": 0.8, "seed": rng.randrange(1, 1 << 30)}
    elif kind == "several":
        body |= {"temperature": 0.8, "seed": rng.randrange(1, 1 << 30), "n": 2}
    elif kind == "penalties":
        body |= {"frequency_penalty": 0.3, "presence_penalty": 0.4, "min_tokens": 10}
    elif kind == "schema":
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    elif kind == "tool":
        body |= {"tools": [TOOL], "tool_choice": "required"}
    elif kind == "stop":
        body |= {"stop": ["zq", " the "], "ignore_eos": True}
    elif kind == "copy":  # drafts come from the prompt
        body["messages"] = [{"role": "user", "content": f"Repeat after me, word for word: {words}. {words}. {words}."}]
    return ScriptedRequest(name, kind, body)


def invalid_bodies(rng: random.Random) -> list[bytes]:
    """Return invalid bodies; the server must refuse each with a status of 400 to 499."""
    deep = b"[" * 2000 + b"]" * 2000
    good: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    wrong: list[dict[str, Any]] = [
        {**good, "temperature": "hot"},
        {**good, "max_tokens": -2},
        {**good, "n": 10**9},
        {**good, "unknown_field": 1},
        {**good, "logit_bias": {"-5": 1}},
        {**good, "stop": ["x"] * 1000},
        {**good, "messages": []},
        {**good, "messages": [{"role": "wizard", "content": "x"}]},
        {**good, "seed": 1 << 80},
        {**good, "structured_outputs": {"regex": "(" * 500}},
        {
            **good,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"$ref": "#/nowhere"}, "strict": True},
            },
        },
        {**good, "messages": [{"role": "user", "content": "word " * 400_000}]},
        {**good, "top_p": float("nan")},
    ]
    noise = bytes(rng.randrange(256) for _ in range(300))
    return [deep, noise, b"", b"null", b'{"messages": "\\ud800"}', *(json.dumps(one).encode() for one in wrong)]
