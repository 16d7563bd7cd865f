"""Benchmarks end to end, on a model of made-up weights that has nothing but a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.bench.driver import measure, run_jobs
from quire.bench.workloads import BenchJob, draw_workload, fold_into, make_job
from quire.cli.main import main
from quire.engine.trace import NO_TRACE
from quire.llm import LLM
from quire.types import QuireError

VOCAB = 64
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
KNOBS: dict[str, Any] = {
    "random_weights": True,
    "num_pages": 129,
    "max_rows": 8,
    "max_batch_tokens": 64,
    "host_memory": 0,
    "threads": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def flags(folder: Path) -> list[str]:
    values = [f"--{name.replace('_', '-')}={value}" for name, value in KNOBS.items() if name != "random_weights"]
    return [f"--model={folder}", "--random-weights", *values]


def jobs(lens: list[tuple[int, int]]) -> list[BenchJob]:
    """Prompts that begin differently, with the lengths of prompt and output given."""
    prompts = [[(7 * index + place) % VOCAB for place in range(length)] for index, (length, _) in enumerate(lens)]
    return [make_job(prompts[i], num_outputs, f"job {i}", 0.0, i) for i, (_, num_outputs) in enumerate(lens)]


def test_what_is_written_down(folder: Path) -> None:
    lens = [(40, 5), (3, 1), (70, 12), (16, 4)]
    with LLM(str(folder), **KNOBS) as llm:
        run = run_jobs(llm, jobs(lens))
        again = run_jobs(llm, jobs(lens), salt=b"other")
        warm = run_jobs(llm, jobs(lens), salt=b"other")
        assert llm.engine.tracer is NO_TRACE, "the tracer was not put back"
        outputs = llm.generate([job.tokens for job in jobs(lens)], [job.params for job in jobs(lens)])
    assert [len(times) for times in run.token_times] == [len(output.token_ids) for output in outputs] == [5, 1, 12, 4]
    for times in run.token_times:
        assert times == sorted(times) and run.begin <= times[0] <= times[-1] <= run.end
    report = measure(run)
    assert (report["requests"], report["prompt_tokens"], report["output_tokens"]) == (4, 129, 22)
    assert report["total_tps"] / report["output_tps"] == pytest.approx((129 + 22) / 22)
    assert report["steps"] == run.counters["steps"] == sum(b["steps"] for b in report["rows_per_step"]["histogram"])
    assert sum(run.tokens_per_step) == 129 + 22 - 4, "every token but the last of each answer is computed once"
    assert report["tokens_per_step"]["max"] <= 64 and report["rows_per_step"]["max"] <= 4
    assert report["ttft_s"]["max"] <= report["wall_s"]
    assert again.counters["hit_tokens"] == 0, "another salt, and yet served from the cache"
    assert warm.counters["hit_tokens"] == 32 + 64, "full pages of the two long prompts"
    assert measure(warm)["cache_hit_ratio"] == pytest.approx(96 / 129)


def test_work_that_does_not_fit_is_refused_by_name(folder: Path) -> None:
    with LLM(str(folder), **KNOBS) as llm:
        with pytest.raises(QuireError, match=r"job 0 needs 500 \+ 13 tokens.* 512"):
            run_jobs(llm, jobs([(500, 13)]))
        with pytest.raises(QuireError, match=r"request 1 of single has token id .* 0 to 63"):
            run_jobs(llm, draw_workload("single", 0))
        assert not llm.engine.has_work


def test_more_requests_than_may_wait(folder: Path) -> None:
    with LLM(str(folder), **{**KNOBS, "max_waiting": 3}) as llm:
        report = measure(run_jobs(llm, jobs([(4, 2)] * 20)))
    assert report["requests"] == 20 and report["output_tokens"] == 40


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any], str]:
    code = main(["bench", *argv, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_offline_workload(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["offline", "--workload", "single", "--seed", "4", "--repeat", "3", *flags]
    code, report, err = run_json(capsys, *argv, "--min-output-tps", "1e-9")
    assert code == 0 and report["pass"]
    assert report["folded_to_vocab"] == VOCAB and f"modulo the model's vocabulary of {VOCAB}" in err
    assert [run["seed"] for run in report["runs"]] == [4, 5, 6]
    for run in report["runs"]:
        assert (run["requests"], run["prompt_tokens"], run["output_tokens"]) == (1, 128, 256)
        assert run["cache_hit_tokens"] == 0 and run["itl_s"]["p50"] > 0
    rates = sorted(run["output_tps"] for run in report["runs"])
    assert report["median"]["output_tps"] == rates[1]
    assert 0 < report["start"]["ready_s"] < report["start"]["first_token_s"]
    assert report["memory"]["peak_rss_bytes"] > 1 << 20 and report["memory"]["peak_cuda_bytes"] is None
    assert report["settings"]["device"] in ("cpu", "cuda") and report["settings"]["max_rows"] == 8


def test_offline_file_as_tables(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"prompt_token_ids": [i, 5, 9], "max_tokens": 1, "temperature": 0} for i in range(3)]
    Path("work.jsonl").write_text("\n".join(map(json.dumps, lines)))
    argv = ["bench", "offline", "--requests", "work.jsonl", "--no-warmup", *flags]
    assert main([*argv, "--min-output-tps", "1e12"]) == 2
    out, err = capsys.readouterr()
    assert err == ""
    for expected in ("work.jsonl, seed 0", "Rows a step: mean 3.0, max 3", "FAIL  output tok/s"):
        assert expected in out, out
    assert ["time", "between", "tokens", *"––––"] in [line.split() for line in out.splitlines()]
    assert main([*argv, "--repeat", "2"]) == 0
    assert "every run" in capsys.readouterr().out


def test_a_file_with_ids_of_another_model(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"prompt_token_ids": [token], "max_tokens": 1} for token in (VOCAB - 1, VOCAB)]
    Path("work.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main(["bench", "offline", "--requests", "work.jsonl", *flags]) == 1
    assert "work.jsonl line 2 has token id 64" in capsys.readouterr().err


def test_batch(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["batch", "--batch", "4", "--rounds", "2", "--prompt-len", "5", "--output-len", "6", *flags]
    code, report, _ = run_json(capsys, *argv)
    assert code == 0, "without --gate a missed bar is only reported"
    assert len(report["rounds"]) == 2 and report["batch"] == 4
    assert report["ratio"] == pytest.approx(report["batch_tps"] / report["one_tps"])
    assert [bar["bar"] for bar in report["bars"]] == [4.0, 100.0]
    code, report, _ = run_json(capsys, *argv, "--gate", "--batch", "1")
    assert code == (0 if report["pass"] else 2)
    assert main(["bench", *argv]) == 0
    assert "batch of 4" in capsys.readouterr().out


def test_growth(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["growth", "--first", "60", "--last", "130", *(flag for flag in flags if "num-pages" not in flag)]
    code, report, _ = run_json(capsys, *argv)
    assert [reading["requests"] for reading in report["readings"]] == [60, 130]
    sizes = [reading["rss_bytes"] for reading in report["readings"]]
    assert report["ratio"] == sizes[1] / sizes[0]
    assert code == (0 if report["ratio"] <= 1.02 else 2)
    assert report["cache_units"] == [63], "few enough pages to be full early"
    assert report["evicted_units"] > 0 and report["cache_hit_tokens"] > 0
    main(["bench", *argv])
    assert "resident memory, late over early" in capsys.readouterr().out


def test_folded_work_fits_the_vocabulary() -> None:
    assert max(max(job.tokens) for job in fold_into(draw_workload("batch8", 0), VOCAB)) < VOCAB
