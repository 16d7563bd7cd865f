"""What an honest Retry-After is computed from, who gives way when the queue is full, and how long a reader may take."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.client.throughput import ThroughputEstimate


def test_the_pace_is_what_was_measured_while_there_was_work() -> None:
    throughput = ThroughputEstimate()
    assert throughput.seconds_for(3) == 3.0, "nothing is known yet"
    for second in range(11):
        throughput.record(float(second), 4 * second)  # idle time between beats does not show in busy seconds
    assert throughput.seconds_for(8) == pytest.approx(2.0)
    for second in range(11, 100):
        throughput.record(float(second), 40 + (second - 10))  # it slowed down to one a second, a minute and more ago
    assert throughput.seconds_for(8) == pytest.approx(8.0, rel=0.1)
    throughput.record(0.5, 1)  # another engine
    assert throughput.seconds_for(2) == 2.0
    throughput.record(20.5, 1)
    assert throughput.seconds_for(1) == pytest.approx(20.0), "none has ended since: at least as long as we have watched"


def test_a_refusal_names_the_measured_time(tmp_path: Path) -> None:
    for package in ("msgspec", "zmq", "fastapi", "prometheus_client", "uvicorn", "tokenizers"):
        pytest.importorskip(package)
    import asyncio

    from quire.engine.host import wire
    from tests.fuzz.fake_server import FakeServer

    async def play() -> None:
        fake = FakeServer(tmp_path)
        client = fake.server.fleet.lead.client
        client.throughput.record(0.0, 0)
        client.throughput.record(30.0, 20)  # two in three seconds, while it worked
        client.beat = wire.Beat(waiting=8)
        fake.server.generation._max_open = 0
        headers: dict[str, str] = {}
        status, answer = await fake.post("/v1/completions", b'{"prompt": "x"}', reply_headers=headers)
        assert status == 429 and b"queue_full" in answer and headers["retry-after"] == "12"

    asyncio.run(play())


def test_an_engine_that_beats_often_is_not_remembered_for_ever() -> None:
    throughput = ThroughputEstimate()
    for beat in range(100_000):
        throughput.record(beat / 1000, beat // 10)
    assert len(throughput._marks) < 1000
    assert throughput.seconds_for(100) == pytest.approx(1.0, rel=0.02)


def test_the_least_important_and_newest_give_way_and_only_if_that_is_enough() -> None:
    pytest.importorskip("zmq")
    import asyncio

    from quire.client.engine_client import EngineClient
    from quire.types import Delta
    from tests.pure.test_supervisor import request

    async def play() -> None:
        client = EngineClient()
        tickets = {
            name: client.submit([[request(name, priority=priority, arrival=arrival)]])
            for name, priority, arrival in (("a", 1, 1.0), ("b", 5, 2.0), ("c", 5, 3.0), ("d", 9, 0.0))
        }
        client._deliver(Delta("d", [7]))  # it has begun, so it stays
        assert not client.shed(5, 1), "an equal does not give way"
        assert not client.shed(0, 4) and len(client.live) == 4, "all or none"
        assert client.shed(1, 1) and list(client.live) == ["a", "b", "d"]
        (delta,) = await tickets["c"].next()
        assert delta.error_code == "queue_full" and tickets["c"].done

    asyncio.run(play())


def test_a_send_that_waits_too_long_gives_the_reader_up() -> None:
    pytest.importorskip("starlette")
    import asyncio

    from quire.server.http.replies import ClientSink, TooSlow

    async def play() -> None:
        sent: list[object] = []

        async def send(message: object) -> None:
            sent.append(message)
            if len(sent) > 1:
                await asyncio.Event().wait()

        reader = ClientSink(send, 0.01)  # type: ignore[arg-type]
        await reader.send_frame(b"first")
        for _ in range(2):
            with pytest.raises(TooSlow):
                await reader.send_frame(b"second")
        assert len(sent) == 2, "once given up, nothing more is tried"

    asyncio.run(play())
