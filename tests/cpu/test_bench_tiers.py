"""`quire bench tiers` on a tiny model: each source is really used, and the report has what the tables show."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.bench.tables import show
from quire.bench.tiers import TierWork, bench_tiers
from quire.llm import LLM
from tests.cpu.tiny_llm import make_tiny_llm


def test_prompts_come_from_every_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_llm(tmp_path / "model", max_position_embeddings=1024)
    counts = []

    def open_llm(knobs: dict) -> LLM:
        llm = LLM(str(model), dtype="float32", threads=1, host_memory=64 << 20, **knobs)
        counts.append(llm.engine.scheduler.stats)
        return llm

    report = bench_tiers(open_llm, TierWork((16, 400), rounds=2, stream_tokens=48))
    assert [one["tokens"] for one in report["lengths"]] == [16, 400]
    assert all(one[source] > 0 for one in report["lengths"] for source in ("cold", "device", "host", "disk"))
    assert report["tiers"]["disk"]["hits"] > 50 and report["tiers"]["disk"]["failures"] == 0
    assert report["bytes"] > 0 and len(report["bars"]) == 5 and report["pass"] in (True, False)
    assert counts[1].computed_tokens < counts[0].computed_tokens, "the second engine loads what the first computed"
    show(report)
    assert "break-even" in capsys.readouterr().out
