"""The step loop: plan step N+1 while the device runs step N, commit N, deliver the deltas.

`Engine.turn` is one turn of the loop and waits for nothing but the tokens of the oldest step in flight. `LLM` calls it
directly, `EngineThread` from its own thread, and the engine process from its main thread. One thread uses an engine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quire.engine.adapters.registry import AdapterHost, EngineAdapters, NoAdapters
from quire.engine.control import Controls
from quire.engine.recovery import Bisection
from quire.engine.scheduler import Scheduler
from quire.engine.sessions import Sessions
from quire.engine.states import LOOP_TRANSITIONS, LoopState, StateMachine
from quire.engine.trace import NO_TRACE, Tracer
from quire.engine.workers import DeviceLost, RanksLost, Ticket, Workers
from quire.types import Delta, GrammarSpec, Plan, QuireError, Request, is_out_of_memory

Deliver = Callable[[list[Delta]], object]
FillMasks = Callable[[Plan, Mapping[str, Request]], Mapping[int, bytes]]
SESSION_WAIT_SECONDS = 0.05  # between two looks at a session's command
SAVE_SECONDS = 60.0  # for each store to write what is queued
MAX_REGROUPS = 2  # maximum times that a group is rebuilt without a step that commits
MAX_SUSPECTS = 64  # maximum number of suspects that a `StepFault` names


@dataclass(frozen=True, slots=True)
class StepFault:
    """A failed step that was rolled back. `culprit` is the request that was ended for it, if known."""

    code: str
    what: str
    suspects: tuple[str, ...]
    culprit: str | None


class EngineBroken(Exception):
    """The scheduler's state may be inconsistent, so no retry in this process is safe."""


class Engine:
    """A scheduler and workers, with the loop that runs steps and recovers from failed ones."""

    def __init__(
        self,
        scheduler: Scheduler,
        workers: Workers,
        *,
        depth: int = 1,
        tracer: Tracer = NO_TRACE,
        fill_masks: FillMasks | None = None,
        adapters: AdapterHost | None = None,
    ):
        self.scheduler = scheduler
        self.adapters = EngineAdapters(
            scheduler.adapters, adapters or NoAdapters(), lambda: self.scheduler.requests.values()
        )
        self.tracer = tracer
        self.workers = workers
        self._depth = depth
        self._fill_masks = fill_masks or _fill_masks
        self._inflight: deque[tuple[Plan, Ticket, float]] = deque()  # with the start time of each
        self._bisection = Bisection()
        self._warm_ups: Iterator[None] | None = None
        self.has_warm_ups = True  # False once the workers have none left
        self._last_done = 0.0  # completion time of the last committed step
        self.states: StateMachine[LoopState] = StateMachine(LoopState.IDLE, LOOP_TRANSITIONS)
        self._faults: list[StepFault] = []
        self._num_regroups = 0  # since the last commit
        self.sessions = Sessions(lambda: self.scheduler.cache)
        self.controls = Controls(self.adapters)
        self.is_held = False  # no step is planned, because a command changes what steps compute, or the model sleeps

    def wrap(
        self, workers: Callable[[Workers], Workers], fill_masks: Callable[[FillMasks], FillMasks] | None = None
    ) -> None:
        """Wrap the workers and the mask filler, to record steps or inject faults. Only while no step is in flight."""
        self.workers = workers(self.workers)
        if fill_masks is not None:
            self._fill_masks = fill_masks(self._fill_masks)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._inflight)

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    @property
    def num_suspects(self) -> int:
        """Number of groups that run alone because a step with them failed or killed an engine."""
        return len(self._bisection)

    @property
    def awaits_transfers(self) -> bool:
        """Whether no turn can do anything before a transfer between cache tiers has ended."""
        return not self._inflight and self.scheduler.awaits_transfers

    def on_transfer(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, whenever a transfer between cache tiers has ended."""
        for store in self.scheduler.cache.stores:
            store.on_done = wake
        self.sessions.on_done = self.controls.on_done = wake

    @property
    def awaits_session(self) -> bool:
        """Whether nothing is to be done but to wait for the files of a session or a command."""
        if self.is_held and not self._inflight:
            return True
        return (self.sessions.is_open or self.controls.is_open) and not self.has_work

    def wait_for_transfer(self, seconds: float) -> None:
        """Wait until a transfer between cache tiers has ended, at most so many seconds."""
        ended = threading.Event()
        self.on_transfer(ended.set)
        if (self.awaits_transfers or self.awaits_session) and not any(
            store.has_ended for store in self.scheduler.cache.stores
        ):
            ended.wait(seconds)

    def poll_transfers(self) -> None:
        """Take note of transfers between cache tiers that have ended, while no turn does."""
        self.scheduler.table.loaded(self.scheduler.cache.poll())

    def save(self) -> None:
        """Hand what the cache holds to its stores, and wait until it is written. Only while no request is open."""
        self.scheduler.save_drafts()
        while self.scheduler.cache.has_stores:
            self.turn()
        self.scheduler.cache.poll()
        while not all(store.is_idle for store in self.scheduler.cache.stores):
            if not all(store.finish(SAVE_SECONDS) for store in self.scheduler.cache.stores):
                return  # a disk that does not answer
            self.scheduler.cache.poll()

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.tracer.begin_request(request)
        if request.suspect:
            self._bisection.isolate(request.id, len(request.tokens))
            self.scheduler.restrict(self._bisection.group)

    def cancel(self, request_id: str) -> None:
        self.scheduler.cancel(request_id)

    def rebuild(self) -> None:
        """Replace the scheduler by an empty one after an interrupt or error left it inconsistent.

        All requests and the prefix cache are dropped. An interrupted call can be repeated.
        """
        self.scheduler = self.scheduler.empty_copy()
        self.adapters.slots = self.scheduler.adapters
        self._inflight.clear()
        self._bisection = Bisection()
        self._last_done = 0.0
        self.states.move("rebuilt")
        self.tracer.note("engine rebuilt")

    def turn(self, deliver: Deliver | None = None) -> list[Delta]:
        """Run one turn of the loop: start at most one step and commit at most one. Returns the deltas.

        `deliver` gets the deltas before the deferred part of the commit runs, and must not call the engine. Between
        turns no commit is pending.
        """
        current: Plan | None = None
        deltas: list[Delta] = []
        self.states.move("turn")
        try:
            depth = 1 if self._bisection.active else self._depth
            clock, span = self.scheduler.clock, self.tracer.span
            ticket: Ticket | None = None
            forward: Any = None
            started = 0.0
            if self.is_held:
                self.scheduler.expire()
            elif len(self._inflight) < depth:
                with span("plan"):
                    current = self.scheduler.plan()
                if current is None and not self._inflight and self._bisection.active:
                    self._bisection.skip()  # no request of this group can run now
                    self.scheduler.restrict(self._bisection.group)
            if current is not None:
                started = clock()
                with span("forward", current):
                    forward = self.workers.forward(current)
                if not current.may_mask:
                    with span("sample", current):
                        ticket = self.workers.sample(forward)
            if self._inflight and (current is None or len(self._inflight) >= depth - 1):
                deltas = self._commit_oldest()
            if current is not None:
                if ticket is None:  # the masks depend on the tokens just committed
                    with span("mask", current):
                        masks = self._fill_masks(current, self.scheduler.requests)
                    with span("sample", current):
                        ticket = self.workers.sample(forward, masks)
                self._inflight.append((current, ticket, started))
                current = None  # from here on it is one of the steps in flight
                if len(self._inflight) >= depth:  # at depth 1 no step is planned ahead, so the commit need not wait
                    deltas += self._commit_oldest()
            self.states.move("rest")
        except RanksLost as lost:
            self.states.move("fail")
            self._flush_deferred()
            self._regroup(lost)  # deltas of earlier commits are still delivered
            self.states.move("rolled_back")
        except (DeviceLost, EngineBroken):
            self.states.move("fail")
            raise
        except Exception as error:
            self.states.move("fail")
            self._flush_deferred()
            self._recover(current, error)  # deltas of earlier commits are still delivered
            self.states.move("rolled_back")
        deltas += self.scheduler.take_ended()
        try:
            if deltas and deliver is not None:
                deliver(deltas)
        finally:
            self._flush_deferred()
        self.adapters.drop_unused()
        for delta in deltas:
            if delta.finish_reason is not None:
                self.tracer.end_request(delta)
        return deltas

    def _commit_oldest(self) -> list[Delta]:
        plan, ticket, started = self._inflight[0]
        self.states.move("wait")
        with self.tracer.span("wait", plan):
            output = ticket.wait()
        self.states.move("commit")
        self._num_regroups = 0
        self._inflight.popleft()
        done = self.scheduler.clock()
        seconds = done - max(started, self._last_done)  # a step runs once the previous one is done
        self.scheduler.stats.count_stages(output.busy, seconds)
        self.scheduler.observe(plan, max(seconds - output.draft_seconds, 0.0), output.draft_seconds)
        self._last_done = done
        try:
            with self.tracer.span("commit", plan):
                deltas = self.scheduler.commit(plan, output)
        except Exception as error:  # half committed: some tokens are in requests but in no delta
            raise EngineBroken(f"committing a step failed: {type(error).__name__}: {error}") from error
        if self._bisection.active:
            self._bisection.passed({r.id: r.computed for r in self.scheduler.requests.values()})
            self.scheduler.restrict(self._bisection.group)
        self.tracer.step(plan, self.scheduler)
        return deltas

    def _flush_deferred(self) -> None:
        """Run the deferred part of the commits of this turn: insert full pages, free what was released."""
        deferred = self.scheduler.deferred
        if not deferred.pending:
            return
        try:
            with self.tracer.span("deferred commit"):
                deferred.flush()
        except Exception as error:
            raise EngineBroken(f"the deferred part of a commit failed: {type(error).__name__}: {error}") from error

    def _recover(self, current: Plan | None, error: Exception) -> None:
        """Roll back all steps in flight after a failed step, and bisect for the request that caused it."""
        plans = [plan for plan, _, _ in self._inflight] + ([current] if current is not None else [])
        self._inflight.clear()
        if not plans:
            raise error  # the scheduler itself failed, not a request
        touched = self.scheduler.abandon(plans)
        out_of_memory = isinstance(error, QuireError) and error.code == "out_of_memory"
        if out_of_memory and not self._bisection.active and self.scheduler.shrink_steps(plans):
            self.tracer.note("memory ran out", error=str(error), max_tokens=self.scheduler.step_cap)
            self._faults.append(
                StepFault("out_of_memory", str(error)[:1000], tuple(sorted(touched))[:MAX_SUSPECTS], None)
            )
            return  # no request is at fault: smaller steps may fit
        culprit = self._bisection.failed(touched) if touched else None
        self.tracer.note("step failed", error=repr(error), suspects=len(touched), culprit=culprit or "")
        code = "out_of_memory" if out_of_memory or is_out_of_memory(error) else "step_failed"
        what = f"{type(error).__name__}: {error}"[:1000]
        self._faults.append(StepFault(code, what, tuple(sorted(touched))[:MAX_SUSPECTS], culprit))
        if culprit is not None:
            self.scheduler.fail(culprit, _request_error(error))
        self.scheduler.restrict(self._bisection.group)

    def _regroup(self, lost: RanksLost) -> None:
        """Let the group replace its lost ranks, and start all requests again from the tokens that they have.

        Raises `lost` if no step has committed since the last few times: a request may be at fault, and the process that
        owns this engine finds out which.
        """
        self._num_regroups += 1
        if self._num_regroups > MAX_REGROUPS:
            raise lost
        self.tracer.note("rank lost", error=str(lost))
        lost.regroup()
        self.scheduler = self.scheduler.restarted()
        self.adapters.slots = self.scheduler.adapters
        self._inflight.clear()
        self._bisection = Bisection()
        for request in self.scheduler.requests.values():
            if request.suspect:
                self._bisection.isolate(request.id, len(request.tokens))
        self.scheduler.restrict(self._bisection.group)
        self._last_done = self.scheduler.clock()
        self._faults.append(StepFault("rank_lost", str(lost)[:1000], (), None))
        self.tracer.note("group rebuilt")

    def take_faults(self) -> list[StepFault]:
        """Return the steps that failed since the last call."""
        faults, self._faults = self._faults, []
        return faults

    def run_until_idle(self) -> list[Delta]:
        deltas: list[Delta] = []
        while self.has_work:
            deltas += self.turn()
        return deltas

    def prepare(self) -> None:
        """Run all warm-up work now, for a slower start and faster first requests. Only while nothing runs."""
        while self.run_warm_up():
            pass

    def run_warm_up(self) -> bool:
        """Run one piece of warm-up work. False if requests are open or no work is left."""
        if self.has_work:
            return False
        if self._warm_ups is None:
            self._warm_ups = self.workers.warm_ups()
        try:
            next(self._warm_ups)
        except StopIteration:
            self.has_warm_ups = False
        except BaseException:
            self._warm_ups = None  # a generator that raised yields nothing more
            raise
        return self.has_warm_ups

    def close(self) -> None:
        with suppress(Exception):  # what can't be written is computed again
            if self.scheduler.cache.stores and not self.scheduler.requests and not self._inflight:
                self.save()
        for store in self.scheduler.cache.stores:
            store.close()
        self.sessions.close()
        self.controls.close()
        self.workers.close()
        self.tracer.close()


def _fill_masks(plan: Plan, requests: Mapping[str, Request]) -> dict[int, bytes]:
    """Return one bit per allowed token for each row that samples with a grammar in this step.

    A row with drafts gets one mask for each position, joined.
    """
    masks = {}
    for index, row in enumerate(plan.rows):
        request = requests.get(row.request_id)
        if row.wants_sample and request is not None and request.grammar is not None:
            grammar = request.grammar
            assert not isinstance(grammar, GrammarSpec), "a request is queued with its grammar compiled"
            sampled, drafts = request.tokens[request.prompt_len :], plan.drafts.get(index, [])
            parts = [grammar.mask(sampled + drafts[:count]) for count in range(row.num_drafts + 1)]
            masks[index] = b"".join(parts)
    return masks


def _request_error(error: Exception) -> QuireError:
    """Return the error that ends a request with which no step can be computed."""
    if isinstance(error, QuireError):
        return error
    what = f"This request made a step fail ({type(error).__name__}: {error})."
    return QuireError("step_failed", what, "Other requests were not affected.")
