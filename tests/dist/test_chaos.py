"""The chaos gate on groups of ranks, short: ranks killed and stopped, steps that fail, and nothing lost or doubled."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.e2e.conftest import ROOT

KINDS = ("rank_kill", "rank_stop", "sample", "mask", "forward")


@pytest.mark.parametrize("mesh", [("--tp", "2"), pytest.param(("--pp", "2"), marks=pytest.mark.slow)])
def test_a_lost_rank_costs_no_token(mesh: tuple[str, str]) -> None:
    command = [
        sys.executable,
        "-m",
        "quire",
        "chaos",
        "--model",
        "tiny",
        *mesh,
        "--minutes",
        "0.05",
        "--streams",
        "4",
        "--deterministic",
        "--threads",
        "1",
        "--max-tokens",
        "24",
        "--kinds",
        ",".join(KINDS),
        "--faults",
        "6",
        "--hang-timeout",
        "120",
        "--hostile",
        "0",
        "--json",
    ]
    env = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=400)
    assert done.stdout, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["passed"] and done.returncode == 0, (report["problems"], done.stderr[-2000:])
    assert set(report["faults"]) == set(KINDS) and report["restarts"] == 0
    assert len(report["regroup_seconds"]) == report["faults"]["rank_kill"] + report["faults"]["rank_stop"]
    assert [report[name] for name in ("lost", "duplicated", "wrong", "leaked", "failed")] == [0] * 5
