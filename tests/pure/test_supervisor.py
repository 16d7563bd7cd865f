"""Engines that die: every live request goes on from what was delivered, within a budget, and nobody is tried thrice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("zmq")

import msgspec

from quire.client import supervisor
from quire.client.blame import SELF_CAUSED_SIGNALS, UNRELATED_CAUSES
from quire.client.engine_client import DeltaStream, EngineClient
from quire.client.supervisor import Supervisor, SupervisorLimits, with_less_memory
from quire.engine.host import wire
from quire.engine.host.flight_record import FlightRecorder, RecordedWorkers, read_flight_record
from quire.engine.states import PROCESS_TRANSITIONS, ProcessState, StateMachine
from quire.machine import num_memory_kills
from quire.types import Delta, FinishReason, Plan, PlanRow, QuireError, Request, SamplingParams, StepOutput

BUDGET = SupervisorLimits(max_restarts=3, window=1000.0, hang_timeout=1000.0, max_memory=None, on_memory="same")
READY = wire.EngineReady(
    100, 64, [2], {}, "m", "float32", {"groups": [{"kind": "paged", "units": 100, "page_tokens": 4}]}, {}
)


class FakeLink:
    """One life of an engine, led by the test."""

    def __init__(self, settings: Mapping[str, Any]):
        self.settings = dict(settings)
        self.ready = READY
        self.pid, self.exit_code, self.num_unsent = 1, None, 0
        self.sent: list[wire.ToEngine] = []
        self.in_flight_at_exit: set[str] = set()
        self.held = 1000
        self.stopped = False  # by a signal from outside
        self._news: asyncio.Queue[wire.FromEngine | QuireError] = asyncio.Queue()

    def send(self, message: wire.ToEngine) -> None:
        self.sent.append(message)

    def send_payload(self, payload: bytes) -> None:
        self.sent.append(wire.decode_to_engine(payload))

    async def receive(self) -> wire.FromEngine:
        message = await self._news.get()
        if isinstance(message, QuireError):
            raise message
        return message

    def memory(self) -> int:
        return self.held

    def is_stopped(self) -> bool:
        return self.stopped

    async def stop(self) -> None: ...

    async def end(self) -> None: ...

    # -- for the test

    def say(self, *deltas: Delta) -> None:
        self._news.put_nowait(wire.deltas_message(list(deltas)))

    def die(self, *aboard: str, code: str = "engine_lost", exit_code: int | None = -signal.SIGSEGV) -> None:
        self.in_flight_at_exit, self.exit_code = set(aboard), exit_code
        self._news.put_nowait(QuireError(code, "It died."))

    def submitted(self) -> dict[str, wire.Submit]:
        return {name: message for message in self.sent if isinstance(message, wire.Submit) for name in message.ids}


class Rig:
    def __init__(self, budget: SupervisorLimits = BUDGET):
        self.links: list[FakeLink] = []
        self.broken_starts, self.broken_code = 0, "engine_failed"
        self.tried: list[dict[str, Any]] = []  # settings
        self.moves: list[str] = []
        self.client = EngineClient()
        self.supervisor = Supervisor(
            self.client, self._start, {}, budget, log=lambda level, event, **fields: self.moves.append(str(fields))
        )

    async def _start(self, settings: Mapping[str, Any]) -> Any:
        self.tried.append(dict(settings))
        if self.broken_starts:
            self.broken_starts -= 1
            raise QuireError(self.broken_code, "It does not start.")
        self.links.append(FakeLink(settings))
        return self.links[-1]

    @property
    def link(self) -> FakeLink:
        return self.links[-1]

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not true():
                await asyncio.sleep(0.001)

    async def next_life(self) -> FakeLink:
        count = len(self.links)
        await self.until(lambda: len(self.links) > count and self.supervisor.states.state is ProcessState.READY)
        return self.link


def request(name: str, **fields: Any) -> Request:
    params = SamplingParams(max_tokens=10, seed=5).resolve()
    return Request(name, [1, 2, 3], 3, params, 13, frozenset({2}), 5, **fields)


def with_rig(test: Callable[[Rig], Any], budget: SupervisorLimits = BUDGET) -> None:
    async def run() -> None:
        rig = Rig(budget)
        await rig.supervisor.start()
        try:
            await test(rig)
        finally:
            await rig.supervisor.stop(at_once=True)

    asyncio.run(run())


async def tokens_of(ticket: DeltaStream, count: int) -> list[int]:
    found: list[int] = []
    async with asyncio.timeout(20):
        while len(found) < count and not ticket.done:
            found += [token for delta in await ticket.next() for token in delta.token_ids]
    return found


async def end_of(ticket: DeltaStream) -> Delta:
    async with asyncio.timeout(20):
        while True:
            for delta in await ticket.next():
                if delta.finish_reason is not None:
                    return delta


def test_a_stream_goes_on_with_the_next_engine_from_its_last_token() -> None:
    async def play(rig: Rig) -> None:
        running = rig.client.submit([[request("a", arrival=1.0, priority=3, deadline=1e12, salt=b"s")]])
        waiting = rig.client.submit([[request("b", arrival=2.0), request("c", sample_index=1, arrival=2.0)]])
        first = rig.link
        first.say(Delta("a", [7]), Delta("a", [8]))
        assert await tokens_of(running, 2) == [7, 8]
        first.die("a")
        second = await rig.next_life()
        again = second.submitted()
        assert list(again) == ["a", "b", "c"], "the oldest first"
        a = again["a"]
        assert (a.tokens, a.num_sampled, a.seed, a.resumed, a.suspect) == ([1, 2, 3, 7, 8], 2, 5, True, True)
        assert (a.arrival, a.priority, a.deadline, a.salt, a.max_len) == (1.0, 3, 1e12, b"s", 13)
        assert [again[n].first_index for n in "bc"] == [0, 1] and not again["b"].suspect and again["b"].resumed
        first.say(Delta("a", [99]))  # a dead engine's word counts for nothing
        second.say(Delta("a", [9], finish_reason=FinishReason.LENGTH))
        assert await tokens_of(running, 1) == [9] and running.done
        assert not waiting.done and rig.client.num_resumed == 3 and len(rig.supervisor.recovery_seconds) == 1

    with_rig(play)


def test_prompt_logprobs_and_cancelled_requests_are_not_repeated() -> None:
    from quire.types import TokenLogprobs

    async def play(rig: Rig) -> None:
        scored = rig.client.submit([[request("scored")]])
        stopped = rig.client.submit([[request("stopped")]])
        rig.link.say(Delta("scored", prompt_logprobs=[TokenLogprobs(2, -1.0, 1, [], [])]), Delta("stopped", [5]))
        assert await tokens_of(stopped, 1) == [5]
        stopped.cancel("stopped")  # a stop string ended it; the engine dies before it answers
        rig.link.die()
        second = await rig.next_life()
        assert second.submitted()["scored"].prompt_scored == 1 and list(second.submitted()) == ["scored"]
        end = await end_of(stopped)
        assert end.finish_reason is FinishReason.CANCELLED and end.usage is not None
        assert end.usage.completion_tokens == 1 and not scored.done

    with_rig(play)


def test_requests_that_come_while_there_is_no_engine_wait_for_the_next() -> None:
    async def play(rig: Rig) -> None:
        rig.broken_starts = 2
        rig.link.die()
        await rig.until(lambda: not rig.client.is_attached)
        late, gone = rig.client.submit([[request("late")]]), rig.client.submit([[request("gone")]])
        gone.cancel("gone")
        assert (await end_of(gone)).finish_reason is FinishReason.CANCELLED
        await rig.next_life()
        assert list(rig.link.submitted()) == ["late"] and not rig.link.submitted()["late"].resumed
        assert rig.supervisor.states.counts["died_again"] == 2 and not late.done

    with_rig(play)


def test_who_was_aboard_twice_at_one_token_is_quarantined_and_who_moved_on_is_not() -> None:
    async def play(rig: Rig) -> None:
        poison = rig.client.submit([[request("poison", arrival=1.0)]])
        lucky = rig.client.submit([[request("lucky", arrival=2.0)]])
        rig.link.die("poison", "lucky")
        await rig.next_life()
        rig.link.say(Delta("lucky", [4]))
        assert await tokens_of(lucky, 1) == [4]
        rig.link.die("poison")
        await rig.next_life()
        rig.link.die("lucky")
        await rig.next_life()
        assert list(rig.link.submitted()) == ["lucky"]
        end = await end_of(poison)
        assert (end.finish_reason, end.error_code) == (FinishReason.ERROR, "quarantined")
        codes = [failure.code for failure in rig.supervisor.errors.newest()]
        assert codes.count("quarantined") == 1 and codes.count("engine_lost") == 3

    with_rig(play)


OUTSIDE = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
PATIENT = SupervisorLimits(max_restarts=20, window=1000.0, hang_timeout=1000.0, max_memory=None, on_memory="same")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No restart waits for the ones before it."""
    monkeypatch.setattr(supervisor, "FIRST_WAIT_SECONDS", 0.0)


@pytest.mark.usefixtures("at_once")
def test_any_number_of_kills_from_outside_accuse_no_request() -> None:
    async def play(rig: Rig) -> None:
        long = rig.client.submit([[request("long")]])
        for number in OUTSIDE * 3:
            rig.link.die("long", exit_code=-number)
            assert not (await rig.next_life()).submitted()["long"].suspect, number
        rig.link.die("long")  # by its own hand: once more and it would be found, were it again
        assert (await rig.next_life()).submitted()["long"].suspect
        for number in OUTSIDE:
            rig.link.die("long", exit_code=-number)
            await rig.next_life()
        rig.link.say(Delta("long", [4], finish_reason=FinishReason.LENGTH))
        assert await tokens_of(long, 1) == [4]

    with_rig(play, SupervisorLimits(30, 1000.0, 1000.0, None, "same"))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("death", [*(-number for number in SELF_CAUSED_SIGNALS), 1, 86, 0, "memory", "engine_failed"])
def test_a_request_that_kills_the_engine_is_found_whatever_else_does(
    death: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = [0]
    monkeypatch.setattr("quire.client.supervisor.num_memory_kills", lambda: kills[0])

    async def play(rig: Rig) -> None:
        poison, lucky = rig.client.submit([[request("poison")]]), rig.client.submit([[request("lucky")]])

        async def die(*aboard: str) -> None:
            if death == "memory":
                kills[0] += 1
                rig.link.die(*aboard, exit_code=-signal.SIGKILL)
            elif isinstance(death, int):
                rig.link.die(*aboard, exit_code=death)
            else:
                rig.link.die(*aboard, code=death, exit_code=None)
            await rig.next_life()

        await die("poison", "lucky")
        assert all(submit.suspect for submit in rig.link.submitted().values()), "both run alone now"
        rig.link.die("poison", exit_code=-signal.SIGKILL)
        await rig.next_life()
        await die("poison")
        assert (await end_of(poison)).error_code == "quarantined" and not lucky.done
        assert rig.supervisor.num_restarts == 3, "two of its own and one from outside"

    with_rig(play, PATIENT)


@pytest.mark.usefixtures("at_once")
def test_a_request_is_condemned_for_a_step_it_was_alone_in_only() -> None:
    async def play(rig: Rig) -> None:
        ticket, _ = rig.client.submit([[request("a")]]), rig.client.submit([[request("b")]])
        for _ in range(3):
            rig.link.die("a", "b")
            assert set((await rig.next_life()).submitted()) == {"a", "b"}
        rig.link.die("a")
        assert list((await rig.next_life()).submitted()) == ["b"]
        assert (await end_of(ticket)).error_code == "quarantined"

    with_rig(play, PATIENT)


@pytest.mark.usefixtures("at_once")
def test_an_engine_that_was_stopped_from_outside_hangs_for_no_request() -> None:
    async def play(rig: Rig) -> None:
        rig.client.submit([[request("a")]])
        for stopped in (True, True, False):
            rig.link.stopped, rig.link.in_flight_at_exit = stopped, {"a"}
            assert (await rig.next_life()).submitted()["a"].suspect is not stopped
            assert rig.supervisor.cause is not None and rig.supervisor.cause.code == "engine_hung"

    with_rig(play, SupervisorLimits(9, 1000.0, 0.2, None, "same"))


def test_kills_for_lack_of_memory_are_counted_where_the_system_counts_them(tmp_path: Path) -> None:
    assert num_memory_kills(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "vmstat").write_text("nr_free_pages 7\noom_kill 3\n")
    assert num_memory_kills(tmp_path) == 3


def test_a_crash_loop_ends_when_the_budget_is_spent() -> None:
    async def play(rig: Rig) -> None:
        ticket = rig.client.submit([[request("a")]])
        for _ in range(BUDGET.max_restarts):
            rig.link.die()
            await rig.next_life()
        rig.link.die()
        end = await end_of(ticket)
        assert end.error_code == "engine_lost" and "It died." in (end.error or "")
        assert rig.supervisor.states.state is ProcessState.FAILED and len(rig.links) == BUDGET.max_restarts + 1
        with pytest.raises(QuireError, match="not started again"):
            rig.client.submit([[request("b")]])

    with_rig(play)


def test_a_server_that_stood_still_itself_reads_before_it_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "WATCH_SECONDS", 0.001)

    async def held_up(rig: Rig) -> None:
        now, ticks = rig.client._clock(), 0

        def expire() -> None:  # a tick begins, every third one late
            nonlocal ticks
            ticks += 1

        def memory() -> int:  # it ends: what the engine said meanwhile comes in
            if rig.client.beat_age() > 1000:
                rig.link._news.put_nowait(wire.Beat(steps=ticks))
            return 1000

        monkeypatch.setattr(rig.client, "_clock", lambda: now + 5000 * (ticks // 3))
        monkeypatch.setattr(rig.client, "expire", expire)
        monkeypatch.setattr(rig.link, "memory", memory)
        await rig.until(lambda: ticks > 30 or rig.supervisor.num_restarts > 0)
        assert rig.supervisor.num_restarts == 0 and rig.client.beat.steps == 30

    with_rig(held_up)


def test_an_engine_that_hangs_or_grows_is_replaced() -> None:
    async def hang(rig: Rig) -> None:
        rig.client.submit([[request("a")]])
        first = rig.link
        await rig.next_life()
        assert rig.supervisor.cause is not None and rig.supervisor.cause.code == "engine_hung" and first is rig.links[0]

    with_rig(hang, SupervisorLimits(1, 1000.0, 0.2, None, "same"))

    async def grow(rig: Rig) -> None:
        rig.link.held = 3000
        await rig.next_life()
        assert rig.supervisor.cause is not None and rig.supervisor.cause.code == "out_of_memory"
        assert rig.link.settings == {"num_pages": 75}, "as configured, the next engine gets a smaller pool"

    with_rig(grow, SupervisorLimits(1, 1000.0, 1000.0, 2000, "shrink"))
    assert with_less_memory({"num_pages": 8}, "shrink", READY) == {"num_pages": 6}
    lower = msgspec.structs.replace(READY, lower={"dtype": "float16"})
    assert with_less_memory({"num_pages": 8}, "precision", lower) == {"num_pages": 8, "dtype": "float16"}
    assert with_less_memory({}, "precision", READY) == {"num_pages": 75}, "no lower precision: a smaller pool"
    assert with_less_memory({"num_pages": 8}, "same", lower) == {"num_pages": 8}
    assert with_less_memory({"num_pages": 8}, "shrink", READY, 7) == {"num_pages": 7}
    assert with_less_memory({"num_pages": 8}, "shrink", READY, 8) == {"num_pages": 8}


def test_a_pool_shrinks_to_half_and_to_what_the_longest_request_needs() -> None:
    async def shrink(rig: Rig) -> None:
        for pages in (75, 56, 50, 50):
            rig.link.die(code="out_of_memory")
            assert (await rig.next_life()).settings == {"num_pages": pages}

    budget = SupervisorLimits(9, 1000.0, 1000.0, None, "shrink")
    with_rig(shrink, budget)

    async def serve(rig: Rig) -> None:
        rig.client.submit([[replace(request("a"), max_len=350)]])  # of pages of 4 tokens
        for _ in range(2):
            rig.link.die(code="out_of_memory")
            assert (await rig.next_life()).settings == {"num_pages": 90}

    with_rig(serve, budget)


def test_an_engine_the_system_ended_for_lack_of_memory_gets_less(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter((3, 4))  # before, and after its death
    monkeypatch.setattr("quire.client.supervisor.num_memory_kills", lambda: next(kills))

    async def play(rig: Rig) -> None:
        rig.client.submit([[request("a")]])
        rig.link.die("a", exit_code=-9)
        second = await rig.next_life()
        assert second.settings == {"num_pages": 75} and second.submitted()["a"].suspect
        assert rig.supervisor.cause is not None and rig.supervisor.cause.code == "out_of_memory"

    with_rig(play, SupervisorLimits(3, 1000.0, 1000.0, None, "shrink"))


@pytest.mark.parametrize("code", sorted(UNRELATED_CAUSES))
def test_what_lies_between_the_processes_makes_nobody_a_suspect(code: str) -> None:
    async def play(rig: Rig) -> None:
        rig.client.submit([[request("a")]])
        for _ in range(3):
            rig.link.die("a", code=code)
            second = await rig.next_life()
            assert not second.submitted()["a"].suspect

    with_rig(play)


def test_an_engine_that_can_not_do_with_less_gets_what_it_had() -> None:
    async def play(rig: Rig) -> None:
        rig.client.ready = msgspec.structs.replace(READY, lower={"kv_dtype": "fp8"})
        rig.broken_starts, rig.broken_code = 1, "invalid_parameter"
        rig.link.die(code="out_of_memory")
        second = await rig.next_life()
        assert rig.tried == [{}, {"kv_dtype": "fp8"}, {}] and second.settings == {}
        assert any("kv_dtype" in move for move in rig.moves), "the log says what the next engine is given"

    with_rig(play, SupervisorLimits(3, 1000.0, 1000.0, None, "precision"))


def test_a_step_that_failed_and_is_tried_again_leaves_a_line_and_an_entry() -> None:
    async def play(rig: Rig) -> None:
        rig.link._news.put_nowait(wire.Fault("step_split", "step_failed: RuntimeError: boom", ["a", "b"]))
        rig.link._news.put_nowait(wire.Fault("foreign_frame", "not ours"))
        await rig.until(lambda: rig.supervisor.errors.total == 2)
        kinds = {failure.code: (failure.kind, failure.ids) for failure in rig.supervisor.errors.newest()}
        assert kinds == {"step_split": ("step", ("a", "b")), "foreign_frame": ("message", ())}
        assert any("boom" in line and "'requests': 2" in line for line in rig.moves)

    with_rig(play)


def test_deadlines_hold_while_there_is_no_engine() -> None:
    async def play(rig: Rig) -> None:
        rig.broken_starts = 1
        ticket = rig.client.submit([[request("a", deadline=0.5)]])  # long past on the machine's clock
        end = await end_of(ticket)
        assert end.finish_reason is FinishReason.DEADLINE

    with_rig(play)


def test_a_check_is_answered_by_its_number_and_fails_with_the_engine() -> None:
    async def play(rig: Rig) -> None:
        asked = asyncio.create_task(rig.supervisor.check())
        await rig.until(lambda: any(isinstance(m, wire.IntegrityCheck) for m in rig.link.sent))
        number = next(m.number for m in rig.link.sent if isinstance(m, wire.IntegrityCheck))
        rig.link._news.put_nowait(wire.IntegrityReport(number + 1, None, 0, 0))
        rig.link._news.put_nowait(wire.IntegrityReport(number, "2 units are held by nobody.", 0, 2))
        assert (await asked).num_leaked == 2
        assert rig.supervisor.errors.newest()[0].kind == "check"
        asked = asyncio.create_task(rig.supervisor.check())
        await asyncio.sleep(0)
        rig.link.die()
        with pytest.raises(QuireError, match="lost"):
            await asked

    with_rig(play)


def test_a_move_the_table_does_not_allow_is_refused() -> None:
    machine = StateMachine(ProcessState.READY, PROCESS_TRANSITIONS)
    with pytest.raises(AssertionError):
        machine.move("recovered")
    machine.move("lost")
    assert machine.state is ProcessState.BACKING_OFF and machine.counts["lost"] == 1


def test_the_flight_record_names_who_is_in_a_step_and_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / "x.flight"

    class Ticket:
        def wait(self) -> StepOutput:
            assert read_flight_record(path) == {"a", "b"}
            return StepOutput(1, [])

    class Device:
        broken = False

        def forward(self, plan: Plan) -> Plan:
            assert read_flight_record(path) == {"a", "b"}
            if self.broken:
                raise RuntimeError
            return plan

        def sample(self, forward: Plan, masks: Any = None) -> Ticket:
            return Ticket()

        def warm_ups(self) -> Iterator[None]:
            return iter(())

        def close(self) -> None: ...

    device = Device()
    workers = RecordedWorkers(device, FlightRecorder(path, 8))
    plan = Plan(1, [PlanRow("a", 0, 0, 1, 0, True), PlanRow("b", 1, 0, 1, 0, True)])
    assert read_flight_record(path) == set()
    workers.sample(workers.forward(plan)).wait()
    assert read_flight_record(path) == set()
    workers.forward(plan)  # given up between forward and sample: a mask could not be filled
    plan.step = 2
    workers.sample(workers.forward(plan)).wait()
    assert read_flight_record(path) == set(), "what was given up does not stay aboard"
    device.broken = True
    with pytest.raises(RuntimeError):
        workers.forward(plan)
    assert read_flight_record(path) == set(), "an error the engine survives is not its death"
    for torn in (b"", b"\xff\xff\xff\xff", b"\x02\0\0\0abc"):
        path.write_bytes(torn)
        assert read_flight_record(path) == set()
    assert read_flight_record(tmp_path / "absent") == set()
