"""Bodies that try to cost more than they weigh: many values, long texts, large numbers of samples, wrong at the end.

A case is a route and a body grown from a seed of `HttpBodies`. A finding is one that takes the event loop longer in one
turn, or makes more memory resident, than its bytes allow.
"""

from __future__ import annotations

import asyncio
import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

from tests.fuzz.cost import Cost, Meter
from tests.fuzz.fake_server import FakeServer
from tests.fuzz.mutate import STRANGE
from tests.fuzz.targets import Fuzzed, HttpBodies

TURN_SECONDS, TURN_PER_BYTE = 0.04, 0.5e-6  # processor time of the longest turn: a floor, and what each byte adds
RESIDENT, RESIDENT_PER_BYTE = 24 << 20, 64
SIZES = (100, 1_000, 10_000, 60_000, 60_000, 200_000, 200_000, 2_000_000)  # bytes, about
TEXTS = ("a", "word ", "<|im_end|>", "\u6f22", "\n", "[", "ab" * 40)


class Amplification(Fuzzed):
    """The whole application with its text workers; the stub of the engine is not counted."""

    name = "amplify"

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._seeds = HttpBodies.seeds()
        self._meter = Meter()
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(self._start(folder))

    async def _start(self, folder: Path) -> FakeServer:
        server = FakeServer(folder, with_workers=True, max_len=8192)
        await server.work.start()
        for path, body in self._seeds:  # what is made at a first request is no case's cost
            await server.post(path, json.dumps(body).encode())
        await server.post("/v1/completions", json.dumps({"prompt": "x" * 100_000}).encode())
        return server

    def make(self, rng: random.Random) -> bytes:
        path, body = rng.choice(self._seeds)
        body = deepcopy(body)
        for _ in range(rng.choice((1, 1, 2))):
            _grow(rng, body, rng.choice(SIZES))
        return path.encode() + b"\n" + json.dumps(body).encode("utf-8", "surrogatepass")

    def run(self, case: bytes) -> None:
        path, _, body = case.partition(b"\n")
        problem = ""
        for _ in range(2):  # a turn that the machine made long, or memory that was taken once, is not found twice
            work = lambda: self._server.post(path.decode("latin-1"), body)  # noqa: E731
            (status, answer), cost = self._loop.run_until_complete(self._meter.measure(work))
            problem = _problem(len(body), status, answer, cost)
            if not problem:
                return
        raise AssertionError(problem)

    def close(self) -> None:
        self._loop.run_until_complete(self._server.work.close())


def _problem(size: int, status: int, answer: bytes, cost: Cost) -> str:
    if status >= 500 or status == 0:
        return f"answered with {status}: {answer[:300]!r}"
    if status >= 400 and len(answer) > 4096:
        return f"an error of {len(answer)} bytes"
    if cost.longest_turn > TURN_SECONDS + TURN_PER_BYTE * size:
        return f"{size} bytes held the loop up for {cost.longest_turn:.3f} s of processor time"
    if cost.resident > RESIDENT + RESIDENT_PER_BYTE * size:
        return f"{size} bytes made {cost.resident} bytes resident"
    return ""


def _grow(rng: random.Random, body: dict[str, Any], size: int) -> None:
    """Make one place of the body large."""
    parent, key = _place(rng, body)
    value = parent[key]
    kind = rng.randrange(6)
    if kind == 0:
        text = rng.choice(TEXTS)
        parent[key] = text * (size // len(text.encode()) + 1)
    elif kind == 1 or isinstance(value, list):
        item = deepcopy(rng.choice(value) if isinstance(value, list) and value else value)
        count = size // (len(json.dumps(item)) + 2) + 1
        # Copies: a second growth of one object that stands everywhere would make bodies of gigabytes.
        parent[key] = [deepcopy(item) for _ in range(count)] + (
            [deepcopy(rng.choice(STRANGE))] if rng.random() < 0.5 else []
        )
    elif kind == 2:
        parent[key] = [rng.choice((1, 65, 7))] * (size // 3 + 1) + ([-1] if rng.random() < 0.5 else [])
    elif kind == 3:
        parent[key] = {f"k{index}": rng.choice((1, "x", [])) for index in range(size // 9 + 1)}
    elif kind == 4:
        body.update({f"unknown_{index}": 1 for index in range(size // 16 + 1)})
    else:
        name, grown = rng.choice(_fields(size))
        body[name] = grown


def _fields(size: int) -> list[tuple[str, Any]]:
    long = "x" * min(4096, size // 64 + 1)
    return [
        ("stop", [f"{index}{long}"[:4096] for index in range(64)]),
        ("bad_words", [f"{index}{long[: size // 1024 + 1]}" for index in range(1024)]),
        ("dry_breakers", [f"{index}{long}"[:4096] for index in range(64)]),
        ("dry_multiplier", 1.0),
        ("logit_bias", {str(index % 250).zfill(1 + index // 250): 1.0 for index in range(min(2000, size // 9))}),
        ("n", 128),
        ("n", 64),
        ("prompt_logprobs", 64),
        ("prompt_logprobs", 5),
        ("logprobs", 64),
        ("metadata", {"a": [[1]] * (size // 5)}),
        ("prompt", [[65] * (size // 64)] * 16),
        ("prompt", ["word " * (size // 100)] * 20),
        ("input", ["word " * (size // 500)] * 100),
    ]


def _place(rng: random.Random, body: dict[str, Any]) -> tuple[Any, Any]:
    """A container at some depth of the body, and the key or index of a value in it."""
    parent: Any = body
    key: Any = rng.choice(list(body))
    while isinstance(value := parent[key], (dict, list)) and value and rng.random() < 0.7:
        parent, key = value, rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    return parent, key
