"""The work of benchmarks: the same numbers everyone draws, and files that are refused with their line."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from quire.bench.workloads import WORKLOADS, draw_workload, fold_into, read_jobs
from quire.types import QuireError


def derive_ragged(num_requests: int, low: int, high: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """The formula, written out: a length, its tokens, the next length; when all prompts are there, output lengths."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    while len(prompts) < num_requests:
        length = rng.randint(low, high)
        prompts.append([rng.randint(0, 10000) for _ in range(length)])
    return prompts, [rng.randint(low, high) for _ in prompts]


def derive_fixed(num_requests: int, prompt_len: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(0, 10000) for _ in range(prompt_len)] for _ in range(num_requests)]


@pytest.mark.parametrize("seed", [0, 5])
def test_ragged256_is_the_formula(seed: int) -> None:
    jobs = draw_workload("ragged256", seed)
    prompts, output_lens = derive_ragged(256, 100, 1024, seed)
    assert [job.tokens for job in jobs] == prompts
    assert [job.num_outputs for job in jobs] == output_lens


@pytest.mark.parametrize(
    ("name", "count", "prompt_len", "output_len"),
    [("single", 1, 128, 256), ("batch8", 8, 128, 256), ("prefill", 32, 4096, 1), ("long", 8, 32000, 128)],
)
def test_fixed_workloads_are_the_formula(name: str, count: int, prompt_len: int, output_len: int) -> None:
    jobs = draw_workload(name, 3)
    assert [job.tokens for job in jobs] == derive_fixed(count, prompt_len, 3)
    assert [job.num_outputs for job in jobs] == [output_len] * count


def test_first_numbers_for_seed_0() -> None:
    """Written down once, so that neither side of the comparisons above can change in silence."""
    ragged = draw_workload("ragged256", 0)
    assert [len(job.tokens) for job in ragged[:4]] == [964, 724, 484, 508]
    assert ragged[0].tokens[:4] == [6311, 6890, 663, 4242]
    assert sum(len(job.tokens) for job in ragged) == 142827
    assert sum(job.num_outputs for job in ragged) == 133966
    assert draw_workload("single", 0)[0].tokens[:4] == [6311, 6890, 663, 4242]


def test_every_request_samples_from_everything_and_runs_to_its_end() -> None:
    jobs = [job for name in WORKLOADS for job in draw_workload(name, 0)[:2]]
    for job in jobs:
        params = job.params
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 0, 1.0, 0.0)
        assert params.repetition_penalty == 1.0 and params.ignore_eos
    eight = draw_workload("batch8", 0) + draw_workload("batch8", 1)
    assert len({job.params.seed for job in eight}) == 16, "two requests would draw the same noise"


def test_folding_wraps_ids_around_and_keeps_the_rest() -> None:
    jobs = draw_workload("batch8", 0)
    folded = fold_into(jobs, 100)
    assert [[token % 100 for token in job.tokens] for job in jobs] == [job.tokens for job in folded]
    assert [job.params for job in jobs] == [job.params for job in folded]


# -- files


def write(path: Path, *lines: object) -> Path:
    file = path / "work.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def test_a_file_of_requests(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        {"prompt_token_ids": [1, 2, 3], "max_tokens": 4},
        "",
        {"prompt_token_ids": [5], "max_tokens": 1, "temperature": 0, "seed": 9},
    )
    jobs = read_jobs(file, seed=0, temperature=0.25)
    assert [(job.tokens, job.num_outputs) for job in jobs] == [([1, 2, 3], 4), ([5], 1)]
    assert [job.params.temperature for job in jobs] == [0.25, 0]
    assert jobs[1].params.seed == 9
    assert jobs[0].params.seed != read_jobs(file, seed=1)[0].params.seed
    assert jobs[1].origin == f"{file} line 3"


GOOD = {"prompt_token_ids": [1], "max_tokens": 1}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("1" * 5000, "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        ({"max_tokens": 1}, "needs prompt_token_ids"),
        ({**GOOD, "prompt_token_ids": []}, "needs prompt_token_ids"),
        ({**GOOD, "prompt_token_ids": "1 2"}, "needs prompt_token_ids"),
        ({**GOOD, "prompt_token_ids": [1, -1]}, "needs prompt_token_ids"),
        ({**GOOD, "prompt_token_ids": [True]}, "needs prompt_token_ids"),
        ({**GOOD, "prompt_token_ids": [1.5]}, "needs prompt_token_ids"),
        ({"prompt_token_ids": [1]}, "needs max_tokens"),
        ({**GOOD, "max_tokens": 0}, "needs max_tokens"),
        ({**GOOD, "max_tokens": "5"}, "needs max_tokens"),
        ({**GOOD, "temperature": -1}, "temperature=-1"),
        ('{"prompt_token_ids": [1], "max_tokens": 1, "temperature": NaN}', "temperature=nan"),
        ({**GOOD, "seed": 1.5}, "seed=1.5"),
        ({**GOOD, "max_token": 3}, "unknown field 'max_token'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, why: str) -> None:
    file = write(tmp_path, GOOD, line)
    with pytest.raises(QuireError) as caught:
        read_jobs(file, seed=0)
    assert caught.value.what.startswith(f"{file} line 2 ")
    assert why in caught.value.what and "\n" not in str(caught.value)


def test_files_without_requests(tmp_path: Path) -> None:
    with pytest.raises(QuireError, match="no requests"):
        read_jobs(write(tmp_path, "", ""), seed=0)
    with pytest.raises(QuireError, match="can't be read: No such file"):
        read_jobs(tmp_path / "absent.jsonl", seed=0)
    with pytest.raises(QuireError, match="can't be read: Is a directory"):
        read_jobs(tmp_path, seed=0)
    (tmp_path / "work.jsonl").write_bytes(b'{"prompt_token_ids": [1], "max_tokens": 1}\n\xff\xfe\n')
    with pytest.raises(QuireError, match="line 2 is not JSON"):
        read_jobs(tmp_path / "work.jsonl", seed=0)
