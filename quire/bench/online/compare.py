"""`quire bench compare A.json B.json`: is run B worse than run A, beyond chance?

Reads two reports of `quire bench online --json`. Confidence intervals come from a block bootstrap over neighbouring
requests: latencies in one queue are correlated, so drawing single requests would make the intervals too narrow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench.online.run import FORMAT, OK, Targets
from quire.bench.stats import SHARES, Report
from quire.types import QuireError

RESAMPLES = 1000
CONFIDENCE = 0.99  # about a dozen figures are judged at once: 95% would give a false alarm in every second comparison
MIN_BEYOND = 2  # requests beyond a percentile, below which it is not judged
CACHE_DIFFERENCE = 0.05  # difference of the cached shares of prompts above which a note is added
MAX_FILE = 1 << 30
MAX_ENTRIES = 1 << 20  # of the resamples in memory at a time
JUDGED_SHARES = {name: share for name, share in SHARES.items() if share < 1}
LATENCY_NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end", "pause_s": "longest pause"}

Sample = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class OnlineRun:
    """A report read from a file: the latencies of each request, NaN where it has none."""

    report: Report
    latencies: dict[str, Sample]  # [requests] each
    answered: Sample  # [requests], 0 or 1
    output_tps: Sample  # [bins of the timeline]

    def good(self, targets: Targets) -> Sample:
        return np.array([targets.met_by(entry) for entry in self.report["requests"]], dtype=float)


def read_run(path: Path) -> OnlineRun:
    try:
        if path.stat().st_size > MAX_FILE:
            raise _bad_report(path, "it is too large")
        report = json.loads(path.read_bytes())
    except OSError as error:
        raise _bad_report(path, error.strerror or str(error)) from None
    except (ValueError, RecursionError):
        raise _bad_report(path, "it is not JSON") from None
    if not isinstance(report, dict) or report.get("benchmark") != "online":
        raise _bad_report(path, "it is not a report of an online benchmark")
    if report.get("format") != FORMAT:
        raise _bad_report(path, f"its format is {report.get('format')!r:.20}, this command reads {FORMAT}")
    try:
        entries = report["requests"]
        latencies = {name: _column(entries, name) for name in LATENCY_NAMES}
        answered = np.array([entry["outcome"] == OK for entry in entries], dtype=float)
        run = OnlineRun(report, latencies, answered, np.array(report["timeline"]["output_tps"], dtype=float))
        Targets(**report["targets"]).met_by(entries[0])
        run.output_tps[0], float(report["output_tps"]), float(report["cached_tokens"] / (report["prompt_tokens"] + 1))
        float(report["wall_s"]), report["work"], report["model"]
    except (TypeError, LookupError, ValueError, AttributeError):
        raise _bad_report(path, "parts of it are missing or changed") from None
    if not answered.any() or np.isnan(latencies["ttft_s"][answered > 0]).any():
        raise _bad_report(path, "it holds no answered request")
    return run


def _column(entries: Sequence[Report], name: str) -> Sample:
    return np.array([math.nan if entry[name] is None else float(entry[name]) for entry in entries], dtype=float)


def _bad_report(path: Path, why: str) -> QuireError:
    return QuireError("bad_report", f"{path} can't be compared: {why}.", "Make it with quire bench online --json.")


# ---------------------------------------------------------------------------------------------------------------------
# The comparison


def compare_runs(a: OnlineRun, b: OnlineRun, tolerance: float = 0.05, seed: int = 0) -> Report:
    """Return each figure of both runs, the ratio B/A with its interval, and a verdict. A's targets apply to both."""
    same_work = a.report["work"] == b.report["work"] and len(a.answered) == len(b.answered)
    targets = Targets(**a.report["targets"])
    figures = [_judge(figure, tolerance) for figure in _figures(a, b, targets, same_work, seed)]
    return {
        "benchmark": "compare",
        "a": _summary(a),
        "b": _summary(b),
        "same_work": same_work,
        "notes": _notes(a, b, same_work),
        "tolerance": tolerance,
        "confidence": CONFIDENCE,
        "figures": figures,
        "bars": [],
        "pass": all(figure["verdict"] != "worse" for figure in figures),
    }


def _summary(run: OnlineRun) -> Report:
    keys = ("url", "model", "work", "wall_s", "answered", "failed", "output_tps")
    return {key: run.report.get(key) for key in keys}


def _notes(a: OnlineRun, b: OnlineRun, same_work: bool) -> list[str]:
    """Return reasons other than the servers for which the figures may differ."""
    notes = [] if same_work else ["The runs did not do the same work."]
    cached = [run.report["cached_tokens"] / max(run.report["prompt_tokens"], 1) for run in (a, b)]
    if abs(cached[0] - cached[1]) > CACHE_DIFFERENCE:
        notes.append(f"The server's cache held {cached[0]:.0%} of A's prompts and {cached[1]:.0%} of B's.")
    return notes


def _figures(a: OnlineRun, b: OnlineRun, targets: Targets, same_work: bool, seed: int) -> Iterator[Report]:
    draws = _Draws(len(a.answered), len(b.answered), same_work, seed)
    for name, label in LATENCY_NAMES.items():
        yield from _latency_figures(label, a.latencies[name], b.latencies[name], draws)
    shares = [("answered", a.answered, b.answered)]
    if targets != Targets():
        shares.append(("good requests", a.good(targets), b.good(targets)))
    for label, one, other in shares:
        yield _figure(label, "share", one.mean(), other.mean(), _means(one, other, draws), judged=True)
    # A run has a single duration, so the bins of its timeline are resampled. Different work has different rates, so the
    # figure is judged only for the same work.
    bins = _means(a.output_tps, b.output_tps, _Draws(len(a.output_tps), len(b.output_tps), False, seed))
    yield _figure("output tok/s", "rate", a.report["output_tps"], b.report["output_tps"], bins, judged=same_work)


def _means(a: Sample, b: Sample, draws: _Draws) -> Sample:
    return np.concatenate([np.stack([a[rows].mean(1), b[columns].mean(1)], 1) for rows, columns in draws])


def _latency_figures(label: str, a: Sample, b: Sample, draws: _Draws) -> Iterator[Report]:
    counts = [int(np.count_nonzero(~np.isnan(sample))) for sample in (a, b)]
    if not all(counts):
        return
    one, other = _percentiles(a[None])[0], _percentiles(b[None])[0]
    drawn = [np.stack([_percentiles(a[rows]), _percentiles(b[columns])], 1) for rows, columns in draws]
    samples = np.concatenate(drawn)  # [resamples, 2, shares]
    for index, (name, share) in enumerate(JUDGED_SHARES.items()):
        judged = min(counts) * (1 - share) >= MIN_BEYOND - 1e-9
        yield _figure(f"{label} {name}", "seconds", one[index], other[index], samples[:, :, index], judged)


def _percentiles(samples: Sample) -> Sample:
    """Return the percentiles of each row as `quire.bench.stats` does. Ignores NaN; a row of NaN stays NaN."""
    ordered = np.sort(samples, axis=1)  # [rows, requests], NaN last
    last = np.maximum(np.count_nonzero(~np.isnan(ordered), axis=1) - 1, 0)  # [rows]
    place = last[:, None] * np.array(list(JUDGED_SHARES.values()))  # [rows, shares]
    below = place.astype(int)
    low, high = (np.take_along_axis(ordered, at, 1) for at in (below, np.minimum(below + 1, last[:, None])))
    percentiles: Sample = low + (high - low) * (place - below)
    return percentiles


def _figure(name: str, unit: str, a: float, b: float, samples: Sample, judged: bool) -> Report:
    """Make a figure's report; `samples` holds both sides' values in each resample."""  # [resamples, 2]
    low = high = None
    usable = samples[~np.isnan(samples).any(axis=1) & (samples[:, 0] > 0)]
    if len(usable) >= RESAMPLES // 2:
        edge = (1 - CONFIDENCE) / 2
        low, high = (float(value) for value in np.quantile(usable[:, 1] / usable[:, 0], (edge, 1 - edge)))
    ratio = float(b / a) if a > 0 else None
    return {
        "name": name,
        "unit": unit,
        "a": float(a),
        "b": float(b),
        "ratio": ratio,
        "low": low,
        "high": high,
        "judged": judged and ratio is not None,
    }


def _judge(figure: Report, tolerance: float) -> Report:
    """Add the verdict: worse or better only beyond the tolerance, and if the interval excludes a ratio of 1."""
    ratio, low, high = figure["ratio"], figure["low"], figure["high"]
    if not figure["judged"]:
        return {**figure, "verdict": "not judged"}
    change = ratio - 1 if figure["unit"] == "seconds" else 1 - ratio  # positive: worse
    if abs(change) <= tolerance + 1e-12:
        return {**figure, "verdict": "same"}
    if low is None or low <= 1 <= high:
        return {**figure, "verdict": "unclear"}
    return {**figure, "verdict": "worse" if change > 0 else "better"}


class _Draws:
    """Indices of the requests of A and B in each resample. Every iteration yields the same ones, so figures agree.

    If both runs did the same work, request i of A is drawn together with request i of B. Variance that comes from the
    work is then in both, and the ratio shows the difference of the servers.
    """

    def __init__(self, num_a: int, num_b: int, paired: bool, seed: int):
        self._sizes, self._paired, self._seed = (num_a, num_b), paired, seed

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yield the indices of some resamples at a time, [resamples, requests] for each side."""
        rng = np.random.default_rng(abs(self._seed))
        at_a_time = max(1, MAX_ENTRIES // max(self._sizes))
        for begin in range(0, RESAMPLES, at_a_time):
            count = min(at_a_time, RESAMPLES - begin)
            rows = _blocks(count, self._sizes[0], rng)
            yield rows, rows if self._paired else _blocks(count, self._sizes[1], rng)


def _blocks(count: int, size: int, rng: np.random.Generator) -> Any:
    """Return `count` × `size` indices, drawn as blocks of neighbours that wrap around."""
    block_len = max(1, round(size ** (1 / 3)))
    starts = rng.integers(0, size, (count, -(-size // block_len), 1))
    return ((starts + np.arange(block_len)) % size).reshape(count, -1)[:, :size]
