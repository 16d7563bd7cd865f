"""The page's live feed of the engine: server-sent events, two per second and viewer.

With keys configured, the complete feed needs the admin key. Other viewers get their own requests and the server's
health, and nothing that depends on other callers.

A sample holds counters, from which the page computes rates. Samples are taken continuously and kept for five minutes,
so that a new viewer sees the recent past at no cost. The shapes of steps come from the engine and are forwarded
unchanged.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import islice
from typing import Any

import msgspec

from quire.client.engine_client import LiveRequest
from quire.engine.limits import StepShape
from quire.server.http.encoding import named_event, to_json
from quire.server.http.errors import STATUS_BY_CODE, ApiError
from quire.server.metrics import SECONDS, TOKEN_SECONDS
from quire.server.ops_routes import stats_body
from quire.server.page.history import History
from quire.server.state import Server

TICK = 0.5  # seconds between two events
KEPT = 600  # samples: five minutes
KEPT_STEPS = 256
MAX_VIEWERS = 16
MAX_OPEN = 50  # open requests shown
TTFT, TPOT = "quire_ttft_seconds_bucket", "quire_tpot_seconds_bucket"
FAILURES, HANGUPS = "quire_failures_total", "quire_disconnects_total"
REFUSED = "refused"  # failures that are the client's fault
# Index of the bucket by its upper bound.
PLACES = {
    TTFT: {bound: place for place, bound in enumerate((*SECONDS, math.inf))},
    TPOT: {bound: place for place, bound in enumerate((*TOKEN_SECONDS, math.inf))},
}


class LiveFeed:
    """Samples the engine and streams the samples to viewers."""

    def __init__(self, server: Server, history: History, clock: Callable[[], float] = time.time):
        self._server, self._history, self._clock = server, history, clock
        self._metrics = server.metrics.registry.restricted_registry([TTFT, TPOT, FAILURES, HANGUPS])
        # Time and JSON text of each sample: as dictionaries five minutes of them take three megabytes.
        self._samples: deque[tuple[float, msgspec.Raw]] = deque(maxlen=KEPT)
        self._steps: deque[StepShape] = deque(maxlen=KEPT_STEPS)
        self._num_viewers = 0

    def check_room(self) -> None:
        if self._num_viewers >= MAX_VIEWERS:
            message = f"{MAX_VIEWERS} pages watch the engine already. Close one of them."
            raise ApiError(429, "too_many_viewers", message, headers={"retry-after": "5"})

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            self._take_sample()
            await asyncio.sleep(TICK)

    def shows_all(self, key: str | None) -> bool:
        """Whether the viewer gets the complete feed: with the admin key, or if no keys are configured."""
        server = self._server
        return server.admin_keys.opens(key) or not (server.keys or server.admin_keys)

    async def own_events(self, caller: bytes | None) -> AsyncIterator[bytes]:
        """One caller's events until it disconnects or the server shuts down. None: the caller has no identity."""
        self._num_viewers += 1
        last_record = 0
        try:
            yield named_event("hello", {**self._hello(), "whole": False})
            while not self._server.draining:
                records = self._history.since_of(caller, last_record)
                frame = named_event("requests", records) if records else b""
                last_record = records[-1]["seq"] if records else last_record
                frame += named_event("state", {"problem": self._server.health()["problem"]})
                yield frame + named_event("open", self._open_of(caller))
                await asyncio.sleep(TICK)
            yield named_event("bye", {"why": "The server is shutting down."})
        finally:
            self._num_viewers -= 1

    async def events(self) -> AsyncIterator[bytes]:
        """The complete feed until the viewer disconnects or the server shuts down."""
        self._num_viewers += 1
        last_time, last_record, last_step = 0.0, 0, 0
        try:
            yield named_event("hello", {**self._hello(), "whole": True})
            while not self._server.draining:
                self._take_sample()
                samples = [sample for at, sample in self._samples if at > last_time]
                records = self._history.since(last_record)
                steps = [step for step in self._steps if step.step > last_step]
                last_step = self._steps[-1].step if self._steps else 0
                frame = named_event("samples", samples)
                frame += named_event("steps", steps) if steps else b""
                frame += named_event("open", self._open())
                if records:
                    frame += named_event("requests", records)
                    last_record = records[-1]["seq"]
                last_time = self._samples[-1][0]
                yield frame
                await asyncio.sleep(TICK)
            yield named_event("bye", {"why": "The server is shutting down."})
        finally:
            self._num_viewers -= 1

    def _hello(self) -> dict[str, Any]:
        stats = stats_body(self._server)
        return {
            "model": stats["model"],
            "limits": stats["limits"],
            "started": self._server.created,
            "ttft_bounds": SECONDS,
            "tpot_bounds": TOKEN_SECONDS,
        }

    def _take_sample(self) -> None:
        now = round(self._clock(), 3)
        if self._samples and 0 <= now - self._samples[-1][0] < TICK * 0.8:
            return  # the last sample is recent enough
        self._take_steps()
        health = self._server.health()
        sample = {
            "t": round(now, 3),
            "beat_age": health["step_age_seconds"],
            "problem": health["problem"],
            **stats_body(self._server)["engine"],
            **self._read_metrics(),
        }
        del sample["recent"]  # sent as steps
        self._samples.append((now, msgspec.Raw(to_json(sample))))

    def _take_steps(self) -> None:
        recent = self._server.fleet.lead.client.beat.recent
        last = self._steps[-1].step if self._steps else 0
        if recent and recent[-1].step < last:  # a replaced engine restarts its count
            self._steps.clear()
            last = 0
        self._steps.extend(step for step in recent if step.step > last)

    def _read_metrics(self) -> dict[str, Any]:
        """Totals over all routes. Buckets are cumulative, as in Prometheus; the last bound is infinity."""
        buckets = {name: [0] * len(places) for name, places in PLACES.items()}
        totals = {FAILURES: 0, HANGUPS: 0, REFUSED: 0}
        for family in self._metrics.collect():
            for one in family.samples:
                if one.name in buckets:
                    buckets[one.name][PLACES[one.name][float(one.labels["le"])]] += int(one.value)
                elif one.name in totals:
                    is_ours = one.name != FAILURES or _is_ours(one.labels["code"])
                    totals[one.name if is_ours else REFUSED] += int(one.value)
        shown = {"failures": totals[FAILURES], "refused": totals[REFUSED], "hangups": totals[HANGUPS]}
        return {"ttft": buckets[TTFT], "tpot": buckets[TPOT], **shown}

    def _open(self) -> list[dict[str, Any]]:
        """Open requests, oldest first, without any of their text."""
        return _shown(one for _, one in self._server.fleet.live())

    def _open_of(self, caller: bytes | None) -> list[dict[str, Any]]:
        """One caller's open requests: their salt begins with the caller's tenant id, unless callers share prefixes."""
        if caller is None or self._server.config.server.share_prefixes:
            return []
        return _shown(one for _, one in self._server.fleet.live() if one.request.salt.startswith(caller))


def _shown(live: Iterable[LiveRequest]) -> list[dict[str, Any]]:
    now = time.monotonic()  # the clock of `Request.arrival`
    return [
        {
            "id": one.request.id,
            "prompt_tokens": one.request.prompt_len,
            "output_tokens": len(one.delivered),
            "seconds": round(now - one.request.arrival, 2),
        }
        for one in islice(live, MAX_OPEN)
    ]


def _is_ours(code: str) -> bool:
    """Whether an error is the server's fault and not the client's."""
    return code == "internal_error" or STATUS_BY_CODE.get(code, 400) >= 500
