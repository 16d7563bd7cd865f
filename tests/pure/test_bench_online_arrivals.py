"""When requests arrive, and what they hold: rates, traces, lengths, prompts from a seed."""

from __future__ import annotations

import json
import os
import random
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from quire.bench.online.arrivals import (
    Arrival,
    Lengths,
    parse_lengths,
    poisson_arrivals,
    poisson_times,
    read_trace,
)
from quire.bench.online.requests import RequestOptions, make_requests, make_text, make_tokens, read_prompts
from quire.types import QuireError

SEED = int(os.environ.get("TEST_SEED", "7"))
OPTIONS = RequestOptions("m", chat=False, temperature=0.5, ignore_eos=True, seed=SEED)


# -- at a rate


def test_poisson_gaps_have_the_mean_and_the_spread_of_the_rate() -> None:
    print(f"seed {SEED}")
    times = poisson_times(50.0, 4001, SEED)
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0 and min(gaps) >= 0
    assert fmean(gaps) == pytest.approx(1 / 50, rel=0.1)
    mean = fmean(gaps)
    assert fmean((gap - mean) ** 2 for gap in gaps) == pytest.approx(mean**2, rel=0.25), "not exponential"


def test_the_same_seed_gives_the_same_requests_at_any_rate() -> None:
    slow, fast = (poisson_arrivals(rate, 40, 3, Lengths(5, 90), Lengths(2, 30)) for rate in (1.0, 10.0))
    assert [(one.prompt_len, one.output_len) for one in slow] == [(one.prompt_len, one.output_len) for one in fast]
    assert [one.at_s / 10 for one in slow] == pytest.approx([one.at_s for one in fast])
    assert slow == poisson_arrivals(1.0, 40, 3, Lengths(5, 90), Lengths(2, 30))
    assert slow != poisson_arrivals(1.0, 40, 4, Lengths(5, 90), Lengths(2, 30))


@pytest.mark.parametrize("text", ["128", "100-1024", "lognormal:200:0.8"])
def test_lengths_are_read_and_shown_alike(text: str) -> None:
    assert str(parse_lengths(text)) == text


def test_lengths_are_drawn_as_described() -> None:
    rng = random.Random(SEED)
    assert {parse_lengths("7").draw(rng) for _ in range(9)} == {7}
    assert {parse_lengths("3-5").draw(rng) for _ in range(200)} == {3, 4, 5}
    drawn = [parse_lengths("lognormal:200:0.5").draw(rng) for _ in range(2001)]
    assert median(drawn) == pytest.approx(200, rel=0.1) and max(drawn) > 500 and min(drawn) >= 1


@pytest.mark.parametrize("text", ["", "0", "-3", "9-3", "1.5", "lognormal:5", "normal:5:1", "9" * 30, "1-2-3", "٣"])
def test_wrong_lengths(text: str) -> None:
    with pytest.raises(ValueError):
        parse_lengths(text)


# -- from traces

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.5000000,400,10
2023-11-16 18:17:04.7500000,80,20

2023-11-16 18:17:05.0000000,3,1
"""
MOONCAKE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]},
    {"timestamp": 1000, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 3]},
    {"timestamp": 3000, "input_length": 512, "output_length": 7, "hash_ids": [9]},
]


def write(path: Path, content: str | list[Any]) -> Path:
    file = path / "trace"
    file.write_text(content if isinstance(content, str) else "\n".join(json.dumps(line) for line in content) + "\n")
    return file


def test_azure(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path, AZURE), 3)
    assert [(one.prompt_len, one.output_len, one.blocks) for one in found] == [(400, 10, ()), (80, 20, ()), (3, 1, ())]
    assert [one.at_s for one in found] == pytest.approx([0, 1.25, 1.5])


def test_scales(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path, AZURE), 3, scale_time=0.1, scale_len=0.25)
    assert [one.at_s for one in found] == pytest.approx([0, 0.125, 0.15])
    assert [(one.prompt_len, one.output_len) for one in found] == [(100, 2), (20, 5), (1, 1)], "never nothing"


def test_azure_with_time_zones_and_more_columns(tmp_path: Path) -> None:
    text = "Extra,TIMESTAMP,ContextTokens,GeneratedTokens\nx,2024-05-10 00:00:01+00:00,4,5\nx,2024-05-10 00:00:00,6,7\n"
    found = read_trace(write(tmp_path, text), 2)
    assert [(one.at_s, one.prompt_len) for one in found] == [(0, 6), (1, 4)], "in the order of time"


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.013, 1.7])
def test_equal_blocks_give_equal_prompts(tmp_path: Path, scale: float) -> None:
    first, second, third = read_trace(write(tmp_path, MOONCAKE), 3, scale_len=scale)
    assert [first.at_s, second.at_s, third.at_s] == [0, 0, 2]
    one, two, three = (make_tokens(arrival, index, SEED) for index, arrival in enumerate((first, second, third)))
    assert [len(one), len(two), len(three)] == [max(1, round(length * scale)) for length in (1100, 1030, 512)]
    shared = min(2 * max(1, round(512 * scale)), len(two))
    assert one[:shared] == two[:shared] and one[shared:][:6] != two[shared:][:6]
    assert make_text(one[:shared]) == make_text(two[:shared])
    assert three[:6] != one[:6]
    assert one == make_tokens(first, 77, SEED), "blocks alone decide"
    assert one != make_tokens(first, 0, SEED + 1)


def test_prompts_without_blocks_share_nothing() -> None:
    prompts = [make_tokens(Arrival(0.0, 50, 1), index, SEED) for index in range(20)]
    assert len({tuple(prompt[:5]) for prompt in prompts}) == 20
    assert make_tokens(Arrival(0.0, 50, 1), 3, SEED) == prompts[3]
    assert make_tokens(Arrival(0.0, 51, 1), 3, SEED)[:5] != prompts[3][:5], "other work would find it in the cache"


GOOD = MOONCAKE[0]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([GOOD, {**GOOD, "hash_ids": [0]}], "line 2 is wrong: 1 blocks of 512 do not make 1100 tokens"),
        ([GOOD, {**GOOD, "hash_ids": "x"}], "hash_ids is not a list"),
        ([GOOD, {**GOOD, "timestamp": True}], "timestamp is not a number"),
        ([GOOD, {**GOOD, "input_length": -1}], "-1 is not a length"),
        ([GOOD, {**GOOD, "output_length": "5"}], "'5' is not a length"),
        ([GOOD, {"timestamp": 1}], "'input_length' is missing"),
        ([GOOD, []], "line 2 is wrong: it is not a JSON object"),
        ("{", "line 1 is wrong: it is not JSON"),
        ('{"timestamp": ' + "9" * 400 + ', "input_length": 1, "output_length": 1}', "line 1 is wrong"),
        ("{" * 100_000, "it is not JSON"),
        ("", "neither an Azure CSV"),
        ("a,b,c\n1,2,3\n", "neither an Azure CSV"),
        (AZURE.replace(",80,", ",x,"), "line 3 is wrong"),
        (AZURE.replace(",80,20", ""), "line 3 is wrong"),
        (AZURE.replace("2023-11-16 18:17:04", "yesterday"), "line 3 is wrong"),
        (AZURE.replace("\n\n", "\n"), "has 3 requests, fewer than the 4 of --requests"),
        ("\0\0", "neither an Azure CSV"),
    ],
)
def test_wrong_traces(tmp_path: Path, content: str | list[Any], why: str) -> None:
    with pytest.raises(QuireError) as caught:
        read_trace(write(tmp_path, content), 4)
    assert why in caught.value.what and "\n" not in str(caught.value)


def test_a_trace_is_read_no_further_than_needed(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path, [*MOONCAKE, "broken"]), 3)) == 3


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "binary"):
        for read in (lambda path: read_trace(path, 1), read_prompts):
            with pytest.raises(QuireError, match="can't be read"):
                read(path)


# -- requests


def test_a_call_asks_for_a_stream_with_usage() -> None:
    (call,) = make_requests([Arrival(1.5, 12, 34)], OPTIONS)
    body = json.loads(call.body)
    assert (call.at_s, call.path, call.output_len) == (1.5, "/completions", 34)
    assert len(body["prompt"]) == 12 and body["max_tokens"] == 34 and body["ignore_eos"] is True
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert body["model"] == "m" and body["temperature"] == 0.5


def test_chat_has_a_message_of_as_many_words() -> None:
    options = RequestOptions("m", chat=True, temperature=0.0, ignore_eos=False, seed=1)
    (call,) = make_requests([Arrival(0.0, 12, 3)], options)
    body = json.loads(call.body)
    assert call.path == "/chat/completions" and "ignore_eos" not in body and "prompt" not in body
    assert len(body["messages"][0]["content"].split()) == 12


def test_prompts_of_a_file_go_round(tmp_path: Path) -> None:
    lines = [
        {"prompt": "Hello", "max_tokens": 3},
        {"prompt_token_ids": [1, 2], "temperature": 0, "seed": 9},
        {"messages": [{"role": "user", "content": "Hi"}]},
    ]
    prompts = read_prompts(write(tmp_path, lines))
    calls = make_requests([Arrival(float(index), 1, 8) for index in range(4)], OPTIONS, prompts)
    bodies = [json.loads(call.body) for call in calls]
    assert [call.path for call in calls] == ["/completions", "/completions", "/chat/completions", "/completions"]
    assert [call.output_len for call in calls] == [3, 8, 8, 3]
    assert bodies[0]["prompt"] == bodies[3]["prompt"] == "Hello" and bodies[1]["prompt"] == [1, 2]
    assert (bodies[1]["temperature"], bodies[1]["seed"], bodies[0]["temperature"]) == (0, 9, 0.5)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({}, "needs one of"),
        ({"prompt": "x", "messages": []}, "needs one of"),
        ({"prompt": 5}, "wrong type"),
        ({"prompt": "x", "max_token": 5}, "unknown field 'max_token'"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ([], "not a JSON object"),
    ],
)
def test_wrong_prompts(tmp_path: Path, line: Any, why: str) -> None:
    with pytest.raises(QuireError, match=r"line 2 is wrong") as caught:
        read_prompts(write(tmp_path, [{"prompt": "x"}, line]))
    assert why in caught.value.what


def test_a_file_without_prompts(tmp_path: Path) -> None:
    with pytest.raises(QuireError, match="no prompts"):
        read_prompts(write(tmp_path, "\n\n"))
