"""`quire chat --url` against llama.cpp's own server, which llama-cpp-python brings.

Its server needs a few more packages. Those that are missing are fetched for the test alone; `LLAMA_PYTHON` names the
Python of an environment that has everything: `python -m venv v; v/bin/pip install 'llama-cpp-python[server]'`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.agent.assemble import AgentOptions, open_agent
from quire.agent.engines.remote import RemoteEngine
from quire.agent.engines.seam import AnswerStream, Question
from quire.agent.session.log import SessionLog
from tests.e2e.test_agent_grammar import STEPS, narrowed

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")]
ROOT = Path(__file__).parents[2]
# What llama_cpp.server imports, and the package that has it.
SERVER_PACKAGES = {
    "dotenv": "python-dotenv",
    "fastapi": "fastapi",
    "pydantic_settings": "pydantic-settings",
    "sse_starlette": "sse-starlette",
    "starlette_context": "starlette-context",
    "uvicorn": "uvicorn",
    "yaml": "PyYAML",
}
CONTEXT = 2048


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """The Python that runs llama.cpp's server, and its environment."""
    if given := os.environ.get("LLAMA_PYTHON"):
        return given, {**os.environ, "PYTHONPATH": ""}
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip(
            "llama-cpp-python is not installed: make an environment with 'llama-cpp-python[server]' and set "
            "LLAMA_PYTHON to its Python"
        )
    missing = [package for name, package in SERVER_PACKAGES.items() if importlib.util.find_spec(name) is None]
    folder = tmp_path_factory.mktemp("packages")
    if missing:
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *missing]
        done = subprocess.run(install, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(
                f"llama.cpp's server needs {', '.join(missing)}, which pip could not fetch: install them, or "
                f"set LLAMA_PYTHON: {done.stderr.strip()[-200:]}"
            )
    return sys.executable, {**os.environ, "PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def url(launch: tuple[str, dict[str, str]], model_here: None) -> Iterator[str]:
    from quire.files.source import resolve_model

    python, env = launch
    command = [
        python,
        "-m",
        "llama_cpp.server",
        "--model",
        str(resolve_model("smollm2").path),
        "--port",
        "0",
        "--host",
        "127.0.0.1",
        "--n_ctx",
        str(CONTEXT),
        "--n_threads",
        "1",
        "--n_threads_batch",
        "1",
        "--chat_format",
        "chatml-function-calling",
        "--verbose",
        "false",
    ]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if "Uvicorn running on " in line:
                threading.Thread(target=process.stderr.read, daemon=True).start()  # or a full pipe would stop it
                yield line.split("Uvicorn running on ")[1].split()[0]
                break
        else:
            pytest.fail(f"llama.cpp's server did not start: {''.join(said[-20:])}")
    finally:
        process.kill()
        process.wait()


def quire_chat(url: str, folder: Path, prompt: str, *more: str) -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
    (folder / "project").mkdir(exist_ok=True)
    argv = [sys.executable, "-m", "quire", "chat", "-p", prompt, "--url", url, "--json", "--temperature", "0", *more]
    done = subprocess.run(
        argv, cwd=folder / "project", env=env, capture_output=True, text=True, timeout=500, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_answers_are_the_servers_and_the_next_one_knows_the_last(url: str, tmp_path: Path) -> None:
    """What the model says is its own matter; the same messages sent without the agent bring the same words."""
    argv = ("--tools", "none", "--max-tokens", "24")
    first = quire_chat(url, tmp_path, "What is the capital of France?", *argv)
    second = quire_chat(url, tmp_path, "In which country is it?", "--continue", *argv)
    assert second["thread_id"] == first["thread_id"]
    log = SessionLog.resume(next((tmp_path / "state").rglob("*.jsonl")))
    messages = log.state.context()
    log.close()
    assert [one["role"] for one in messages] == ["system", "user", "assistant", "user", "assistant"]
    for place, said in ((2, first), (4, second)):
        body = {"messages": messages[:place], "temperature": 0, "max_tokens": 24}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            alone = json.load(reply)["choices"][0]["message"]["content"]
        assert said["status"] == "completed" and said["text"] == messages[place]["content"] == alone != ""


def test_a_conversation_that_the_server_refuses_as_too_long_gets_a_summary(url: str, tmp_path: Path) -> None:
    argv = ("--tools", "none", "--max-tokens", "16")
    words = "the sky is blue because light is scattered by the air. " * 60  # about a third of the context
    for number in range(3):
        said = quire_chat(url, tmp_path, words + f"Say {number}.", *argv, *(["--continue"] if number else []))
        assert said["status"] == "completed"
    lines = next((tmp_path / "state").rglob("*.jsonl")).read_text().splitlines()
    assert any(json.loads(line)["type"] == "summary" for line in lines)


class GuidedRemoteEngine(RemoteEngine):
    """Narrows each question to the next step's tool and arguments; the server's own grammar does the rest."""

    steps: list[tuple[str, dict[str, Any]]]

    def ask(self, question: Question) -> AnswerStream:
        if not self.steps:
            return super().ask(Question(question.messages, [], "auto", False, {**question.sampling, "max_tokens": 4}))
        name, arguments = self.steps.pop(0)
        tool = narrowed(question.tools, name, arguments)
        return super().ask(Question(question.messages, [tool], name, True, question.sampling))


def test_files_are_written_edited_and_a_test_is_run(url: str, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    engine = GuidedRemoteEngine(url)
    engine.steps = list(STEPS)
    options = AgentOptions(
        project,
        ["shell", "write_file", "edit_file"],
        allow=["*"],
        sessions=tmp_path / "sessions",
        sampling={"temperature": 0.0, "max_tokens": 200},
    )
    with open_agent(engine, options) as agent:
        outcome = agent.take("Write calc.py and check it.")
        assert outcome.status == "completed", outcome.error
        ran = [call["function"]["name"] for one in agent.session.state.messages for call in one.get("tool_calls") or ()]
        results = [one for one in agent.session.state.messages if one["role"] == "tool" and one["name"] == "shell"]
    assert ran == [name for name, _ in STEPS]
    assert (project / "calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    assert "AssertionError" in results[0]["content"] and results[-1]["content"].strip() == "fine"
