"""Online runs against a server made for the test: open loop, failures, figures, and the command around them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.bench.online.arrivals import Arrival, Lengths, poisson_arrivals
from quire.bench.online.requests import RequestOptions
from quire.bench.online.run import ClientLimits, Record, Targets, bench_online, first_model, measure
from quire.bench.online.stream_client import Answer, parse_url
from quire.cli.main import main
from quire.types import QuireError
from tests.pure.fake_openai import Behaviour, Exchange, fake_server

OPTIONS = RequestOptions("fake", chat=False, temperature=0.0, ignore_eos=True, seed=1)
WORK = {"requests": 8, "rate": 500.0, "input_len": "5", "output_len": "4", "seed": 1}
LIMITS = ClientLimits(timeout_s=20.0)


def bench(behave: Behaviour, count: int = 8, **options: Any) -> dict[str, Any]:
    arrivals = poisson_arrivals(500.0, count, 1, Lengths(5, 5), Lengths(4, 4))
    with fake_server(behave) as server:
        settings = {"work": WORK, "limits": LIMITS, "warmup": False, **options}
        return bench_online(parse_url(server.url), arrivals, OPTIONS, **settings)


class Gathering:
    """Answers nobody before `size` requests are there at the same time."""

    def __init__(self, size: int):
        self.size, self.num_here, self.full = size, 0, asyncio.Event()

    async def __call__(self, exchange: Exchange) -> None:
        self.num_here += 1
        if self.num_here == self.size:
            self.full.set()
        await self.full.wait()
        await exchange.answer()


# -- open loop


def test_requests_do_not_wait_for_earlier_ones() -> None:
    report = bench(Gathering(8))
    assert (report["answered"], report["failed"]) == (8, 0), report["failures"]
    assert report["client"]["most_open"] == 8 and report["client"]["held_back"] == 0
    assert max(entry["sent_s"] for entry in report["requests"]) <= min(entry["end_s"] for entry in report["requests"])


def test_the_bound_on_connections_is_kept_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers take many turns of the loop, so that all eight are due before the first two have ended."""

    async def answer_slowly(endpoint: Any, path: str, body: bytes, answer: Answer, clock: Callable[[], float]) -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        answer.take('{"choices": [{"text": "a", "finish_reason": "length"}]}', clock())

    monkeypatch.setattr("quire.bench.online.run.stream", answer_slowly)
    limits, endpoint = ClientLimits(max_open=2), parse_url("http://127.0.0.1:1")
    report = bench_online(endpoint, [Arrival(0.0, 3, 2)] * 8, OPTIONS, work=WORK, limits=limits, warmup=False)
    assert report["answered"] == 8, report["failures"]
    assert report["client"]["most_open"] == 2 and report["client"]["held_back"] == 6
    late = [entry["sent_s"] - entry["due_s"] for entry in report["requests"]]
    assert max(late) == pytest.approx(report["client"]["lag_s"]["max"], abs=1e-5)
    assert all(entry["ttft_s"] >= lag for entry, lag in zip(report["requests"], late, strict=True)), (
        "waiting is latency"
    )


def test_arrivals_are_never_early() -> None:
    report = bench(Exchange.answer, count=20)
    assert all(entry["sent_s"] >= entry["due_s"] - 1e-3 for entry in report["requests"])
    assert report["rates"]["offered_rps"] is not None and report["rates"]["sent_rps"] > 0


def test_every_request_is_what_was_planned() -> None:
    seen = []

    async def behave(exchange: Exchange) -> None:
        seen.append(exchange)
        await exchange.answer()

    report = bench(behave)
    assert {exchange.path for exchange in seen} == {"/v1/completions"}
    assert all(len(exchange.body["prompt"]) == 5 and exchange.body["max_tokens"] == 4 for exchange in seen)
    assert len({tuple(exchange.body["prompt"]) for exchange in seen}) == 8
    assert report["prompt_tokens"] == 40 and report["output_tokens"] == 32
    assert report["without_usage"] == report["short_answers"] == 0
    assert report["goodput"] == {"requests": 8, "share": 1.0, "rps": report["rates"]["answered_rps"]}


# -- failures


async def misbehave(exchange: Exchange) -> None:
    """Each request in its own way; the first and the last are answered."""
    if exchange.index == 1:
        await exchange.refuse("429 Too Many Requests", "Try\nlater.")
    elif exchange.index == 2:
        exchange.writer.transport.abort()
    elif exchange.index == 3:
        await exchange.begin()
        await exchange.piece("half an ")
        exchange.writer.close()
    elif exchange.index == 4:
        await exchange.begin()
        await exchange.chunk(b"data: {broken\n\n")
    elif exchange.index == 5:
        await exchange.begin()
        await exchange.event({"error": {"message": "The engine stopped."}})
        await exchange.finish(None)
    elif exchange.index == 6:
        await exchange.refuse("429 Too Many Requests", "Try\nlater.")
    else:
        await exchange.answer()


def test_failures_are_counted_by_kind_and_the_others_go_on() -> None:
    report = bench(misbehave)
    counts = {failure["outcome"]: failure["count"] for failure in report["failures"]}
    assert counts == {"HTTP 429": 2, "hung up": 2, "malformed event": 1, "error event": 1}
    assert (report["answered"], report["failed"]) == (2, 6)
    examples = {failure["outcome"]: failure["example"] for failure in report["failures"]}
    assert examples["HTTP 429"] == "Try later." and examples["error event"] == "The engine stopped."
    failed = [entry for entry in report["requests"] if entry["outcome"] != "ok"]
    assert all(entry["ttft_s"] is None and entry["e2e_s"] is None for entry in failed)
    assert report["goodput"]["share"] == 2 / 8
    json.dumps(report, allow_nan=False)


def test_a_request_that_never_ends_is_given_up() -> None:
    async def behave(exchange: Exchange) -> None:
        if exchange.index == 3:
            await exchange.begin()
            await asyncio.Event().wait()
        await exchange.answer()

    report = bench(behave, limits=ClientLimits(timeout_s=0.5))
    assert [failure["outcome"] for failure in report["failures"]] == ["timeout"]
    assert report["answered"] + report["failed"] == 8


def test_when_nobody_is_answered_there_is_no_report() -> None:
    with pytest.raises(QuireError, match=r"None of 8 requests was answered; 8 times HTTP 503 \(Go away\.\)"):
        bench(lambda exchange: exchange.refuse("503 Busy", "Go away."))


def test_the_warm_up_finds_out_first() -> None:
    seen = []

    async def behave(exchange: Exchange) -> None:
        seen.append(exchange.index)
        await exchange.refuse("401 No", "Wrong key.")

    with pytest.raises(QuireError, match=r"HTTP 401: Wrong key"):
        bench(behave, warmup=True)
    assert seen == [0]


def test_servers_without_usage_and_answers_that_end_early() -> None:
    async def behave(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.piece("a")
        await exchange.piece("b", "stop")
        await exchange.finish(None if exchange.index % 2 else {"prompt_tokens": 5, "completion_tokens": 3})

    report = bench(behave)
    assert report["without_usage"] == 4 and report["output_tokens"] == 4 * 2 + 4 * 3
    assert report["short_answers"] == 4, "of those that say how long they are"


# -- figures


def record(due: float, first: float, pieces: int, between: float, tokens: int | None = None, sent: float | None = None,
           outcome: str = "ok") -> Record:  # fmt: skip
    times = [due + first + index * between for index in range(pieces)]
    answer = Answer(times, True, 10, 2, pieces if tokens is None else tokens)
    end = times[-1] if times else due + 1
    return Record(due, due if sent is None else sent, end, outcome=outcome, answer=answer)


def test_figures_of_known_records() -> None:
    records = [record(index / 10, (index + 1) / 100, 5, 0.02) for index in range(101)]
    report = measure(records, [5] * 101, Targets())
    assert report["ttft_s"] == pytest.approx({"p50": 0.51, "p90": 0.91, "p99": 1.0, "max": 1.01})
    for name in ("tpot_s", "itl_s", "pause_s"):
        assert report[name]["p50"] == pytest.approx(0.02) and report[name]["max"] == pytest.approx(0.02)
    assert report["e2e_s"]["p50"] == pytest.approx(0.51 + 0.08)
    assert report["wall_s"] == pytest.approx(10 + 1.01 + 0.08)
    assert report["rates"]["offered_rps"] == pytest.approx(10)
    assert report["output_tokens"] == 505 and report["output_tps"] == pytest.approx(505 / 11.09)
    assert report["cached_tokens"] == 202 and report["total_tps"] == pytest.approx((505 + 1010) / 11.09)


def test_goodput_counts_those_within_both_targets() -> None:
    records = [
        record(0.0, 0.1, 3, 0.01),  # good
        record(0.1, 0.3, 3, 0.01),  # late
        record(0.2, 0.1, 3, 0.05),  # slow
        record(0.3, 0.1, 1, 0.0),  # one token: no time per token
        record(0.4, 0.1, 3, 0.01, outcome="HTTP 500"),
        record(0.5, 0.2, 3, 0.02),  # exactly on the targets
    ]
    report = measure(records, [3] * 6, Targets(0.2, 0.02))
    assert report["goodput"]["requests"] == 3 and report["goodput"]["share"] == 0.5
    assert measure(records, [3] * 6, Targets())["goodput"]["requests"] == 5


def test_time_per_token_uses_the_count_of_the_server() -> None:
    """Two tokens in an event are still two tokens."""
    report = measure([record(0.0, 0.1, 5, 0.04, tokens=9)], [9], Targets())
    assert report["tpot_s"]["p50"] == pytest.approx(0.02) and report["itl_s"]["p50"] == pytest.approx(0.04)
    assert measure([record(0.0, 0.1, 1, 0.0, tokens=9)], [9], Targets())["tpot_s"] is None


def test_the_timeline_adds_up() -> None:
    records = [record(index * 0.13, 0.05, 7, 0.03) for index in range(40)]
    report = measure(records, [7] * 40, Targets())
    timeline = report["timeline"]
    width = timeline["bin_s"]
    assert width * len(timeline["in_flight"]) == pytest.approx(report["wall_s"])
    assert sum(timeline["output_tps"]) * width == pytest.approx(report["output_tokens"], rel=1e-3)
    busy = sum(entry.end_s - entry.sent_s for entry in records)
    assert sum(timeline["in_flight"]) * width == pytest.approx(busy, rel=1e-3)
    assert timeline["mean_in_flight"] == pytest.approx(busy / report["wall_s"])


def test_latency_counts_from_when_a_request_was_due() -> None:
    report = measure([record(1.0, 0.5, 2, 0.1, sent=1.4)], [2], Targets())
    assert report["ttft_s"]["p50"] == 0.5
    assert report["rates"]["offered_rps"] is None, "one arrival has no rate"


# -- the command


def run_command(url: str, *flags: str) -> list[str]:
    return ["bench", "online", "--url", url, "--requests", "6", "--no-warmup", "--output-len", "4", *flags]


def test_json_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "run.html"
    with fake_server() as server:
        assert main(run_command(server.url, "--rate", "200", "--html", str(page), "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["benchmark"] == "online" and report["model"] == "fake" and report["answered"] == 6
    assert report["work"]["rate"] == 200 and report["work"]["output_len"] == "4" and report["pass"]
    assert page.read_text().startswith("<!doctype html>")


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(misbehave) as server:
        assert main(run_command(server.url, "--rate", "200", "--ttft-target", "60000", "--tpot-target", "60000")) == 0
    out = capsys.readouterr().out
    for text in (
        "1 of 6",
        "time to first token",
        "HTTP 429",
        "The engine stopped.",
        "goodput",
        "offered",
        "client lag",
    ):
        assert text in out, text


def test_too_few_good_requests_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(misbehave) as server:
        assert main(run_command(server.url, "--rate", "200", "--min-goodput", "0.9")) == 2
    assert "FAIL  share of good requests" in capsys.readouterr().out


def test_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    lines = [{"timestamp": at, "input_length": 600, "output_length": 40, "hash_ids": [0, at]} for at in range(6)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["bench", "online", "--requests", "6", "--no-warmup", "--trace", str(trace), "--scale-len", "0.1", "--json"]
    seen = []

    async def behave(exchange: Exchange) -> None:
        seen.append(exchange.body)
        await exchange.answer()

    with fake_server(behave) as server:
        assert main([*argv, "--url", server.url]) == 0
    work = json.loads(capsys.readouterr().out)["work"]
    assert (work["trace"], work["scale_len"], work["scale_time"]) == ("t.jsonl", 0.1, 1.0) and work["shares_prefixes"]
    assert {len(body["prompt"]) for body in seen} == {60} and {body["max_tokens"] for body in seen} == {4}
    assert len({tuple(body["prompt"][:51]) for body in seen}) == 1, "the first block is everyone's"
    assert len({tuple(body["prompt"][51:]) for body in seen}) == 6


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--rate", "1", "--scale-time", "2"], "go with --trace"),
        (["--trace", "absent", "--input-len", "5"], "A trace has its own lengths"),
        (["--trace", "absent"], "can't be read"),
        (["--rate", "1", "--prompts", "absent"], "can't be read"),
        (["--rate", "1", "--prompts", "absent", "--input-len", "5"], "both set the prompts"),
        (["--rate", "1", "--html", "no/such/place.html"], "can't be written"),
        (["--rate", "1"], "no connection"),
        (["--rate", "1", "--model", "m"], "no connection"),
    ],
)
def test_what_can_not_be_measured_is_exit_code_1(
    flags: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with fake_server() as server:
        gone = server.url
    assert main(["bench", "online", "--url", gone, "--requests", "2", *flags]) == 1
    out, err = capsys.readouterr()
    assert out == "" and why in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--requests", "5"],
        ["--rate", "1"],
        ["--rate", "1", "--trace", "x", "--requests", "5"],
        ["--rate", "0", "--requests", "5"],
        ["--rate", "nan", "--requests", "5"],
        ["--rate", "inf", "--requests", "5"],
        ["--rate", "1", "--requests", "0"],
        ["--rate", "1", "--requests", "5", "--input-len", "9-3"],
        ["--rate", "1", "--requests", "5", "--temperature", "-1"],
        ["--rate", "1", "--requests", "5", "--min-goodput", "1.5"],
    ],
    ids=" ".join,
)
def test_wrong_usage(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "online", "--url", "http://127.0.0.1:1", *flags]) == 1
    assert "error:" in capsys.readouterr().err


def test_the_model_is_asked_for() -> None:
    with fake_server() as server:
        assert first_model(parse_url(server.url)) == "fake"


def test_torch_stays_out() -> None:
    script = """
import sys
import quire.bench.online.compare, quire.bench.online.run, quire.bench.online.tables, quire.bench.online.report
assert "torch" not in sys.modules
"""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(quire.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_all_at_once_has_no_rate_to_report() -> None:
    with fake_server(Gathering(5)) as server:
        endpoint = parse_url(server.url)
        report = bench_online(endpoint, [Arrival(0.0, 3, 2)] * 5, OPTIONS, work=WORK, limits=LIMITS, warmup=False)
    assert report["answered"] == 5 and report["rates"]["offered_rps"] is None


def test_a_sweep_of_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "sweep.html"
    with fake_server() as server:
        assert main(run_command(server.url, "--rate", "100,200", "--html", str(page), "--json")) == 0
        report = json.loads(capsys.readouterr().out)
        assert main(run_command(server.url, "--rate", "100,200")) == 0
        assert "at 2 rates" in capsys.readouterr().out
        assert main(run_command(server.url, "--rate", "100,0")) == 1
    assert [run["work"]["rate"] for run in report["runs"]] == [100, 200] and report["pass"]
    assert all(run["benchmark"] == "online" and run["answered"] == 6 for run in report["runs"])
    text = page.read_text()
    assert text.count("<svg") == 3 and "100 requests/s: p50" in text and "200 requests/s: p99" in text
