"""Servers for the end-to-end tests: one with the real small model, one with a stub engine that repeats what it hears.

Both are started once per test session, as processes, the way a person would. Tests that need a package or the model
skip with the reason where it is missing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("msgspec", "zmq", "fastapi", "uvicorn", "uvloop", "httptools", "prometheus_client", "httpx")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
KEY, ADMIN_KEY = "sk-test", "sk-admin"
TEMPLATE = str(Path(__file__).with_name("parrot.jinja"))
# A model that reasons: the prompt opens it where the client asks for that, elsewhere the model may do so itself.
THINKING_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


@dataclass
class Started:
    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)  # of stderr
    key: str = KEY
    trace: Path | None = None

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


def start(command: list[str], env: dict[str, str] | None = None, wait: float = 180) -> Started:
    """Start a server and wait for its one line."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    started = Started(process)
    said: queue.Queue[str] = queue.Queue()

    def read_stdout() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.put(line)
        said.put("")

    def read_stderr() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            started.lines.append(line)

    threading.Thread(target=read_stderr, daemon=True).start()
    threading.Thread(target=read_stdout, daemon=True).start()
    line = ""
    with contextlib.suppress(queue.Empty):
        line = said.get(timeout=wait)
    if " at http" not in line:
        process.kill()
        process.wait()
        pytest.fail(f"the server did not start: {line!r} {''.join(started.lines[-20:])}")
    started.url = line.split(" at ")[1].strip()
    return started


def stub_command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "tests.e2e.stub_server", "smollm2", "--port", "0", *flags]


def need(*names: str) -> None:
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the package {name} is not installed; `pip install '.[test]'` brings it")


@pytest.fixture(scope="session")
def model_here() -> None:
    """The built-in model is on disk, or can be fetched."""
    if MISSING:
        pytest.skip(f"the package {MISSING[0]} is not installed")
    from quire.files.source import resolve_model
    from quire.types import QuireError

    try:
        resolve_model("smollm2")
    except QuireError as error:
        pytest.skip(f"the built-in model is not here: {error}")


@pytest.fixture(scope="session")
def stub(model_here: None) -> Iterator[Started]:
    flags = ("--api-key", KEY, "--admin-key", ADMIN_KEY, "--max-model-len", "2048", "--max-body", "1MiB",
             "--max-tools", "8", "--max-messages", "64", "--max-samples", "16", "--chat-template", TEMPLATE,
             "--served-model-name", "parrot,claude-parrot", "--keep-alive", "0.2")  # fmt: skip
    started = start(stub_command(*flags), {"STUB_STEP_SECONDS": "0.001"})
    yield started
    started.stop()


@pytest.fixture(scope="session")
def real(model_here: None) -> Iterator[Started]:
    """The small model on one thread: on a busy machine two threads wait for each other."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    command = [sys.executable, "-m", "quire", "serve", "smollm2", "--port", "0", "--api-key", KEY, "--admin-key", KEY,
               "--threads", "1",
               "--max-model-len", "1024", "--cache-memory", "200MiB", "--host-memory", "0"]  # fmt: skip
    started = start(command)
    yield started
    started.stop()


@pytest.fixture(scope="session")
def tiny(model_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """The real engine around a tiny random model: everything is real but what it says, and that it is fast."""
    need("torch", "transformers")
    from tests.cpu.tiny_llm import make_tiny_llm

    folder = tmp_path_factory.mktemp("tiny-served")
    make_tiny_llm(folder / "model", added=("<think>", "</think>"), max_position_embeddings=1024)
    command = [sys.executable, "-m", "quire", "serve", str(folder / "model"), "--port", "0", "--api-key", KEY,
               "--admin-key", ADMIN_KEY, "--threads", "1", "--dtype", "float32", "--num-pages", "1024",
               "--host-memory", "0", "--served-model-name", "tiny", "--chat-template", THINKING_TEMPLATE,
               "--trace", str(folder / "trace.json")]  # fmt: skip
    started = start(command)
    started.trace = folder / "trace.json"
    yield started
    started.stop()
