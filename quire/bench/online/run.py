"""`quire bench online`: an open-loop load test of a server. Requests are sent at their times in any case.

The command calls `bench_online` with the planned arrivals. Latencies count from the moment a request was due, not from
the moment it was sent, so that a slow client shows as latency instead of hiding it. The report also has the client's
lag.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from quire.bench.online.arrivals import Arrival
from quire.bench.online.requests import RequestOptions, make_requests
from quire.bench.online.stream_client import Answer, Endpoint, RequestFailure, fetch_json, stream
from quire.bench.progress import Advance, progress_bar
from quire.bench.stats import Bar, Report, percentiles
from quire.types import QuireError

FORMAT = 1  # version of the JSON report, checked by `quire bench compare`
MAX_BINS = 120  # bins of the timeline
LATENCIES = ("ttft_s", "tpot_s", "e2e_s", "pause_s")  # figures that each request has
OK = "ok"


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets that a request must meet to count for goodput; None sets no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def met_by(self, entry: Report) -> bool:
        """Return whether a request of the report was answered within the targets. An answer of one token has no time
        per output token and meets that target."""
        if entry["outcome"] != OK:
            return False
        late = self.ttft_s is not None and entry["ttft_s"] > self.ttft_s
        slow = self.tpot_s is not None and entry["tpot_s"] is not None and entry["tpot_s"] > self.tpot_s
        return not late and not slow


@dataclass(frozen=True, slots=True)
class ClientLimits:
    max_open: int = 900  # concurrent connections; the usual limit on open files is 1,024
    timeout_s: float = 600.0  # per request


@dataclass(slots=True)
class Record:
    """Raw record of one request; times are seconds after the first request was due."""

    due_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    held_back: bool = False  # whether it waited for a free connection
    outcome: str = OK
    detail: str = ""
    answer: Answer = field(default_factory=Answer)


def bench_online(
    endpoint: Endpoint,
    arrivals: Sequence[Arrival],
    options: RequestOptions,
    *,
    work: Report,
    prompts: Sequence[Report] = (),
    targets: Targets | None = None,
    limits: ClientLimits | None = None,
    warmup: bool = True,
    min_goodput: float | None = None,
) -> Report:
    """Send every request at its time, read all answers to their ends, and return the report. `work` describes the
    planned arrivals and is copied into the report."""
    targets, limits = targets or Targets(), limits or ClientLimits()
    requests = make_requests(arrivals, options, prompts)
    player = Player(endpoint, limits)
    if warmup:
        asyncio.run(_warm_up(player, options))
    with progress_bar("requests", len(requests)) as advance:
        records = asyncio.run(player.play([(each.at_s, each.path, each.body) for each in requests], advance))
    _check_any_answered(records)
    report = {
        "benchmark": "online",
        "format": FORMAT,
        "url": endpoint.url,
        "model": options.model,
        "work": work,
        "warmup": warmup,
        "targets": {"ttft_s": targets.ttft_s, "tpot_s": targets.tpot_s},
        **measure(records, [request.output_len for request in requests], targets),
        "client": {
            "lag_s": percentiles([record.sent_s - record.due_s for record in records]),
            "max_open": limits.max_open,
            "most_open": player.most_open,
            "held_back": sum(record.held_back for record in records),
        },
    }
    bars = (
        []
        if min_goodput is None
        else [Bar("share of good requests", report["goodput"]["share"], min_goodput, "at least")]
    )
    return {**report, "bars": [bar.to_report() for bar in bars], "pass": all(bar.passed for bar in bars)}


def first_model(endpoint: Endpoint, timeout_s: float = 30.0) -> str:
    """Return the first model that the server lists. Raises QuireError if the server can't be reached."""

    async def ask() -> str:
        try:
            async with asyncio.timeout(timeout_s):
                return str((await fetch_json(endpoint, "/models"))["data"][0]["id"])
        except TimeoutError:
            raise _no_start(endpoint, "no answer in time") from None
        except RequestFailure as failure:
            raise _no_start(endpoint, f"{failure.outcome}: {failure.detail}") from None
        except (TypeError, KeyError, IndexError):
            raise QuireError("bad_server", f"{endpoint.url}/models lists no model.", "Give --model.") from None

    return asyncio.run(ask())


async def _warm_up(player: Player, options: RequestOptions) -> None:
    """Send one short untimed request. Raises QuireError if it fails."""
    request = make_requests(
        [Arrival(0.0, 16, 4)],
        RequestOptions(options.model, options.chat, options.temperature, options.ignore_eos, seed=-1),
    )[0]
    record = (await player.play([(0.0, request.path, request.body)], lambda done: None))[0]
    player.most_open = 0
    if record.outcome != OK:
        raise _no_start(player.endpoint, f"{record.outcome}: {record.detail}")


def _no_start(endpoint: Endpoint, why: str) -> QuireError:
    what = f"{endpoint.url} can't be measured ({why.rstrip('.')})."
    return QuireError("bad_server", what, "Check --url, --model and --api-key.")


def _check_any_answered(records: Sequence[Record]) -> None:
    if not any(record.outcome == OK for record in records):
        ((outcome, count),) = Counter(record.outcome for record in records).most_common(1)
        example = next(record.detail for record in records if record.outcome == outcome)
        what = f"None of {len(records)} requests was answered; {count} times {outcome} ({example})."
        raise QuireError("bad_server", what, "Check the server's log.")


class Player:
    """Sends requests at their times, without waiting for earlier answers, except for a free connection."""

    def __init__(self, endpoint: Endpoint, limits: ClientLimits):
        self.endpoint = endpoint
        self.most_open = 0
        self._limits = limits
        self._num_open = 0

    async def play(self, schedule: Sequence[tuple[float, str, bytes]], advance: Advance) -> list[Record]:
        """Send the requests of `schedule`, (seconds, path, body) in order of time, and return their records."""
        clock = asyncio.get_running_loop().time
        begin = clock()
        free = asyncio.Semaphore(self._limits.max_open)
        records = [Record(due_s) for due_s, _, _ in schedule]
        num_done = 0

        async def send(record: Record, path: str, body: bytes) -> None:
            nonlocal num_done
            record.held_back = free.locked()
            async with free:
                await self._exchange(record, path, body, lambda: clock() - begin)
            num_done += 1
            advance(num_done)

        async with asyncio.TaskGroup() as group:
            for record, (due_s, path, body) in zip(records, schedule, strict=True):
                wait = begin + due_s - clock()
                await asyncio.sleep(max(wait, 0))  # yields to the event loop even if late, so that answers are read
                group.create_task(send(record, path, body))
        return records

    async def _exchange(self, record: Record, path: str, body: bytes, clock: Callable[[], float]) -> None:
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        record.sent_s = clock()
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                await stream(self.endpoint, path, body, record.answer, clock)
        except RequestFailure as failure:
            record.outcome, record.detail = failure.outcome, " ".join(failure.detail.split())[:300]
        except TimeoutError:
            record.outcome, record.detail = "timeout", f"no end after {self._limits.timeout_s:g} s"
        finally:
            record.end_s = clock()
            self._num_open -= 1


# ---------------------------------------------------------------------------------------------------------------------
# After the run


def measure(records: Sequence[Record], output_lens: Sequence[int], targets: Targets) -> Report:
    """Return the figures of one run; latencies cover answered requests only."""
    wall = max(record.end_s for record in records)
    entries = [_entry(record) for record in records]
    answered = [record for record in records if record.outcome == OK]
    good = sum(map(targets.met_by, entries))
    prompt_tokens = sum(record.answer.prompt_tokens or 0 for record in answered)
    output_tokens = sum(_num_tokens(record) for record in answered)
    gaps = [after - before for record in answered for before, after in pairwise(record.answer.piece_times)]
    return {
        "wall_s": wall,
        "answered": len(answered),
        "failed": len(records) - len(answered),
        "failures": _failures(records),
        "rates": {
            "offered_rps": _rate_of([record.due_s for record in records]),
            "sent_rps": _rate_of(sorted(record.sent_s for record in records)),
            "answered_rps": len(answered) / wall,
        },
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(record.answer.cached_tokens for record in answered),
        "output_tokens": output_tokens,
        "output_tps": output_tokens / wall,
        "total_tps": (prompt_tokens + output_tokens) / wall,
        "goodput": {"requests": good, "share": good / len(records), "rps": good / wall},
        **{name: percentiles([entry[name] for entry in entries if entry[name] is not None]) for name in LATENCIES},
        "itl_s": percentiles(gaps),
        "without_usage": sum(record.answer.output_tokens is None for record in answered),
        "short_answers": sum(
            _num_tokens(record) < max_tokens
            for record, max_tokens in zip(records, output_lens, strict=True)
            if record.outcome == OK and record.answer.output_tokens is not None
        ),
        "timeline": _timeline(records, wall),
        "requests": entries,
    }


def _entry(record: Record) -> Report:
    """Return a request's entry of the report, rounded to microseconds to keep the file small."""
    answer, times = record.answer, record.answer.piece_times
    entry: Report = {
        "due_s": round(record.due_s, 6),
        "sent_s": round(record.sent_s, 6),
        "end_s": round(record.end_s, 6),
        "outcome": record.outcome,
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
        **dict.fromkeys(LATENCIES),
    }
    if record.outcome == OK:
        num_tokens = _num_tokens(record)
        entry["ttft_s"] = round(times[0] - record.due_s, 6)
        entry["e2e_s"] = round(record.end_s - record.due_s, 6)
        if len(times) > 1 and num_tokens > 1:  # an answer in one piece has no token times
            entry["tpot_s"] = round((times[-1] - times[0]) / (num_tokens - 1), 6)
            entry["pause_s"] = round(max(after - before for before, after in pairwise(times)), 6)
    return entry


def _num_tokens(record: Record) -> int:
    """Return the answer's token count from the server's usage, or its number of pieces if there is no usage."""
    counted = record.answer.output_tokens
    return len(record.answer.piece_times) if counted is None else counted


def _failures(records: Sequence[Record]) -> list[Report]:
    counts = Counter(record.outcome for record in records if record.outcome != OK)
    examples = {record.outcome: record.detail for record in reversed(records)}
    return [{"outcome": name, "count": count, "example": examples[name]} for name, count in counts.most_common()]


def _rate_of(times: Sequence[float]) -> float | None:
    """Return the rate between the first and the last time, or None if they are equal."""
    span = times[-1] - times[0]
    return (len(times) - 1) / span if span > 0 else None


def _timeline(records: Sequence[Record], wall: float) -> Report:
    """Return average requests in flight and output tokens per second in equal bins of the run."""
    num_bins = max(1, min(MAX_BINS, len(records) * 2))
    width = wall / num_bins
    busy, tokens = [0.0] * num_bins, [0.0] * num_bins
    for record in records:
        first, last = (min(int(at / width), num_bins - 1) for at in (record.sent_s, record.end_s))
        for index in range(first, last + 1):
            busy[index] += min(record.end_s, (index + 1) * width) - max(record.sent_s, index * width)
        times = record.answer.piece_times
        for at in times:
            tokens[min(int(at / width), num_bins - 1)] += _num_tokens(record) / len(times)
    return {
        "bin_s": width,
        "in_flight": [round(seconds / width, 3) for seconds in busy],
        "output_tps": [round(count / width, 3) for count in tokens],
        "mean_in_flight": fmean(busy) / width,
    }
