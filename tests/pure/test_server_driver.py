"""The loop around an engine: messages in, deltas out, whatever happens to the engine or to a grammar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from quire.cache.index import CacheIndex
from quire.config import knobs
from quire.engine.host.driver import Cancel, EngineDriver, Message, Report, Stop, failure_deltas
from quire.engine.host.wire import IntegrityCheck, IntegrityReport
from quire.engine.limits import SchedulerLimits
from quire.engine.loop import Engine
from quire.engine.scheduler import Scheduler
from quire.engine.workers import Workers
from quire.types import CacheSpec, Delta, FinishReason, GrammarSpec, Plan, QuireError, Request, SamplingParams
from tests.pure.shadow import ShadowDevice


def make_engine(max_rows: int = 4, max_waiting: int = 100) -> Engine:
    cache = CacheIndex([CacheSpec("full", "paged", (0,), (1,), "float32", page_tokens=4)], [200])
    limits = SchedulerLimits(max_rows, max_batch_tokens=32, chunk_tokens=32, max_waiting=max_waiting)
    return Engine(Scheduler(cache, limits), ShadowDevice(cache))


class Script:
    """A mailbox that hands out its batches one a turn, then says stop."""

    def __init__(self, *batches: list[Message]):
        self.batches = list(batches)
        self.sent: list[Delta] = []
        self.reports: list[Report] = []

    def receive(self, block: bool) -> list[Message]:
        return self.batches.pop(0) if self.batches else [Stop()] if block else []

    def wait(self, seconds: float) -> None: ...

    def wake(self) -> None: ...

    def send(self, deltas: list[Delta]) -> None:
        self.sent += deltas

    def report(self, report: Report) -> None:
        self.reports.append(report)

    def abandon(self, open_ids: Sequence[str], failure: QuireError) -> None:
        self.sent += failure_deltas(open_ids, failure)

    def ends(self) -> dict[str, tuple[str | None, str | None]]:
        return {d.request_id: (d.finish_reason.value, d.error_code) for d in self.sent if d.finish_reason is not None}


class Desk:
    """A queue of grammars that are ready when a test decides."""

    def __init__(self) -> None:
        self.waiting: dict[str, Request] = {}
        self.answers: dict[str, QuireError | None] = {}
        self.num_waits = 0

    def __len__(self) -> int:
        return len(self.waiting)

    def take(self, request: Request) -> bool:
        if request.grammar is None:
            return False
        self.waiting[request.id] = request
        return True

    def ready(self) -> list[tuple[Request, QuireError | None]]:
        found = [name for name in self.waiting if name in self.answers]
        return [(self.waiting.pop(name), self.answers[name]) for name in found]

    def drop(self, request_id: str) -> Request | None:
        return self.waiting.pop(request_id, None)

    def wait(self, seconds: float) -> None:
        self.num_waits += 1
        if self.num_waits == 3:
            self.answers = {"good": None, "bad": QuireError("invalid_schema", "no")}
            for request in self.waiting.values():
                request.grammar = None  # compiled; the shadow device knows no masks


def request(name: str, count: int = 3, grammar: GrammarSpec | None = None) -> Request:
    return Request(name, [1, 2, 3], 3, SamplingParams(max_tokens=count).resolve(), 3 + count, grammar=grammar)


def test_requests_run_and_cancelled_ones_end() -> None:
    mailbox = Script([request("a"), request("b", 100)], [], [Cancel("b"), Cancel("nobody")])
    driver = EngineDriver(make_engine(), mailbox)
    driver.run()
    assert mailbox.ends() == {"a": ("length", None), "b": ("cancelled", None)}
    assert driver.failure is not None and driver.failure.code == "engine_closed"


def test_stopping_ends_what_is_open_and_refuses_what_comes_after() -> None:
    mailbox = Script([request("a", 100)], [Stop()], [request("late")])
    EngineDriver(make_engine(), mailbox).run()
    assert mailbox.ends() == {"a": ("cancelled", None), "late": ("error", "engine_closed")}


def test_an_engine_that_breaks_tells_everyone() -> None:
    engine = make_engine()
    mailbox = Script([request("a", 100), request("b", 100)])
    driver = EngineDriver(engine, mailbox)

    def broken(deliver: object) -> None:
        raise RuntimeError("surprise")

    engine.turn = broken  # type: ignore[method-assign, assignment]
    driver.run()
    assert mailbox.ends() == {"a": ("error", "engine_failed"), "b": ("error", "engine_failed")}
    assert driver.failure is not None and "surprise" in str(driver.failure)


def test_an_engine_without_grammars_says_so() -> None:
    mailbox = Script([request("a", grammar=GrammarSpec("regex", "a"))])
    EngineDriver(make_engine(), mailbox).run()
    assert mailbox.ends() == {"a": ("error", "no_grammar")}


def test_requests_wait_for_their_grammars_and_others_do_not() -> None:
    spec = GrammarSpec("regex", "a")
    first = [
        request("good", grammar=spec),
        request("bad", grammar=spec),
        request("gone", grammar=spec),
        request("free"),
    ]
    grammars, mailbox = Desk(), Script(first, *([[]] * 6), [Cancel("gone")])
    EngineDriver(make_engine(), mailbox, grammars).run()  # type: ignore[arg-type]
    assert mailbox.ends() == {
        "good": ("length", None),
        "bad": ("error", "invalid_schema"),
        "gone": ("cancelled", None),
        "free": ("length", None),
    }
    order = [delta.request_id for delta in mailbox.sent if delta.finish_reason is FinishReason.LENGTH]
    assert order == ["free", "good"] and grammars.num_waits >= 3


def test_a_full_queue_refuses_one_and_keeps_the_rest() -> None:
    """As many as there are rows find one free, though they all come before a step is planned."""
    names = ["a", "b", "c", "d", "e"]
    mailbox = Script([request(name) for name in names], [], [])
    EngineDriver(make_engine(max_rows=3, max_waiting=1), mailbox).run()
    assert [mailbox.ends()[name][1] for name in names] == [None] * 4 + ["queue_full"]


def test_going_idle_is_told_at_once_even_after_a_single_turn() -> None:
    """One token is asked for, computed and ended within one turn of the loop: the beat after it says so."""
    zmq = pytest.importorskip("zmq")
    from quire.engine.host import wire
    from quire.engine.host.frames import FrameReader, FrameWriter
    from quire.engine.host.process import Channel, SocketMailbox

    class Socket:
        """An order for each time the engine waits for one."""

        def __init__(self) -> None:
            self.reader, self.writer = FrameReader(wire.MARK), FrameWriter(wire.MARK)
            self.orders: list[wire.ToEngine] = [wire.submit_message([request("a", 1)]), wire.StopEngine()]
            self.due: list[wire.ToEngine] = []
            self.told: list[int] = []  # how many have ended, beat by beat

        def send(self, frame: bytes) -> None:
            message = wire.decode_from_engine(self.reader.open(frame) or b"")
            if isinstance(message, wire.Beat):
                self.told.append(message.ended)

        def poll(self, timeout: int) -> int:
            self.due.append(self.orders.pop(0))
            return 1

        def recv(self, flags: int = 0) -> bytes:
            if not self.due:
                raise zmq.Again
            return self.writer.frame(wire.encode(self.due.pop()))

    socket, engine = Socket(), make_engine()
    EngineDriver(engine, SocketMailbox(Channel(socket), engine, clock=lambda: 5.0)).run()
    assert socket.told == [0, 0, 1]  # at the start, when it had nothing to do, and when it had again


def test_no_timeout_takes_an_engine_with_nothing_to_do_for_hung_or_ill() -> None:
    pytest.importorskip("zmq")
    from quire.engine.host.process import IDLE_SECONDS

    for name in ("hang_timeout", "stall_timeout"):
        assert (knobs()[name].low or 0.0) >= 2 * IDLE_SECONDS


def test_an_error_while_preparing_a_request_ends_that_request_alone() -> None:
    class Broken(Desk):
        def take(self, request: Request) -> bool:
            if request.id == "bad":
                raise RuntimeError("surprise")
            return False

    mailbox = Script([request("good"), request("bad"), request("other")])
    EngineDriver(make_engine(), mailbox, Broken()).run()  # type: ignore[arg-type]
    assert mailbox.ends() == {"good": ("length", None), "bad": ("error", "prepare_failed"), "other": ("length", None)}


def test_the_engine_is_checked_on_demand() -> None:
    engine = make_engine()
    mailbox = Script([request("a")], *([[]] * 5), [IntegrityCheck(7)])
    EngineDriver(engine, mailbox).run()
    assert mailbox.reports == [IntegrityReport(7, None, 0, 0)]
    engine.scheduler.cache.pools[0].take()  # nobody holds it: a leak
    mailbox = Script([IntegrityCheck(8)])
    EngineDriver(engine, mailbox).run()
    (checked,) = mailbox.reports
    assert isinstance(checked, IntegrityReport) and checked.num_leaked == 1 and checked.problem is not None


def test_someone_who_was_in_a_step_that_died_runs_alone_until_past_it() -> None:
    engine = make_engine(max_rows=4)
    plans: list[set[str]] = []
    plan = engine.scheduler.plan

    def spy() -> object:
        made = plan()
        if made is not None:
            plans.append({row.request_id for row in made.rows})
        return made

    engine.scheduler.plan = spy  # type: ignore[method-assign, assignment]
    suspects = [request(name, 5) for name in ("s1", "s2")]
    for one in suspects:
        one.tokens += [9, 9]  # two tokens were delivered before
        one.resumed = one.suspect = True
    mailbox = Script([*suspects, request("free", 5)])
    EngineDriver(engine, mailbox).run()
    assert plans[:3] == [{"s1"}, {"s1", "free"}, {"s2"}], "and between two of them everyone who is above suspicion"
    assert any(len(step) == 3 for step in plans[3:]), "then all go on together"
    assert {name: end[0] for name, end in mailbox.ends().items()} == dict.fromkeys(("s1", "s2", "free"), "length")
    count = {name: sum(len(d.token_ids) for d in mailbox.sent if d.request_id == name) for name in ("s1", "free")}
    assert count == {"s1": 3, "free": 5}, "nothing that was delivered is sent again"


def test_a_step_of_the_others_that_fails_clears_no_suspect() -> None:
    engine = make_engine(max_rows=4)
    tried: list[set[str]] = []

    class Poisoned:
        """Fails with `bad` aboard."""

        def __init__(self, inner: Workers):
            self._inner = inner

        def forward(self, plan: Plan) -> Any:
            tried.append({row.request_id for row in plan.rows})
            if "bad" in tried[-1]:
                raise RuntimeError("poison")
            return self._inner.forward(plan)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    engine.wrap(Poisoned)  # type: ignore[arg-type]
    for name in ("s1", "s2", "s3"):
        one = request(name, 5)
        one.tokens += [9]
        one.resumed = one.suspect = True
        engine.add(one)
    engine.add(request("bad", 5))
    ends = {d.request_id: d.finish_reason for d in engine.run_until_idle() if d.finish_reason}
    assert ends == dict.fromkeys(("s1", "s2", "s3"), FinishReason.LENGTH) | {"bad": FinishReason.ERROR}
    for name in ("s1", "s2", "s3"):
        assert next(step for step in tried if name in step) == {name}, tried
    engine.scheduler.check()


def test_a_suspect_that_comes_late_gets_a_row_though_all_are_taken() -> None:
    """Its grammar took a while; those who run meanwhile must not be with it when it dies."""
    engine = make_engine(max_rows=2)
    for name in ("a", "b"):
        engine.add(request(name, 8))
    engine.turn()
    late = request("late", 5)
    late.tokens += [9]
    late.resumed = late.suspect = True
    late.arrival = 5.0
    engine.add(late)
    plan, steps = engine.scheduler.plan, []

    def spy() -> object:
        made = plan()
        if made is not None:
            steps.append({row.request_id for row in made.rows})
        return made

    engine.scheduler.plan = spy  # type: ignore[method-assign, assignment]
    ends = {d.request_id: d.finish_reason for d in engine.run_until_idle() if d.finish_reason}
    alone = next(step for step in steps if "late" in step)
    assert alone == {"late"}, steps
    assert set(ends.values()) == {FinishReason.LENGTH} and len(ends) == 3
    engine.scheduler.check()


class Chores(ShadowDevice):
    """A device with things to do ahead; notes when each was done, and when a step was."""

    def warm_ups(self) -> Iterator[None]:
        for index in range(4):
            assert not self.queue, "only while no step is in flight"
            self.log.append(("chore", index))
            yield


def with_chores() -> tuple[Engine, Chores]:
    engine = make_engine()
    device = Chores(engine.scheduler.cache)
    engine.workers = device
    return engine, device


def test_chores_are_done_in_idle_moments_and_never_before_a_request() -> None:
    engine, device = with_chores()
    script = Script([], [], [request("a")], [], [], [], [])
    EngineDriver(engine, script).run()
    assert script.ends() == {"a": ("length", None)}
    kinds = [kind for kind, _ in device.log if kind in ("chore", "forward")]
    first, last = kinds.index("forward"), len(kinds) - 1 - kinds[::-1].index("forward")
    assert kinds[:first] == ["chore"] * 2, "two idle turns before it came"
    assert "chore" not in kinds[first:last] and kinds[last + 1 :] == ["chore"] * 2, "the rest when it was done"
    assert not engine.has_warm_ups and not engine.run_warm_up()


def test_prepare_does_all_chores_that_are_left() -> None:
    engine, device = with_chores()
    assert engine.run_warm_up()
    engine.prepare()
    assert [index for kind, index in device.log if kind == "chore"] == [0, 1, 2, 3]
    engine.add(request("a"))
    assert not engine.run_warm_up(), "not now"
