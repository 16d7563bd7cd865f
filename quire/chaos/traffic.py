"""The requests of a chaos run, made from its seed, and what a client sees of each: tokens, text, end or error.

Every answer is streamed with the log-probability of each token, so that an answer can be compared with the undisturbed
one token by token, and a place where they part can be told from a near-tie.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

from quire.bench.online.stream_client import Connection, Endpoint, EventParser, Fault

CHAT = "/chat/completions"
WORDS = ("river", "stone", "engine", "paper", "lantern", "copper", "garden", "window", "letter", "market", "winter",
         "harbour", "silver", "kitchen", "bridge", "cloud", "orchard", "signal", "mountain", "thread")  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"},
                   "kind": {"enum": ["red", "green", "blue"]}},
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {
        "word": {"type": "string", "maxLength": 10}}, "required": ["word"], "additionalProperties": False}},
}  # fmt: skip
KINDS = ("greedy", "seeded", "long", "schema", "tool", "penalties", "several", "stop")


@dataclass(frozen=True, slots=True)
class Script:
    """One request, always the same."""

    name: str
    kind: str
    body: dict[str, Any]

    @property
    def temperature(self) -> float:
        return float(self.body["temperature"])


def make_scripts(seed: int, count: int, max_tokens: int, long_words: int) -> list[Script]:
    rng = random.Random(seed)
    return [_script(rng, f"s{index}", KINDS[index % len(KINDS)], max_tokens, long_words) for index in range(count)]


def _script(rng: random.Random, name: str, kind: str, max_tokens: int, long_words: int) -> Script:
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
    return Script(name, kind, body)


# ---------------------------------------------------------------------------------------------------------------------
# What comes back


@dataclass(slots=True)
class Choice:
    tokens: list[bytes] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    calls: str = ""
    finish: str | None = None


@dataclass(slots=True)
class Seen:
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: str | None = None  # the code of an error event or reply
    status: int = 0
    longest_pause: float = 0.0
    num_events: int = 0

    def take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = str(event["error"].get("code"))
            return
        self.num_events += 1
        self.usage = event.get("usage") or self.usage
        for part in event.get("choices", ()):
            choice = self.choices.setdefault(part["index"], Choice())
            delta = part.get("delta") or {}
            choice.text += (delta.get("content") or "") + (delta.get("reasoning_content") or "")
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                choice.calls += (function.get("name") or "") + (function.get("arguments") or "")
            for token in (part.get("logprobs") or {}).get("content") or ():
                choice.tokens.append(bytes(token["bytes"]))
                choice.logprobs.append(float(token["logprob"]))
            choice.finish = part.get("finish_reason") or choice.finish


async def ask(endpoint: Endpoint, body: dict[str, Any], *, leave_after: int | None = None, slow: float = 0.0,
              timeout: float = 600.0) -> Seen:  # fmt: skip
    """One streamed request to its end. `leave_after`: hang up after so many events; `slow`: seconds between reads."""
    seen = Seen()
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout), Connection(endpoint) as connection:
        seen.status, headers = await connection.request("POST", CHAT, json.dumps(body).encode())
        if seen.status != 200:
            seen.error = error_code(await connection.start_of_body(headers))
            return seen
        parser, last, finished = EventParser(), loop.time(), False
        async for part in connection.body(headers):
            for payload in parser.feed(part):  # signs of life in a pause are none
                now = loop.time()
                seen.longest_pause, last = max(seen.longest_pause, now - last), now
                if payload == "[DONE]":
                    finished = True
                else:
                    seen.take(json.loads(payload))
            if leave_after is not None and seen.num_events >= leave_after:
                return seen
            if slow:
                await asyncio.sleep(slow)
                last = loop.time()
        if not finished and seen.error is None:
            raise Fault("hung up", "the stream ended before the answer did")
    return seen


async def call(endpoint: Endpoint, method: str, path: str, body: bytes = b"", timeout: float = 60.0
               ) -> tuple[int, bytes]:  # fmt: skip
    async with asyncio.timeout(timeout), Connection(endpoint) as connection:
        status, headers = await connection.request(method, path, body)
        return status, await connection.start_of_body(headers, 1 << 22)


def error_code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, TypeError, KeyError):
        return "not an error body"


def hostile_bodies(rng: random.Random) -> list[bytes]:
    """What no client should send; each must be refused as the client's own mistake."""
    deep = b"[" * 2000 + b"]" * 2000
    good: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    wrong: list[dict[str, Any]] = [
        {**good, "temperature": "hot"},
        {**good, "max_tokens": -1},
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
