"""Greedy streams whose tokens are known: each is recorded once undisturbed, then repeated and compared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from quire.bench.hostile.requests import OVERLOADED
from quire.bench.online.stream_client import Endpoint, RequestFailure
from quire.bench.online.streamed_chat import WORDS, Choice, StreamedReply, stream_chat
from quire.types import QuireError


@dataclass(slots=True)
class Counts:
    answers: int = 0
    tokens: int = 0
    lost: int = 0  # missing tokens
    wrong: int = 0  # answers with a token that differs from the recorded one
    told_to_come_back: int = 0
    longest_pause: float = 0.0
    problem: str = ""  # description of the first problem


class Streams:
    def __init__(self, endpoint: Endpoint, count: int, max_tokens: int):
        self._endpoint = endpoint
        self._bodies = [_body(number, max_tokens) for number in range(count)]
        self._expected: list[Choice] = []
        self._over = False
        self.counts = Counts()

    async def learn(self) -> None:
        """Record the answer of each stream without attacks."""
        seen = await asyncio.gather(*(stream_chat(self._endpoint, body) for body in self._bodies))
        for one in seen:
            if one.error is not None or not one.choices.get(0, Choice()).tokens:
                raise QuireError("engine_failed", f"An undisturbed stream ended with {one.error or 'no token'}.")
            self._expected.append(one.choices[0])

    def reset(self) -> None:
        self.counts = Counts()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        loops = [asyncio.create_task(self._loop(number)) for number in range(len(self._bodies))]
        try:
            yield
        finally:
            self._over = True
            await asyncio.gather(*loops)

    async def _loop(self, number: int) -> None:
        while not self._over:
            try:
                seen = await stream_chat(self._endpoint, self._bodies[number])
            except (RequestFailure, TimeoutError, OSError) as error:
                self._lose(len(self._expected[number].tokens), f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.1)
                continue
            if seen.status in OVERLOADED:
                self.counts.told_to_come_back += 1
                await asyncio.sleep(0.5)
                continue
            self._count(seen, self._expected[number])

    def _count(self, seen: StreamedReply, expected: Choice) -> None:
        counts, got = self.counts, seen.choices.get(0, Choice())
        counts.answers += 1
        counts.tokens += len(got.tokens)
        counts.longest_pause = max(counts.longest_pause, seen.longest_pause)
        if got.tokens == expected.tokens and got.text == expected.text and seen.error is None:
            return
        if got.tokens == expected.tokens[: len(got.tokens)]:
            self._lose(len(expected.tokens) - len(got.tokens), f"ended with {seen.error!r}")
        else:
            counts.wrong += 1
            counts.problem = counts.problem or "a token differs"

    def _lose(self, count: int, why: str) -> None:
        self.counts.lost += count
        self.counts.problem = self.counts.problem or why


def _body(number: int, max_tokens: int) -> dict[str, Any]:
    words = " ".join(WORDS[(number * 7 + place) % len(WORDS)] for place in range(6))
    return {
        "messages": [{"role": "user", "content": f"{number}: say something about {words}."}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 1,
        "ignore_eos": True,
    }
