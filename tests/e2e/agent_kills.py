"""Sessions that are killed at random moments: `python -m tests.e2e.agent_kills FOLDER COUNT SEED` runs them.

Each session runs in a process of its own, forked from this one, which writes all that it shows to a pipe. After the
kill the session is resumed here, and must hold everything that was shown. Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from quire.agent.loop.agent import Agent
from quire.agent.permissions import Permissions
from quire.agent.session.log import SessionLog
from quire.agent.tools.toolbox import Toolbox
from tests.pure.scripted_engine import Prepared, ScriptedEngine, calling
from tests.pure.test_agent_loop import Echo

MESSAGES = ("first question", "second question", "third question")


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


def run_session(folder: Path, number: int, shown: int) -> None:
    """In the forked process: works on all messages, and writes what was shown to the descriptor `shown`."""

    def emit(event: dict[str, Any]) -> None:
        os.write(shown, json.dumps(event).encode() + b"\n")

    log = SessionLog.create(folder, project="/p", model="scripted", system="Be brief", tools=["echo"])
    os.write(shown, json.dumps({"type": "path", "path": str(log.path)}).encode() + b"\n")
    agent = Agent(
        ScriptedEngine(transcript(number)), log, toolbox=Toolbox([Echo()]), permissions=Permissions(["*"]), emit=emit
    )
    for message in MESSAGES:
        agent.take(message)
    log.close()


def kill_one(folder: Path, number: int, events: int) -> list[dict[str, Any]]:
    """Kills a session after about so many events. Returns those that were shown."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            run_session(folder, number, write)
        finally:
            os._exit(0)
    os.close(write)
    data = b""
    try:
        while data.count(b"\n") < events:
            part = os.read(read, 512)
            if not part:
                break
            data += part
        os.kill(child, signal.SIGKILL)
        while part := os.read(read, 1 << 16):
            data += part
    finally:
        os.close(read)
        os.waitpid(child, 0)
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def check_resumed(shown: list[dict[str, Any]], number: int) -> str:
    """Resumes a killed session and goes on with it. Returns what was lost; empty if nothing."""
    log = SessionLog.resume(Path(shown[0]["path"]))
    try:
        said = "".join(str(one.get("content")) for one in log.state.messages if one["role"] == "assistant")
        told = "".join(event["item"]["delta"] for event in shown if event["type"] == "item.updated")
        if not said.startswith(told):
            return f"the session holds {said[-80:]!r}, and {told[-80:]!r} was shown"
        ended = [event["item"] for event in shown if event["type"] == "item.completed" and "tool" in event["item"]]
        results = {one["content"] for one in log.state.messages if one["role"] == "tool"}
        # The result of a call is written when all calls beside it have ended, just after it was shown.
        lost = [item["output"] for item in ended[:-2] if item["output"] not in results]
        if lost or log.state.open_calls():
            return f"results were lost: {lost}, open calls: {log.state.open_calls()}"
        before = log.state.context()
        engine = ScriptedEngine(["I go on"])
        outcome = Agent(engine, log, toolbox=Toolbox([Echo()])).take("go on")
        if outcome.text != "I go on" or engine.asked[0].messages[: len(before)] != before:
            return f"the next turn was {outcome.status} with {engine.asked[0].messages!r}"
    finally:
        log.close()
    again = SessionLog.resume(log.path)
    again.close()
    return "" if again.state.messages == log.state.messages and not again.notes else "it differs when read again"


def main(folder: Path, count: int, seed: int) -> int:
    rng = random.Random(seed)
    lost, moments = [], []
    for number in range(count):
        shown = kill_one(folder, number, rng.randint(1, 340))
        moments.append(len(shown))
        problem = check_resumed(shown, number)
        if problem:
            lost.append(f"session {number}, after {len(shown)} events: {problem}")
    print(json.dumps({"seed": seed, "sessions": count, "moments": moments, "lost": lost}))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
