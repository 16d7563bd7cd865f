"""Runs all requests of a benchmark at once and records the time of each token.

The offline and batch benchmarks call `run_jobs`, which does what `LLM.generate` does, detokenization included, and also
records the time of every token. During the run it only appends to lists; `measure` computes the figures afterwards.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from quire.bench.progress import Advance
from quire.bench.stats import Report, distribution, percentiles
from quire.bench.workloads import BenchJob
from quire.edge import Reply
from quire.engine.trace import Tracer
from quire.types import Delta, FinishReason, Plan, QuireError, Request

if TYPE_CHECKING:
    from quire.llm import LLM


@dataclass(slots=True)
class RawRun:
    """Raw records of a run: times in seconds of one monotonic clock, and sizes in the order of steps."""

    begin: float
    end: float = 0.0
    num_prompt_tokens: int = 0
    token_times: list[list[float]] = field(default_factory=list)  # per request
    rows_per_step: list[int] = field(default_factory=list)
    tokens_per_step: list[int] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)  # differences of the scheduler's and cache's counters

    @property
    def first_token_at(self) -> float:
        return min(times[0] for times in self.token_times)


def run_jobs(llm: LLM, jobs: Sequence[BenchJob], *, salt: bytes = b"", advance: Advance | None = None) -> RawRun:
    """Submit all jobs at once and run them to their ends. The prefix cache is shared only within one `salt`."""
    check_jobs(llm, jobs)
    engine = llm.engine
    engine.run_until_idle()  # finishes steps that an earlier run left in flight
    before = _counters(engine)
    run = RawRun(time.perf_counter(), token_times=[[] for _ in jobs])
    watched, engine.tracer = engine.tracer, StepRecorder(engine.tracer, run)
    try:
        _JobRunner(llm, run, jobs, salt).run_all(advance or (lambda done: None))
    finally:
        engine.tracer = watched
    after = _counters(engine)
    run.counters = {name: after[name] - before[name] for name in after}
    return run


def check_jobs(llm: LLM, jobs: Sequence[BenchJob]) -> None:
    """Raise QuireError if the model would refuse a job or cut its answer short."""
    vocab_size, max_len = llm.edge.vocab_size, llm.max_model_len
    for job in jobs:
        largest = max(job.tokens)
        if largest >= vocab_size:
            what = f"{job.origin} has token id {largest}, the model's ids go from 0 to {vocab_size - 1}."
            raise QuireError("bad_requests", what, "Use ids of this model.")
        if len(job.tokens) + job.num_outputs > max_len:
            what = (
                f"{job.origin} needs {len(job.tokens)} + {job.num_outputs} tokens, prompt and output; "
                f"the limit here is {max_len}."
            )
            raise QuireError("bad_requests", what, "Use shorter requests, more cache memory or another model.")


class StepRecorder(Tracer):
    """Records the size of every committed step, and forwards every call to the previous tracer."""

    def __init__(self, inner: Tracer, run: RawRun):
        self._inner = inner
        self._run = run

    def span(self, name: str, plan: Plan | None = None) -> AbstractContextManager[None]:
        return self._inner.span(name, plan)

    def note(self, name: str, **details: Any) -> None:
        self._inner.note(name, **details)

    def step(self, plan: Plan, scheduler: Any) -> None:
        self._run.rows_per_step.append(len(plan.rows))
        self._run.tokens_per_step.append(plan.num_tokens)
        self._inner.step(plan, scheduler)

    def begin_request(self, request: Request) -> None:
        self._inner.begin_request(request)

    def end_request(self, delta: Delta) -> None:
        self._inner.end_request(delta)


class _JobRunner:
    """Submits and finishes the requests of one run."""

    def __init__(self, llm: LLM, run: RawRun, jobs: Sequence[BenchJob], salt: bytes):
        self._engine = llm.engine
        self._run = run
        edge = llm.edge
        self._waiting: deque[Request] = deque()
        self._replies: list[Reply] = []
        self._places: dict[str, int] = {}  # request id -> index of its job, for unfinished requests
        for index, job in enumerate(jobs):
            requests = edge.requests(edge.encode(job.tokens), job.params, request_id=f"bench-{index}", salt=salt)
            self._replies.append(Reply(edge, requests))
            self._places[requests[0].id] = index
            self._waiting.append(requests[0])
            run.num_prompt_tokens += len(job.tokens)

    def run_all(self, advance: Advance) -> None:
        turn, now = self._engine.turn, time.perf_counter
        token_times, replies, places = self._run.token_times, self._replies, self._places
        num_tokens = 0
        try:
            while places:
                if self._waiting:
                    self._submit()
                deltas = turn()
                came_at = now()
                for delta in deltas:
                    index = places[delta.request_id]
                    token_times[index].extend([came_at] * len(delta.token_ids))
                    num_tokens += len(delta.token_ids)
                    replies[index].push(delta)
                    if delta.finish_reason is not None:
                        del places[delta.request_id]
                        _check_end(delta, self._replies[index])
                advance(num_tokens)
            self._run.end = now()
        finally:
            for request_id in places:  # unfinished only if the run was interrupted
                self._engine.cancel(request_id)

    def _submit(self) -> None:
        """Submit as many requests as the queue accepts: all, unless they are more than max_waiting."""
        while self._waiting:
            try:
                self._engine.add(self._waiting[0])
            except QuireError as error:
                if error.code == "queue_full" and self._engine.has_work:
                    return
                raise
            self._waiting.popleft()


def _check_end(delta: Delta, reply: Reply) -> None:
    """Raise QuireError unless the answer has its full length, since figures of shorter answers do not compare."""
    if delta.finish_reason is not FinishReason.LENGTH:
        what = delta.error or f"Request {reply.ids[0]} ended early ({delta.finish_reason})."
        raise QuireError(delta.error_code or "request_failed", what)


def _counters(engine: Any) -> dict[str, int]:
    counted = {**asdict(engine.scheduler.stats), **asdict(engine.scheduler.cache.stats)}
    return {name: value for name, value in counted.items() if isinstance(value, int)}


# ---------------------------------------------------------------------------------------------------------------------
# After the run


def measure(run: RawRun) -> Report:
    """Return the figures of one run. Times to first token count from the start of submission."""
    wall = run.end - run.begin
    num_outputs = sum(map(len, run.token_times))
    first = [times[0] - run.begin for times in run.token_times]
    between = [after - before for times in run.token_times for before, after in pairwise(times)]
    count = run.counters
    return {
        "requests": len(run.token_times),
        "prompt_tokens": run.num_prompt_tokens,
        "output_tokens": num_outputs,
        "wall_s": wall,
        "output_tps": num_outputs / wall,
        "total_tps": (run.num_prompt_tokens + num_outputs) / wall,
        "ttft_s": percentiles(first),
        "itl_s": percentiles(between),
        "steps": len(run.rows_per_step),
        "rows_per_step": distribution(run.rows_per_step),
        "tokens_per_step": distribution(run.tokens_per_step),
        "cache_hit_tokens": count["hit_tokens"],
        "cache_hit_ratio": count["hit_tokens"] / count["lookup_tokens"] if count["lookup_tokens"] else 0.0,
        "evicted_units": count["evicted_units"],
        "preemptions": count["preemptions"],
        "swaps": count["swaps"],
        "recomputes": count["recomputes"],
    }
