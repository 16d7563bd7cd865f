"""`quire bench tiers`: time to the first token of prompts that are computed, or come from the device, host memory or
disk, in one run; and the gaps of streams beside loads.

Prompts of several lengths are computed once (cold), asked again at once (device), again after others have taken their
pages (host), and again by an engine that was started anew on the cache folder (disk). The copy rate and the read rate
are measured on the same bytes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from quire.bench.offline import load_average, settings
from quire.bench.stats import Bar, Report, percentile
from quire.types import SamplingParams

if TYPE_CHECKING:
    from quire.llm import LLM

FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
TRANSFER_SECONDS = 0.25
NUM_STREAMS, STREAM_PROMPT, ARRIVAL_LEN, EVERY = 2, 32, 256, 24  # every so many tokens of a stream a prompt arrives
SOURCES = ("cold", "device", "host", "disk")


@dataclass(frozen=True, slots=True)
class TierWork:
    lengths: tuple[int, ...] = (16, 64, 256, 1500)
    rounds: int = 4
    stream_tokens: int = 200
    seed: int = 0


@dataclass(slots=True)
class TierRates:
    """Bytes per second, measured on what one of the longest prompts has."""

    num_bytes: int
    copy: float
    read: float


@dataclass(slots=True)
class TierTimes:
    """Seconds to the first token, by source and length."""

    first: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def add(self, source: str, length: int, seconds: float) -> None:
        self.first.setdefault((source, length), []).append(seconds)

    def of(self, source: str, length: int) -> float:
        return median(self.first[source, length])


def bench_tiers(open_llm: Callable[[dict[str, Any]], LLM], work: TierWork) -> Report:
    """`open_llm` opens the model with these settings besides the user's."""
    times, busy = TierTimes(), load_average()
    with TemporaryDirectory(prefix="quire-tiers-") as folder:
        knobs = {"cache_dir": folder, "num_pages": _num_pages(work), "cache_dir_size": 64 << 30, "speculate": "off"}
        with open_llm(knobs) as llm:
            prompts = _prompts(work, llm.edge.vocab_size)
            arrivals = _arrivals(work, llm.edge.vocab_size)
            _warm_up(llm, "first")
            for one in prompts:
                for tokens in one:
                    times.add("cold", len(tokens), _first_token(llm, tokens))
                    times.add("device", len(tokens), _first_token(llm, tokens))
            for one in prompts:
                for tokens in one:
                    times.add("host", len(tokens), _first_token(llm, tokens))
            for tokens in arrivals:
                _first_token(llm, tokens)
            facts = {"model": llm.config.model.model, "settings": settings(llm), "load_before": busy}
        with open_llm(knobs) as llm:
            rates = _rates(llm, Path(folder), prompts[0][-1])
            _warm_up(llm, "second")
            for one in prompts:
                for tokens in one:
                    times.add("disk", len(tokens), _first_token(llm, tokens))
            alone, beside = _stream_gaps(llm, arrivals, work)
            tiers = {name: _counts(stats) for name, stats in llm.engine.scheduler.cache.tier_stats()}
    return {"benchmark": "tiers", **facts, **_report(work, times, rates, alone, beside), "tiers": tiers}


def _report(
    work: TierWork, times: TierTimes, rates: TierRates, alone: Sequence[float], beside: Sequence[float]
) -> Report:
    longest = max(work.lengths)
    device, cold = times.of("device", longest), times.of("cold", longest)
    host, disk = times.of("host", longest), times.of("disk", longest)
    worst = max(times.of(source, n) / times.of("cold", n) for source in ("host", "disk") for n in work.lengths)
    gaps = [percentile(sorted(one), 0.99) for one in (alone, beside)]
    bars = [
        Bar("first token from host memory, s", host, device + 2 * rates.num_bytes / rates.copy, "at most"),
        Bar("first token from disk, s", disk, device + 1.5 * rates.num_bytes / rates.read, "at most"),
        Bar("from disk over computing", disk / cold, 0.2, "at most"),
        Bar("from a tier over computing, worst length", worst, 1.05, "at most"),
        Bar("p99 gap of streams beside loads, over device hits", gaps[1] / gaps[0], 1.1, "at most"),
    ]
    return {
        "lengths": [
            {"tokens": length, **{source: times.of(source, length) for source in SOURCES}} for length in work.lengths
        ],
        "bytes": rates.num_bytes,
        "copy_rate": rates.copy,
        "read_rate": rates.read,
        "recompute_rate": rates.num_bytes / cold,
        "gap_p99_s": gaps,
        "bars": [bar.to_report() for bar in bars],
        "pass": all(bar.passed for bar in bars),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Prompts


def _num_pages(work: TierWork) -> int:
    """Return pages for the longest prompt and a third more, so that each prompt evicts the one before it."""
    return max(work.lengths) // 12 + 40


def _prompts(work: TierWork, vocab_size: int) -> list[list[list[int]]]:
    rng = random.Random(work.seed)
    lengths = sorted(work.lengths)
    return [[_tokens(rng, length, vocab_size) for length in lengths] for _ in range(work.rounds)]


def _arrivals(work: TierWork, vocab_size: int) -> list[list[int]]:
    rng = random.Random(work.seed + 1)
    return [_tokens(rng, ARRIVAL_LEN, vocab_size) for _ in range(work.stream_tokens // EVERY)]


def _tokens(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    return [rng.randrange(10, min(vocab_size, 10_000)) for _ in range(length)]


# ---------------------------------------------------------------------------------------------------------------------
# Measurements


def _warm_up(llm: LLM, name: str) -> None:
    """Have the engine time its steps, by which it decides about loads."""
    rng = random.Random(f"warm-up {name}")
    for length in (32, 256, 256):
        _first_token(llm, _tokens(rng, length, llm.edge.vocab_size))


def _first_token(llm: LLM, tokens: list[int]) -> float:
    """Return the seconds to the first token, and then let the stores write what they have to."""
    engine = llm.engine
    (request,) = llm.edge.requests(list(tokens), FIRST)
    began = time.perf_counter()
    engine.add(request)
    seconds = 0.0
    while engine.has_work:
        if engine.awaits_transfers:
            engine.wait_for_transfer(TRANSFER_SECONDS)
        for delta in engine.turn():
            if delta.token_ids and not seconds:
                seconds = time.perf_counter() - began
    engine.save()
    return seconds


def _stream_gaps(llm: LLM, arrivals: list[list[int]], work: TierWork) -> tuple[list[float], list[float]]:
    """Return the gaps of streams beside which one known prompt arrives again and again, and beside loads from disk."""
    known = _tokens(random.Random("known"), ARRIVAL_LEN, llm.edge.vocab_size)
    _first_token(llm, known)
    alone = _gaps(llm, [known] * len(arrivals), work)
    return alone, _gaps(llm, arrivals, work)


def _gaps(llm: LLM, arrivals: list[list[int]], work: TierWork) -> list[float]:
    engine, rng = llm.engine, random.Random(work.seed + 2)
    params = SamplingParams(temperature=0.0, max_tokens=work.stream_tokens, ignore_eos=True)
    last: dict[str, float] = {}
    for _ in range(NUM_STREAMS):
        (request,) = llm.edge.requests(_tokens(rng, STREAM_PROMPT, llm.edge.vocab_size), params)
        last[request.id] = 0.0
        engine.add(request)
    streams, gaps, waiting, num_tokens = set(last), [], list(arrivals), 0
    while engine.has_work:
        for delta in engine.turn():
            if delta.request_id in streams and delta.token_ids:
                now = time.perf_counter()
                if last[delta.request_id]:
                    gaps.append(now - last[delta.request_id])
                last[delta.request_id] = now
                num_tokens += 1
        if waiting and num_tokens >= NUM_STREAMS * EVERY * (len(arrivals) - len(waiting) + 1):
            engine.add(llm.edge.requests(waiting.pop(), FIRST)[0])
    return gaps


def _rates(llm: LLM, folder: Path, tokens: list[int]) -> TierRates:
    """Measure the copy rate and the read rate on the bytes of one prompt."""
    import numpy as np

    from quire.cache.prefixes import probe, stored_prefix

    cache = llm.engine.scheduler.cache
    store = cache.stores[0]
    _, blocks = stored_prefix(cache, probe(cache, "rates", tokens, b""))
    found = [store.files_of(block) for block in blocks]
    num_bytes = sum(size for _, size in found)
    paths = [folder / name[:2] / name for names, _ in found for name in names]
    reads, copies = [], []
    source = np.ones(max(1, num_bytes), np.uint8)
    target = np.zeros_like(source)
    for _ in range(5):
        began = time.perf_counter()
        for path in paths:
            path.read_bytes()
        reads.append(time.perf_counter() - began)
        began = time.perf_counter()
        np.copyto(target, source)
        copies.append(time.perf_counter() - began)
    return TierRates(num_bytes, num_bytes / median(copies), num_bytes / median(reads))


def _counts(stats: Any) -> Report:
    return {name: getattr(stats, name) for name in ("hits", "stores", "drops", "failures", "corrupt")}
