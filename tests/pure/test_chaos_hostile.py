"""Hostile requests of the chaos gate: each is counted by its kind, and an answer that is wrong fails the gate."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from quire.bench.hostile.attacks import KINDS, Tally
from quire.bench.hostile.requests import Target
from quire.bench.online.stream_client import Endpoint
from quire.chaos.hostile import HostileTraffic
from quire.chaos.report import Report

ENDPOINT = Endpoint("127.0.0.1", 1, False, "/v1", "sk")


class Answers:
    """An attack that meets one answer."""

    unsent = 0

    def __init__(self, expected: bool):
        self._expected = expected

    async def once(self, target: Target, tally: Tally) -> None:
        tally.count("request", 200, self._expected)


def test_every_kind_is_drawn() -> None:
    traffic = HostileTraffic(ENDPOINT)
    assert {kind for kind, _ in traffic._attacks} == set(KINDS)


def test_answers_are_counted_and_a_wrong_one_fails_the_gate() -> None:
    traffic, report, rng = HostileTraffic(ENDPOINT), Report(num_requests=1), random.Random(0)
    for expected in (True, False):
        traffic._attacks = [("kind", Answers(expected))]
        asyncio.run(traffic.send_one(rng, report.hostile_sent, report.hostile_wrong))
        assert report.passed is expected
    assert report.hostile_sent == Counter(kind=2) and report.hostile_wrong == {"request: 200": 1}
    assert report.to_json()["hostile_wrong"] == {"request: 200": 1}
    assert dict(report.rows())["hostile requests answered wrongly"] == "request: 200 (1)"
