"""Hostile input beside streams, short: the HTTP process's memory stays bounded and no stream loses a token."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.e2e.conftest import MISSING, ROOT

KINDS = ("trailers", "amplify", "long prompts")
GROWTH = 96 << 20  # of the HTTP process: what is sent at a time, a few times over, and far below what was once 24 times


def test_memory_is_bounded_and_streams_lose_nothing_under_hostile_input() -> None:
    if MISSING or importlib.util.find_spec("torch") is None:
        pytest.skip("the server's packages or torch are not installed")
    command = [sys.executable, "-m", "quire", "bench", "hostile", "--model", "tiny", "--small", "--seconds", "1",
               "--streams", "4", "--rounds", "20", "--flood-mb", "20", "--kinds", ",".join(KINDS),
               "--json"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=400)
    assert done.stdout, done.stderr[-3000:]  # its bars on time may be missed here: tests do not look at clocks
    phases = json.loads(done.stdout)["phases"]
    assert [phase["name"] for phase in phases] == ["no attack", *KINDS, "all at once"]
    for phase in phases:
        memory, streams, name = phase["memory"], phase["streams"], phase["name"]
        assert memory["peak"] - phases[0]["memory"]["before"] <= GROWTH, (name, memory)
        assert (streams["lost"], streams["wrong"]) == (0, 0), (name, streams)
        assert not phase["wrong_answers"], name
        assert name == "no attack" or phase["answers"], name
    assert sum(phase["streams"]["tokens"] for phase in phases) > 0
