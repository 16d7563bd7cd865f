"""Tests a fleet of several engines: which one gets a request, and what the server shows of all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quire.client.engine_client import EngineClient
from quire.client.fleet import Fleet, Replica
from quire.client.supervisor import Supervisor, SupervisorLimits
from quire.engine.host import wire
from quire.types import Request, SamplingParams
from tests.fuzz.fake_server import LIMITS, FakeServer


class SilentLink:
    """Takes messages and answers none."""

    pid, exit_code, num_unsent = 1, None, 0

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.ready = wire.EngineReady(260, 512, [258], {}, "tiny", "float32", {}, LIMITS)

    def send(self, message: wire.ToEngine) -> None:
        self.sent.append(message)

    def send_payload(self, payload: bytes) -> None:
        self.sent.append(wire.decode_to_engine(payload))


def make_replica(label: str, *, attached: bool = True) -> Replica:
    client = EngineClient()
    supervisor = Supervisor(client, lambda settings: None, {}, SupervisorLimits(1, 1.0, 1e9, None, "same"))
    if attached:
        client.attach(SilentLink())  # type: ignore[arg-type]
        supervisor.states.move("started")
    return Replica(label, client, supervisor)


def make_request(name: str) -> Request:
    return Request(name, [1, 2, 3], 3, SamplingParams(), 10)


def test_requests_go_to_the_engine_with_the_fewest_and_never_to_a_lost_one() -> None:
    async def play() -> None:
        fleet = Fleet({"a": [make_replica("0"), make_replica("1"), make_replica("2", attached=False)]})
        chosen = []
        for index in range(6):
            replica = fleet.choose()
            replica.client.submit([[make_request(f"r{index}")]])
            chosen.append(replica.label)
        assert chosen == ["0", "1", "0", "1", "0", "1"]
        assert fleet.num_live == 6 and sorted(name for name, _ in fleet.live()) == [f"r{i}" for i in range(6)]
        sent = [one.client._link.sent for one in fleet.replicas[:2]]  # type: ignore[union-attr]
        assert [len(messages) for messages in sent] == [3, 3]
        assert fleet.cancel_all() == 6
        assert [sorted(messages[-1].ids) for messages in sent] == [["r0", "r2", "r4"], ["r1", "r3", "r5"]]

    asyncio.run(play())


def test_a_model_has_replicas_of_its_own() -> None:
    first, second = make_replica("0"), make_replica("1")
    fleet = Fleet({"a": [first], "b": [second]})
    assert fleet.choose() is fleet.choose("a") is fleet.lead is first and fleet.choose("b") is second
    with pytest.raises(KeyError):
        fleet.choose("c")
    for wrong in ({}, {"a": []}, {"a": [first, make_replica("0")]}):
        with pytest.raises(AssertionError):
            Fleet(wrong)


def test_the_server_shows_each_engine_and_the_worst_health(tmp_path: Path) -> None:
    async def play() -> None:
        fake = FakeServer(tmp_path)
        other = make_replica("1")
        fake.server.fleet = Fleet({"tiny": [fake.server.fleet.lead, other]})
        fake.server.metrics = type(fake.server.metrics)()
        fake.server.metrics.watch(fake.server.fleet)
        other.client.beat = wire.Beat(running=3)
        text = fake.server.metrics.render().decode()
        assert 'quire_engine_running{engine="0"} 0.0' in text and 'quire_engine_running{engine="1"} 3.0' in text
        assert text.count("# TYPE quire_engine_running gauge") == 1, "one family holds the figures of all engines"
        assert fake.server.health()["status"] == "ok"
        other.supervisor.states.move("lost")
        assert fake.server.health()["status"] == "recovering"

    asyncio.run(play())
