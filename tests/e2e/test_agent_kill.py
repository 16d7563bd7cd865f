"""Sessions that were killed: resumed with all that was shown, wherever their file was cut, and with their cache."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from quire.agent.loop.agent import Agent
from quire.agent.session.log import SessionLog
from quire.agent.tools.toolbox import Toolbox
from tests.cpu.tiny_llm import make_tiny_llm
from tests.e2e.agent_kills import NUM_EVENTS, kill_and_resume, run_session
from tests.pure.scripted_engine import ScriptedEngine
from tests.pure.test_agent_loop import Echo

ROOT = Path(__file__).parents[2]
LINK = 16  # tokens of one block of the stored cache


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_sessions_killed_at_random_moments_lose_nothing(count: int, tmp_path: Path) -> None:
    seed = int(os.environ.get("TEST_SEED", random.randrange(1 << 30)))
    rng = random.Random(seed)
    moments = [None if number % 4 == 3 else rng.randint(1, NUM_EVENTS) for number in range(count)]
    killed = [kill_and_resume(tmp_path / str(number), number, moment) for number, moment in enumerate(moments)]
    print(f"TEST_SEED={seed}", [(one.num_shown, one.num_lost_calls) for one in killed])
    assert [(number, one) for number, one in enumerate(killed) if one.problem] == []
    assert len({one.num_shown for one in killed}) > count // 3  # they were not all killed at the same place
    assert count < 100 or any(one.num_lost_calls for one in killed)


def test_a_session_file_cut_anywhere_is_resumed(tmp_path: Path) -> None:
    seed = int(os.environ.get("TEST_SEED", random.randrange(1 << 30)))
    print(f"TEST_SEED={seed}")
    rng = random.Random(seed)
    run_session(tmp_path, 0)
    path = next(tmp_path.glob("*.jsonl"))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for place in [first, len(whole), *(rng.randrange(first, len(whole)) for _ in range(150))]:
        path.write_bytes(whole[:place])
        log = SessionLog.resume(path)
        assert not log.notes and not log.state.open_calls()
        assert Agent(ScriptedEngine(["on"]), log, toolbox=Toolbox([Echo()])).take("go on").text == "on"
        log.close()


def test_a_line_that_was_damaged_is_left_out_with_a_note(tmp_path: Path) -> None:
    run_session(tmp_path, 0)
    path = next(tmp_path.glob("*.jsonl"))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], b'{"type": "delta", "te\xff\x00\n', *lines[6:]]))
    log = SessionLog.resume(path)
    assert len(log.notes) == 1 and "line 6" in log.notes[0]
    assert Agent(ScriptedEngine(["on"]), log, toolbox=Toolbox([Echo()])).take("go on").text == "on"
    log.close()


def test_after_a_kill_only_new_tokens_are_computed_where_the_cache_was_kept(tmp_path: Path) -> None:
    model = make_tiny_llm(tmp_path / "model", max_position_embeddings=8192)
    project = tmp_path / "project"
    project.mkdir()
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    base = [
        sys.executable,
        "-m",
        "quire",
        "chat",
        "--model",
        str(model),
        "--tools",
        "none",
        "--max-model-len",
        "4096",
        "--cache-dir",
        str(tmp_path / "cache"),
    ]

    def ask(text: str, *more: str) -> dict[str, int]:
        argv = [*base, "-p", text, "--json", "--max-tokens", "8", *more]
        done = subprocess.run(argv, cwd=project, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        usage: dict[str, int] = json.loads(done.stdout)["usage"]
        return usage

    first = ask("why is the sky blue, and why is the light scattered? " * 6)
    assert first["cached_input_tokens"] == 0 and first["input_tokens"] > 100
    argv = [*base, "-p", "and why is that?", "--continue", "--stream-json", "--max-tokens", "3000"]
    killed = subprocess.Popen(argv, cwd=project, env=env, stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    said = ""
    try:
        for line in killed.stdout:
            event = json.loads(line)
            if event["type"] == "item.updated":
                said += event["item"]["delta"]
                if len(said) > 20:
                    break
    finally:
        killed.kill()
        killed.wait()
        killed.stdout.close()
    second = ask("go on", "--continue")
    assert second["cached_input_tokens"] >= first["input_tokens"] // LINK * LINK
    record = json.loads(next((tmp_path / "state").rglob("*.jsonl")).read_text().splitlines()[0])
    assert record["type"] == "session"
    texts = [
        json.loads(line).get("message", {}).get("content") or ""
        for line in next((tmp_path / "state").rglob("*.jsonl")).read_text().splitlines()
    ]
    assert any(text.startswith(said) for text in texts)
