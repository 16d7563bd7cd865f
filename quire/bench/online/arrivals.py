"""Arrival times and lengths of an online benchmark's requests: Poisson at a rate, or from a trace of real traffic.

`quire bench online` plans all arrivals before the measurement; `quire.bench.online.requests` makes requests from them.
"""

from __future__ import annotations

import csv
import json
import math
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from quire.bench.workloads import is_integer
from quire.types import QuireError

BLOCK_TOKENS = 512  # tokens per hashed block of a Mooncake trace
MAX_LEN = 1 << 20
MAX_LINE = 1 << 22
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of prompt or output lengths: constant, uniform between two bounds, or log-normal."""

    low: int
    high: int
    sigma: float | None = None  # if given: log-normal with `low` as the median

    def draw(self, rng: random.Random) -> int:
        if self.sigma is not None:
            return min(max(round(rng.lognormvariate(math.log(self.low), self.sigma)), 1), MAX_LEN)
        return self.low if self.low == self.high else rng.randint(self.low, self.high)

    def __str__(self) -> str:
        if self.sigma is not None:
            return f"lognormal:{self.low}:{self.sigma:g}"
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


def parse_lengths(text: str) -> Lengths:
    """Parse `128`, `100-1024` or `lognormal:MEDIAN:SIGMA`. Raises ValueError with the reason."""
    if match := re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", text, re.ASCII):
        lengths = Lengths(int(match[1]), int(match[2] or match[1]))
    elif match := re.fullmatch(r"lognormal:(\d{1,7}):(\d{1,3}(?:\.\d{1,6})?)", text, re.ASCII):
        lengths = Lengths(int(match[1]), int(match[1]), float(match[2]))
    else:
        raise ValueError(f"{text!r:.80} is not a length like 128, 100-1024 or lognormal:200:0.8")
    if not 1 <= lengths.low <= lengths.high <= MAX_LEN:
        raise ValueError(f"{text!r:.80} is not within 1 to {MAX_LEN} tokens, the smaller number first")
    return lengths


@dataclass(frozen=True, slots=True)
class Arrival:
    """Arrival time and lengths of one request."""

    at_s: float  # seconds after the first arrival
    prompt_len: int
    output_len: int
    blocks: tuple[int, ...] = ()  # block ids of the prompt, if the trace has them; equal ids are equal tokens
    block_len: int = BLOCK_TOKENS


# ---------------------------------------------------------------------------------------------------------------------
# Poisson arrivals


def poisson_times(rate: float, count: int, seed: int) -> list[float]:
    """Return seconds after the first arrival, with exponential gaps, so that arrivals are independent."""
    rng = random.Random(f"{seed}/arrivals")
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times


def poisson_arrivals(rate: float, count: int, seed: int, prompt_len: Lengths, output_len: Lengths) -> list[Arrival]:
    """Draw arrivals. Lengths have a separate generator, so another rate gives the same requests at other times."""
    rng = random.Random(f"{seed}/lengths")
    return [Arrival(at, prompt_len.draw(rng), output_len.draw(rng)) for at in poisson_times(rate, count, seed)]


# ---------------------------------------------------------------------------------------------------------------------
# Traces


def read_trace(path: Path, count: int, scale_time: float = 1.0, scale_len: float = 1.0) -> list[Arrival]:
    """Read the first `count` requests of an Azure CSV or a Mooncake JSONL file, and scale their times and lengths."""
    try:
        with path.open(encoding="utf-8") as file:
            head = file.read(1)
            file.seek(0)
            rows = _read_mooncake(file, path) if head == "{" else _read_azure(file, path)
            found = list(islice(rows, count))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise QuireError("bad_trace", f"The trace {path} can't be read: {why}.", "Check the path.", "trace") from None
    if len(found) < count:
        what = f"The trace {path} has {len(found)} requests, fewer than the {count} of --requests."
        raise QuireError("bad_trace", what, "Lower --requests.", "trace")
    found.sort(key=lambda arrival: arrival.at_s)
    block_len = max(1, round(BLOCK_TOKENS * scale_len))
    begin = found[0].at_s
    return [
        Arrival(
            (row.at_s - begin) * scale_time,
            max(1, round(row.prompt_len * scale_len)),
            max(1, round(row.output_len * scale_len)),
            row.blocks,
            block_len,
        )
        for row in found
    ]


def _read_azure(file: Iterable[str], path: Path) -> Iterator[Arrival]:
    rows = csv.reader(read_lines(file, path))
    try:
        columns = next(rows, [])
        if not set(AZURE_COLUMNS) <= set(columns):
            what = f"{path} is neither an Azure CSV (its first line names {', '.join(AZURE_COLUMNS)}) nor JSON lines."
            raise QuireError("bad_trace", what, "", "trace")
        time, context, generated = (columns.index(name) for name in AZURE_COLUMNS)
        for row in rows:
            if not row:
                continue
            try:
                stamp = datetime.fromisoformat(row[time])
                seconds = (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()
                yield Arrival(seconds, _length(int(row[context])), _length(int(row[generated])))
            except (ValueError, IndexError, OverflowError) as error:
                raise bad_line(path, rows.line_num, str(error)) from None
    except csv.Error as error:
        raise bad_line(path, rows.line_num, str(error)) from None


def _read_mooncake(file: Iterable[str], path: Path) -> Iterator[Arrival]:
    for number, line in enumerate(read_lines(file, path), start=1):
        if not line.strip():
            continue
        try:
            entry = json_object(line)
            stamp, blocks = entry["timestamp"], entry.get("hash_ids", [])
            if isinstance(stamp, bool) or not isinstance(stamp, (int, float)) or not math.isfinite(stamp):
                raise ValueError("timestamp is not a number of milliseconds")
            if not isinstance(blocks, list) or not all(is_integer(block) for block in blocks):
                raise ValueError("hash_ids is not a list of whole numbers")
            prompt_len, output_len = _length(entry["input_length"]), _length(entry["output_length"])
            if blocks and len(blocks) != -(-prompt_len // BLOCK_TOKENS):
                raise ValueError(f"{len(blocks)} blocks of {BLOCK_TOKENS} do not make {prompt_len} tokens")
            yield Arrival(stamp / 1000, prompt_len, output_len, tuple(blocks))
        except (ValueError, OverflowError, KeyError) as error:
            missing = isinstance(error, KeyError)
            raise bad_line(path, number, f"{error} is missing" if missing else str(error)) from None


def read_lines(file: Iterable[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        if len(line) > MAX_LINE:
            raise bad_line(path, number, f"it is longer than {MAX_LINE} characters")
        yield line


def _length(value: Any) -> int:
    if not is_integer(value) or not 0 <= value <= MAX_LEN:
        raise ValueError(f"{value!r:.80} is not a length of 0 to {MAX_LEN} tokens")
    return value


def json_object(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(entry, dict):
        raise ValueError("it is not a JSON object")
    return entry


def bad_line(path: Path, number: int, why: str) -> QuireError:
    return QuireError("bad_file", f"{path} line {number} is wrong: {why}.", "Correct or remove the line.")
