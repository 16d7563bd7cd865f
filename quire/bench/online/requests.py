"""Requests of an online benchmark as bytes, with prompts generated from a seed or read from a file.

`quire bench online` makes all requests before the measurement. Prompts of traces are built block by block: equal block
ids give equal tokens (and text), so that a server's prefix cache has the same hits as in the real traffic.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.online.arrivals import Arrival, bad_line, json_object, read_lines
from quire.bench.workloads import is_integer
from quire.types import QuireError

LOWEST_ID, HIGHEST_ID = 1000, 9999  # contains no special tokens in any known vocabulary
MAX_BODIES = 1 << 30  # total bytes of all requests
PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
_ENGLISH = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name"
)
WORDS = tuple(_ENGLISH.split())  # one token each in most vocabularies

# ---------------------------------------------------------------------------------------------------------------------
# Prompts


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Read one JSON object per line: prompt, prompt_token_ids or messages, and optionally max_tokens, temperature and
    seed."""
    prompts: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(read_lines(file, path), start=1):
                if line.strip():
                    try:
                        prompts.append(_check_prompt(json_object(line)))
                    except ValueError as error:
                        raise bad_line(path, number, str(error)) from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise QuireError("bad_file", f"The prompts in {path} can't be read: {why}.", "Check the path.") from None
    if not prompts:
        raise QuireError("bad_file", f"There are no prompts in {path}.", 'Each line is {"prompt": "some text"}.')
    return prompts


def _check_prompt(entry: dict[str, Any]) -> dict[str, Any]:
    """Return `entry` if its fields are known and unambiguous. The server checks their values."""
    given = [name for name in PROMPT_FIELDS if name in entry]
    if len(given) != 1:
        raise ValueError("it needs one of prompt, prompt_token_ids and messages")
    if unknown := set(entry) - {*PROMPT_FIELDS, "max_tokens", "temperature", "seed"}:
        raise ValueError(f"it has an unknown field {sorted(unknown)[0]!r:.80}")
    if not isinstance(entry[given[0]], str if given[0] == "prompt" else list):
        raise ValueError(f"{given[0]} has the wrong type")
    if "max_tokens" in entry and (not is_integer(entry["max_tokens"]) or entry["max_tokens"] < 1):
        raise ValueError("max_tokens is not a whole number of at least 1")
    return entry


def make_tokens(arrival: Arrival, index: int, seed: int) -> list[int]:
    """Return the token ids of one prompt. Without block ids, no two prompts share a prefix."""
    if not arrival.blocks:
        return _draw(f"{seed}/request/{index}/{arrival.prompt_len}", arrival.prompt_len)
    tokens: list[int] = []
    for block in arrival.blocks[:-1]:
        tokens += _draw(f"{seed}/block/{block}", min(arrival.block_len, arrival.prompt_len - len(tokens)))
    return tokens + _draw(f"{seed}/block/{arrival.blocks[-1]}", arrival.prompt_len - len(tokens))


def _draw(origin: str, count: int) -> list[int]:
    return random.Random(origin).choices(range(LOWEST_ID, HIGHEST_ID + 1), k=count)


def make_text(tokens: Sequence[int]) -> str:
    """Return one English word per token id; equal ids give equal words."""
    return " ".join(WORDS[token % len(WORDS)] for token in tokens)


# ---------------------------------------------------------------------------------------------------------------------
# Requests


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """An encoded request and the time to send it."""

    at_s: float
    path: str
    body: bytes
    output_len: int  # its max_tokens


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Parameters that all requests of a run share."""

    model: str
    chat: bool  # chat messages instead of token ids; the number of prompt tokens is then approximate
    temperature: float
    ignore_eos: bool  # gives answers their full length; not every server supports it
    seed: int


def make_requests(
    arrivals: Sequence[Arrival], options: RequestOptions, prompts: Sequence[dict[str, Any]] = ()
) -> list[TimedRequest]:
    """Encode every request. `prompts` from a file replace generated ones and repeat from the start if they are too
    few."""
    requests, num_bytes = [], 0
    for index, arrival in enumerate(arrivals):
        entry = prompts[index % len(prompts)] if prompts else _made_prompt(arrival, index, options)
        request = _make_request(arrival, index, entry, options)
        num_bytes += len(request.body)
        if num_bytes > MAX_BODIES:
            what = f"The first {index + 1} requests hold more than {MAX_BODIES >> 30} GiB."
            raise QuireError("too_large", what, "Lower --requests, --input-len or --scale-len.")
        requests.append(request)
    return requests


def _made_prompt(arrival: Arrival, index: int, options: RequestOptions) -> dict[str, Any]:
    tokens = make_tokens(arrival, index, options.seed)
    if options.chat:
        return {"messages": [{"role": "user", "content": make_text(tokens)}]}
    return {"prompt_token_ids": tokens}


def _make_request(arrival: Arrival, index: int, entry: dict[str, Any], options: RequestOptions) -> TimedRequest:
    output_len = entry.get("max_tokens", arrival.output_len)
    body: dict[str, Any] = {
        "model": options.model,
        "max_tokens": output_len,
        "temperature": entry.get("temperature", options.temperature),
        "seed": entry.get("seed", (options.seed + index) % (1 << 31)),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.ignore_eos:
        body["ignore_eos"] = True
    chat = "messages" in entry or ("prompt" in entry and options.chat)
    if chat:
        body["messages"] = entry.get("messages") or [{"role": "user", "content": entry["prompt"]}]
    else:
        body["prompt"] = entry.get("prompt", entry.get("prompt_token_ids"))
    encoded = json.dumps(body, separators=(",", ":")).encode()
    return TimedRequest(arrival.at_s, "/chat/completions" if chat else "/completions", encoded, output_len)
