"""The agent in a real terminal: keys go into tmux, the screen is read back, files of a temporary project change."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.transcript_server import HANG, transcript_server

ROOT = Path(__file__).parents[2]
SECONDS = 90.0  # only a hang takes so long

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's"),
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed: apt-get install tmux"),
]


class TmuxTerminal:
    """A terminal of 100 columns by 40 lines."""

    def __init__(self, folder: Path, project: Path) -> None:
        self._socket, self._folder, self._project = str(folder / "tmux"), folder, project

    def start(self, *argv: str) -> None:
        variables = {"PATH": os.environ["PATH"], "HOME": str(self._folder), "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"}
        words = ["env", "-i", *(f"{name}={value}" for name, value in variables.items()), "TERM=xterm-256color"]
        command = shlex.join([*words, sys.executable, "-m", "quire", "chat", *argv]) + "; echo left with $?; sleep 600"
        self._tmux(
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-s",
            "main",
            "-x",
            "100",
            "-y",
            "40",
            "-c",
            str(self._project),
            command,
        )

    def type(self, text: str, *keys: str) -> None:
        if text:
            self._tmux("send-keys", "-t", "main", "-l", text)
        for key in keys:
            self._tmux("send-keys", "-t", "main", key)

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p", "-S", "-500", "-t", "main")

    def until(self, *texts: str) -> str:
        deadline = time.monotonic() + SECONDS
        while True:
            shown = self.screen()
            if all(text in shown for text in texts):
                return shown
            assert time.monotonic() < deadline, f"{texts} did not appear:\n{shown}"
            time.sleep(0.1)

    def close(self) -> None:
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], capture_output=True, check=False)

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(["tmux", "-S", self._socket, *words], capture_output=True, text=True, check=True)
        return done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "check.py").write_text("from calc import add\n\nassert add(2, 3) == 5\nprint('all is well')\n")
    return folder


@pytest.fixture
def terminal(tmp_path: Path, project: Path) -> Iterator[TmuxTerminal]:
    opened = TmuxTerminal(tmp_path, project)
    yield opened
    opened.close()


def test_a_coding_session_at_a_terminal(terminal: TmuxTerminal, project: Path) -> None:
    answers = [
        {
            "reasoning": "Look first.\n",
            "calls": [("read_file", {"path": "calc.py"}), ("read_file", {"path": "check.py"})],
        },
        {"content": "It **subtracts**.", "calls": [("edit_file", {"path": "calc.py", "old": "a - b", "new": "a + b"})]},
        {"calls": [("shell", {"command": "python3 check.py"})]},
        "Done:\n\n1. it subtracted\n2. it *adds* now\n\n```python\nreturn a + b\n```\n",
        HANG,
        "Still here.",
    ]
    with transcript_server(answers) as server:
        terminal.start("--url", server.url)
        terminal.until("Ctrl-D leaves", ">")
        terminal.type("Fix @calc.py", "Enter")
        shown = terminal.until("Look first.", "● read_file check.py", "edit_file wants to write", "Allow?")
        assert "-    return a - b" in shown and "+    return a + b" in shown
        assert "a - b" in (project / "calc.py").read_text()  # not before the answer
        terminal.type("y", "Enter")
        terminal.until("shell wants to run in the sandbox", "python3 check.py")
        assert "a + b" in (project / "calc.py").read_text()
        terminal.type("y", "Enter")
        shown = terminal.until("exit code 0", "all is well", "it subtracted", "cache hit")
        assert "**" not in shown and "```" not in shown and " 1 it subtracted" in shown
        terminal.type("wait", "Enter")
        terminal.until("I think about it")
        terminal.type("", "C-c")
        terminal.until("stopped")
        terminal.type("there?", "Enter")
        terminal.until("Still here.")
        terminal.type("/export md said.md", "Enter")
        terminal.until("was written to")
        terminal.type("/exit", "Enter")
        terminal.until("left with 0")
    assert "Fix @calc.py" in (project / "said.md").read_text()
    assert '<file path="calc.py">' in server.asked[0]["messages"][-1]["content"]
