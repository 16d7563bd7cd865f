"""Workloads of benchmarks: prompts as token ids, and the number of tokens of each answer.

A named workload is drawn from a seed in the same order as for other engines, so that figures compare; another seed
gives other prompts of the same shape. `read_jobs` reads a workload from a file with one request per line.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from quire.types import QuireError, SamplingParams

TEMPERATURE = 0.6
LARGEST_ID = 10_000  # largest token id of named workloads
_SEED_STEP = 1_000_003  # more than the requests of a run, so that two runs share no request seed
_FIELDS = ("prompt_token_ids", "max_tokens", "temperature", "seed")


@dataclass(frozen=True, slots=True)
class BenchJob:
    """One request of a benchmark. `origin` names it in error messages."""

    tokens: list[int]
    params: SamplingParams
    origin: str

    @property
    def num_outputs(self) -> int:
        assert self.params.max_tokens is not None
        return self.params.max_tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """The number of requests, and the ranges of their prompt and output lengths."""

    num_requests: int
    prompt_len: tuple[int, int]
    output_len: tuple[int, int]


WORKLOADS = {
    "ragged256": Shape(256, (100, 1024), (100, 1024)),
    "single": Shape(1, (128, 128), (256, 256)),
    "batch8": Shape(8, (128, 128), (256, 256)),
    "prefill": Shape(32, (4096, 4096), (1, 1)),
    "long": Shape(8, (32000, 32000), (128, 128)),
}


def draw_workload(name: str, seed: int, temperature: float = TEMPERATURE) -> list[BenchJob]:
    shape = WORKLOADS[name]
    prompts, output_lens = draw_shape(shape, seed)
    return [
        make_job(prompt, num_outputs, f"request {index + 1} of {name}", temperature, request_seed(seed, index))
        for index, (prompt, num_outputs) in enumerate(zip(prompts, output_lens, strict=True))
    ]


def draw_shape(shape: Shape, seed: int) -> tuple[list[list[int]], list[int]]:
    """Draw each prompt's length and then its tokens, and after all prompts the output lengths.

    A fixed length draws nothing. Benchmarks of other engines draw in the same order, which must not change.
    """
    rng = random.Random(seed)

    def length(bounds: tuple[int, int]) -> int:
        low, high = bounds
        return low if low == high else rng.randint(low, high)

    prompts = []
    for _ in range(shape.num_requests):
        prompt_len = length(shape.prompt_len)
        prompts.append([rng.randint(0, LARGEST_ID) for _ in range(prompt_len)])
    return prompts, [length(shape.output_len) for _ in range(shape.num_requests)]


def request_seed(seed: int, index: int) -> int:
    return (seed * _SEED_STEP + index) % (1 << 62)


def make_job(tokens: list[int], max_tokens: int, origin: str, temperature: float | None, seed: int | None) -> BenchJob:
    """Make a job that samples without filters and ignores the model's defaults, so that all models do the same work."""
    params = SamplingParams(
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        ignore_eos=True,
        max_tokens=max_tokens,
        seed=seed,
    )
    return BenchJob(tokens, params, origin)


def fold_into(jobs: Sequence[BenchJob], vocab_size: int) -> list[BenchJob]:
    """Return jobs with token ids modulo `vocab_size`, for vocabularies smaller than a workload's largest id."""
    return [replace(job, tokens=[token % vocab_size for token in job.tokens]) for job in jobs]


# ---------------------------------------------------------------------------------------------------------------------
# Files


def read_jobs(path: Path, seed: int, temperature: float = TEMPERATURE) -> list[BenchJob]:
    """Read one JSON object per line: prompt_token_ids, max_tokens, and optionally temperature and seed. Blank lines are
    skipped."""
    jobs: list[BenchJob] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    defaults = {"temperature": temperature, "seed": request_seed(seed, len(jobs))}
                    jobs.append(_parse_line(line, f"{path} line {number}", defaults))
    except OSError as error:
        what = f"The requests in {path} can't be read: {error.strerror or error}."
        raise QuireError("bad_requests", what, "Check the path.", "requests") from None
    if not jobs:
        raise QuireError("bad_requests", f"There are no requests in {path}.", _expected(), "requests")
    return jobs


def _parse_line(line: bytes, origin: str, defaults: dict[str, Any]) -> BenchJob:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or a number of too many digits
        raise _bad_line(origin, f"is not JSON ({error})") from None
    if not isinstance(entry, dict):
        raise _bad_line(origin, "is not a JSON object")
    for name in entry:
        if name not in _FIELDS:
            raise _bad_line(origin, f"has an unknown field {name!r:.80}")
    tokens = entry.get("prompt_token_ids")
    if not isinstance(tokens, list) or not tokens or not all(is_integer(token) and token >= 0 for token in tokens):
        raise _bad_line(origin, "needs prompt_token_ids, a list of token ids that is not empty")
    max_tokens = entry.get("max_tokens")
    if not is_integer(max_tokens) or max_tokens < 1:
        raise _bad_line(origin, "needs max_tokens, a whole number of at least 1")
    options = {name: defaults[name] if entry.get(name) is None else entry[name] for name in defaults}
    try:
        return make_job(tokens, max_tokens, origin, **options)
    except QuireError as error:
        raise _bad_line(origin, f"is refused: {error.what.rstrip('.')}") from None


def is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _bad_line(origin: str, why: str) -> QuireError:
    return QuireError("bad_requests", f"{origin} {why}.", _expected(), "requests")


def _expected() -> str:
    return 'Each line is {"prompt_token_ids": [1, 2, 3], "max_tokens": 16}, optionally with temperature and seed.'
