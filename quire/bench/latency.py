"""`quire bench latency`: how decodes and arriving long prompts delay each other, in one process without HTTP.

Some requests decode while prompts arrive at a fixed rate. The report holds, for each step-time target, the inter-token
latency of the decodes alone and under load, and the prompts' times to first token; then the time to first token of a
long prompt on an idle engine, uncached and cached except for its end. It counts from the moment a prompt was due.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from quire.bench.offline import load_average, settings
from quire.bench.progress import progress_bar
from quire.bench.stats import Report, percentiles
from quire.bench.workloads import LARGEST_ID, TEMPERATURE, make_job
from quire.types import Delta, QuireError

if TYPE_CHECKING:
    from quire.llm import LLM

ROUNDS = 5  # prompts on an idle engine
WARMUP_PROMPTS = 2  # in the warm-up of each target
SETTLE_TOKENS = 8  # tokens of each decode before the measurement


@dataclass(frozen=True, slots=True)
class Load:
    decodes: int = 64
    decode_len: int = 512
    prompts: int = 12
    prompt_len: int = 8192
    every: float = 0.25  # seconds between arrivals
    fresh_tail: int = 64  # tokens of the warm prompt that are not in the cache
    alone_s: float = 2.0  # how long the decodes are measured without prompts
    rest_s: float = 1.0  # pause before a prompt on an idle engine; a hot GPU is throttled by its power limit


def bench_latency(
    open_llm: Callable[[], LLM], load: Load, *, targets_ms: Sequence[float | None] = (None,), seed: int = 0
) -> Report:
    busy = load_average()
    with open_llm() as llm, progress_bar("latency (parts)", 1 + len(targets_ms)) as advance:
        _check(llm, load)
        llm.prepare()
        probe = _LatencyProbe(llm, load, seed)
        for target in targets_ms:  # warm-up: compiles kernels for the shapes of each target
            probe.under_load(target, WARMUP_PROMPTS, alone_s=0.0)
        under_load = []
        for index, target in enumerate(targets_ms):
            under_load.append({"target_ms": target, **probe.under_load(target, load.prompts, load.alone_s)})
            advance(index + 1)
        llm.engine.scheduler.set_step_target(None)
        idle = probe.on_idle_engine()
        return {
            "benchmark": "latency",
            "model": llm.config.model.model,
            "load": asdict(load),
            "settings": settings(llm),
            "load_before": busy,
            "under_load": under_load,
            "idle": idle,
            "bars": [],
            "pass": True,
        }


def _check(llm: LLM, load: Load) -> None:
    longest = max(load.prompt_len + 1, load.decode_len + SETTLE_TOKENS)
    if longest > llm.max_model_len:
        what = f"Sequences of {longest} tokens are needed, the limit here is {llm.max_model_len}."
        raise QuireError("bad_requests", what, "Use shorter prompts, more cache memory or another model.")
    limits = llm.engine.scheduler.limits
    if load.decodes >= limits.max_rows:
        what = f"{load.decodes} decodes leave no row for a prompt (max_rows={limits.max_rows})."
        raise QuireError("bad_requests", what, "Raise max_rows or take fewer.")


class _LatencyProbe:
    """Runs the engine's loop and records the time of each request's tokens."""

    def __init__(self, llm: LLM, load: Load, seed: int):
        self._llm, self._load = llm, load
        self._engine = llm.engine
        self._random = random.Random(seed)
        self._num_made = 0
        self._times: dict[str, list[float]] = {}
        self._cached: dict[str, int] = {}  # cached prompt tokens of finished requests

    def under_load(self, target_ms: float | None, num_prompts: int, alone_s: float) -> Report:
        engine, load = self._engine, self._load
        engine.scheduler.set_step_target(None if target_ms is None else target_ms / 1000)
        room = self._llm.max_model_len - load.decode_len
        decodes = [self._add(self._prompt(load.decode_len), room) for _ in range(load.decodes)]
        while any(len(self._times[name]) < SETTLE_TOKENS for name in decodes):
            self._turn()
        quiet_from = time.perf_counter()
        enough = len(self._times[decodes[0]]) + (SETTLE_TOKENS if alone_s else 0)  # gaps even on a slow machine
        while time.perf_counter() - quiet_from < alone_s or len(self._times[decodes[0]]) < enough:
            self._turn()
        prompts = [self._prompt(load.prompt_len) for _ in range(num_prompts)]  # drawn before the measurement
        begin = time.perf_counter()
        waiting = deque((begin + load.every * index, prompt) for index, prompt in enumerate(prompts))
        due: dict[str, float] = {}
        while waiting or any(not self._times[name] for name in due):
            while waiting and waiting[0][0] <= time.perf_counter():
                at, prompt = waiting.popleft()
                due[self._add(prompt, 1)] = at
            self._turn()
        end = time.perf_counter()
        for name in decodes:
            engine.cancel(name)
        while engine.has_work:
            self._turn()
        return {
            "gap_alone_s": self._gaps(decodes, quiet_from, begin),
            "gap_s": self._gaps(decodes, begin, end),
            "ttft_s": percentiles([self._times[name][0] - at for name, at in due.items()]),
        }

    def on_idle_engine(self) -> Report:
        """Time one long prompt at a time: first uncached, then cached except for its end."""
        load = self._load
        cold, warm = [], []
        for _ in range(ROUNDS):
            prompt = self._prompt(load.prompt_len)
            time.sleep(load.rest_s)
            cold.append(self._first_token(prompt)[0])
            tail = self._prompt(min(load.fresh_tail, load.prompt_len - 1))
            seconds, num_cached = self._first_token(prompt[: load.prompt_len - len(tail)] + tail)
            warm.append((seconds, num_cached))
        return {
            "cold_ttft_s": median(cold),
            "warm_ttft_s": median(seconds for seconds, _ in warm),
            "warm_cached_tokens": median(num_cached for _, num_cached in warm),
            "all_cold_s": cold,
            "all_warm_s": [seconds for seconds, _ in warm],
        }

    def _first_token(self, prompt: list[int]) -> tuple[float, int]:
        begin = time.perf_counter()
        name = self._add(prompt, 1)
        while name not in self._cached:
            self._turn()
        while self._engine.has_work:
            self._turn()
        return self._times[name][0] - begin, self._cached[name]

    def _gaps(self, names: list[str], begin: float, end: float) -> Report | None:
        """Percentiles of the gaps between tokens of one request, if both tokens lie between `begin` and `end`."""
        times = ([at for at in self._times[name] if begin <= at <= end] for name in names)
        return percentiles([later - earlier for each in times for earlier, later in pairwise(each)])

    def _prompt(self, length: int) -> list[int]:
        largest = min(LARGEST_ID, self._llm.edge.vocab_size - 1)
        return [self._random.randint(0, largest) for _ in range(length)]

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        self._num_made += 1
        job = make_job(prompt, max_tokens, "", TEMPERATURE, self._num_made)
        edge = self._llm.edge
        (request,) = edge.requests(edge.encode(job.tokens), job.params, request_id=f"latency-{self._num_made}")
        self._times[request.id] = []
        self._engine.add(request)
        return request.id

    def _turn(self) -> None:
        self._engine.turn(self._note)

    def _note(self, deltas: list[Delta]) -> None:
        came_at = time.perf_counter()
        for delta in deltas:
            if delta.error is not None:
                raise QuireError(delta.error_code or "request_failed", delta.error)
            self._times[delta.request_id].extend([came_at] * len(delta.token_ids))
            if delta.usage is not None:
                self._cached[delta.request_id] = delta.usage.cached_tokens
