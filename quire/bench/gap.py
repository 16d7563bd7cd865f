"""`quire bench gap`: idle time of the device between steps. Many requests decode; host and device are timed per step.

The host's time of a step is the loop's turn minus the wait for tokens. With CUDA, events before and after each step's
launches give the device's time and its idle time before the next step, which is close to 0 if the host runs ahead.
Without CUDA only the host's times are reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from quire.bench.offline import load_average, settings
from quire.bench.stats import Bar, Report, percentiles
from quire.bench.workloads import Shape, draw_shape, fold_into, make_job
from quire.engine.trace import Tracer
from quire.types import Plan

if TYPE_CHECKING:
    from quire.llm import LLM

SKIPPED = 10  # uncounted steps after prefill


def bench_gap(
    open_llm: Callable[[], LLM],
    *,
    rows: int = 256,
    prompt_len: int = 64,
    steps: int = 200,
    temperature: float = 0.6,
    max_idle_share: float | None = None,
) -> Report:
    busy = load_average()
    with open_llm() as llm:
        llm.prepare()
        engine = llm.engine
        shape = Shape(rows, (prompt_len, prompt_len), (steps + 3 * SKIPPED, steps + 3 * SKIPPED))
        jobs = [
            make_job(tokens, count, "", temperature, index)
            for index, (tokens, count) in enumerate(zip(*draw_shape(shape, 0), strict=True))
        ]
        for index, job in enumerate(fold_into(jobs, llm.edge.vocab_size)):
            (request,) = llm.edge.requests(llm.edge.encode(job.tokens), job.params, request_id=f"gap-{index}")
            engine.add(request)
        while engine.scheduler.stats.sampled_tokens < rows * SKIPPED:
            engine.turn()
        probe = _GapProbe(engine)
        with probe:
            while len(probe.turns) < steps and engine.has_work:
                probe.turn()
        for request_id in list(engine.scheduler.requests):
            engine.cancel(request_id)
        engine.run_until_idle()
        report = {
            "benchmark": "gap",
            "model": llm.config.model.model,
            "rows": rows,
            "settings": settings(llm),
            "load_before": busy,
            **probe.figures(),
        }
    idle = report["device_idle_share"]
    host_share = report["host_s"]["p50"] / report["device_s"]["p50"] if idle is not None else None
    bars = (
        []
        if idle is None or host_share is None or max_idle_share is None
        else [
            Bar("share of the time the device waits", idle, max_idle_share, "at most"),
            Bar("host time over device time of a step", host_share, 1.0, "at most"),
        ]
    )
    return {
        **report,
        "host_over_device": host_share,
        "bars": [bar.to_report() for bar in bars],
        "pass": all(bar.passed for bar in bars),
    }


class _GapProbe:
    """Replaces the engine's tracer and workers by ones that record times, until it is closed."""

    def __init__(self, engine: Any):
        self._engine = engine
        self._waited = 0.0
        self.turns: list[tuple[float, float]] = []  # (whole turn, wait for tokens within it), in seconds
        self.steps: list[tuple[Any, Any]] = []  # CUDA events before and after each step
        self.kinds: dict[str, list[float]] = {}  # host seconds by the tracer's span name

    def __enter__(self) -> _GapProbe:
        self._before = self._engine.tracer, self._engine.workers
        self._engine.tracer = _SpanRecorder(self)
        self._engine.workers = _TimedWorkers(self._engine.workers, self.steps)
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.tracer, self._engine.workers = self._before

    def note(self, kind: str, seconds: float) -> None:
        self.kinds.setdefault(kind, []).append(seconds)
        if kind == "wait":
            self._waited += seconds

    def turn(self) -> None:
        self._waited, begin = 0.0, time.perf_counter()
        self._engine.turn()
        self.turns.append((time.perf_counter() - begin, self._waited))

    def figures(self) -> Report:
        device, idle = self._device()
        return {
            "steps": len(self.turns),
            "turn_s": percentiles([whole for whole, _ in self.turns]),
            "host_s": percentiles([whole - waited for whole, waited in self.turns]),
            "wait_s": percentiles([waited for _, waited in self.turns]),
            "host_parts_s": {kind: percentiles(each) for kind, each in self.kinds.items() if kind != "wait"},
            "device_s": percentiles(device),
            "device_idle_s": percentiles(idle),
            "device_idle_share": sum(idle) / (sum(idle) + sum(device)) if device else None,
        }

    def _device(self) -> tuple[list[float], list[float]]:
        steps = [(begin, end) for begin, end in self.steps if begin is not None]
        if not steps:
            return [], []
        steps[-1][1].synchronize()
        device = [begin.elapsed_time(end) / 1e3 for begin, end in steps]
        idle = [end.elapsed_time(begin) / 1e3 for (_, end), (begin, _) in pairwise(steps)]
        return device, idle


class _SpanRecorder(Tracer):
    def __init__(self, probe: _GapProbe):
        self._probe = probe

    @contextmanager
    def span(self, name: str, plan: Plan | None = None) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._probe.note(name, time.perf_counter() - begin)


class _TimedWorkers:
    """Forwards to workers, and records CUDA events before the first and after the last kernel of each step."""

    def __init__(self, inner: Any, steps: list[tuple[Any, Any]]):
        self._inner, self._steps = inner, steps

    def forward(self, plan: Plan) -> Any:
        begin = _event()
        return begin, self._inner.forward(plan)

    def sample(self, forward: Any, masks: Mapping[int, bytes] | None = None) -> Any:
        begin, inner = forward
        ticket = self._inner.sample(inner, masks)
        self._steps.append((begin, _event()))
        return ticket

    def warm_ups(self) -> Iterator[None]:
        yield from self._inner.warm_ups()

    def close(self) -> None:
        self._inner.close()


def _event() -> Any:
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
