"""Real `quire chat -p` processes that are killed at random moments, and what their sessions hold afterwards.

Each session has two processes, with a scripted server as the engine: the first calls tools and is killed after so many
events, the second goes on. What the second sends to its server must hold everything that the first has shown.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.agent.loop.agent import Agent
from quire.agent.permissions import Permissions
from quire.agent.session.log import SessionLog
from quire.agent.session.records import LOST_RESULT
from quire.agent.tools.toolbox import Toolbox
from tests.e2e.transcript_server import transcript_server
from tests.pure.scripted_engine import Prepared, ScriptedEngine, calling
from tests.pure.test_agent_loop import Echo

ROOT = Path(__file__).parents[2]
MESSAGES = ("first question", "second question", "third question")
NUM_EVENTS = 140  # of a session that is left alone, about
PIPE = 4096  # bytes; a process waits while its events are unread, so it can't end before it is killed


def transcript(number: int) -> list[Prepared]:
    """Answers with text, calls side by side, and text again; all words are told apart by their numbers."""
    answers: list[Prepared] = []
    for turn in range(len(MESSAGES)):
        mark = f"s{number}t{turn}"
        first = " ".join(f"{mark}a{word}" for word in range(40))
        calls = [("echo", {"text": f"{mark}call{index}"}) for index in range(2)]
        answers.append(calling(*calls, text=first, ids=f"{mark}-"))
        answers.append(" ".join(f"{mark}b{word}" for word in range(60)))
    return answers


def run_session(folder: Path, number: int) -> None:
    """Works on all messages in this process."""
    log = SessionLog.create(folder, project="/p", model="scripted", system="Be brief", tools=["echo"])
    agent = Agent(ScriptedEngine(transcript(number)), log, toolbox=Toolbox([Echo()]), permissions=Permissions(["*"]))
    for message in MESSAGES:
        agent.take(message)
    log.close()


@dataclass(frozen=True, slots=True)
class KilledSession:
    num_shown: int  # events
    num_lost_calls: int  # which ran when it was killed
    problem: str  # what was lost; empty if nothing


def kill_and_resume(folder: Path, number: int, events: int | None) -> KilledSession:
    """Kills a session after about so many events, or while its calls run, and goes on with it in another process."""
    project = folder / "project"
    project.mkdir(parents=True)
    paths = ["first.txt", "second.txt"]
    for path in paths:
        (project / path).write_text(f"s{number} {path}\n")
    before = " ".join(f"s{number}a{word}" for word in range(80))
    after = " ".join(f"s{number}b{word}" for word in range(120))
    calls = [("read_file", {"path": path}) for path in paths]
    with transcript_server([{"content": before, "calls": calls}, after]) as server:
        shown = _kill(_command(server.url, "--tools", "read_file", "--stream-json"), folder, events)
    with transcript_server(["I go on"]) as server:
        command = _command(server.url, "--tools", "none", "--resume", shown[0]["thread_id"])
        done = subprocess.run(
            command,
            cwd=project,
            env=_environment(folder),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
    if done.returncode or done.stdout != "I go on\n":
        return KilledSession(len(shown), 0, f"it can't go on: {done.stdout!r} {done.stderr[-500:]!r}")
    sent = server.asked[0]["messages"]
    lost = sum(one.get("content") == LOST_RESULT for one in sent)
    return KilledSession(len(shown), lost, what_was_lost(shown, sent, before + after))


def what_was_lost(shown: list[dict[str, Any]], sent: list[dict[str, Any]], text: str) -> str:
    """Compares the events of a killed process with the messages of the next one. Returns what is missing there."""
    questions = [one["content"] for one in sent if one["role"] == "user"]
    if questions != ["a question"] * 2 and (len(shown) > 1 or questions != ["a question"]):
        return f"the questions are {questions}"
    said = "".join(one.get("content") or "" for one in sent if one["role"] == "assistant")
    told = "".join(event["item"]["delta"] for event in shown if event["type"] == "item.updated")
    if not said.startswith(told) or not text.startswith(said):
        return f"the session holds {said[-80:]!r}, and {told[-80:]!r} was shown"
    results = {one["tool_call_id"]: one["content"] for one in sent if one["role"] == "tool"}
    ended = [event["item"] for event in shown if event["type"] == "item.completed" and "tool" in event["item"]]
    missing = [item["output"] for item in ended if item["output"] not in results.values()]
    asked = [call["id"] for one in sent for call in one.get("tool_calls") or ()]
    if missing or sorted(results) != sorted(asked):
        return f"results were lost: {missing}; of the calls {asked}, {sorted(results)} have one"
    return ""


def _command(url: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "quire", "chat", "-p", "a question", "--url", url, *more]


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}


def _kill(command: list[str], folder: Path, events: int | None) -> list[dict[str, Any]]:
    """Starts a process, kills it with SIGKILL after about so many events, and returns all that it has shown."""

    def is_due(data: bytes) -> bool:
        return b'"in_progress"' in data if events is None else data.count(b"\n") >= events

    process = subprocess.Popen(
        command,
        cwd=folder / "project",
        env=_environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pipesize=PIPE,
    )
    assert process.stdout is not None
    data = b""
    try:
        while not is_due(data) and (part := os.read(process.stdout.fileno(), 256)):
            data += part
        process.kill()
        while part := os.read(process.stdout.fileno(), 1 << 16):
            data += part
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    return [json.loads(line) for line in data.split(b"\n")[:-1]]
