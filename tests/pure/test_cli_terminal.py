"""The commands in a real terminal (a pty), with a model that speaks prepared answers: Ctrl-C, Ctrl-D, colours."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire

pty = pytest.importorskip("pty")

ROOT = Path(quire.__file__).parent.parent
# Stands in for `quire.llm`: an answer "endless" never ends by itself, any other is one chunk.
CHILD = """
import select, sys, types
from tests.pure.fake_llm import FakeLLM

class Llm(FakeLLM):
    def _speak(self, pieces, prompt_len):
        if self.asked[-1][-1]["content"] == "endless":
            pieces = self.endless()
        return super()._speak(pieces, prompt_len)

    def endless(self):
        yield "and so on"
        while True:
            select.select([], [], [], 0.01)

sys.modules["quire.llm"] = types.ModuleType("quire.llm")
sys.modules["quire.llm"].LLM = lambda config, progress=None: Llm([["\\x1b[2Jgood"] for _ in range(9)])
from quire.cli.main import main
sys.exit(main())
"""


class Terminal:
    """A child on a pty; `expect` reads until some text has appeared."""

    def __init__(self, folder: Path, *argv: str):
        model = folder / "some.gguf"
        model.write_bytes(b"GGUF")
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(folder), "TERM": "xterm"}
        command = [sys.executable, "-c", CHILD, *argv, "--model", str(model)]
        self.side, child_side = pty.openpty()
        self.child = subprocess.Popen(
            command,
            stdin=child_side,
            stdout=child_side,
            stderr=child_side,
            cwd=folder,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job may ignore it
        )
        os.close(child_side)
        self.seen = ""

    def expect(self, text: str) -> None:
        while text not in self.seen:
            ready, _, _ = select.select([self.side], [], [], 30)
            try:
                news = os.read(self.side, 4096).decode() if ready else ""
            except OSError:  # the child has left
                news = ""
            assert news, f"{text!r} did not appear in {self.seen!r}"
            self.seen += news
        self.seen = self.seen.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.side, text.encode())

    def interrupt(self) -> None:
        self.child.send_signal(signal.SIGINT)

    def interrupt_until(self, text: str) -> None:
        """Until the text appears. Python misses a signal that comes just before it waits for a key; then one more."""
        self.interrupt()
        while text not in self.seen:
            if not select.select([self.side], [], [], 1)[0]:
                self.interrupt()
                continue
            try:
                self.seen += os.read(self.side, 4096).decode()
            except OSError:  # the child has left
                return

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        os.close(self.side)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def test_chat_stops_an_answer_and_leaves(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminal = Terminal(tmp_path, "chat")
    terminals.append(terminal)
    terminal.expect("Ctrl-D leaves")
    terminal.expect("> ")
    terminal.type("hello\n")
    terminal.expect("[2Jgood\r\n")  # and not the escape sequence, which would clear the screen
    terminal.expect("1 tokens")
    terminal.expect("> ")
    terminal.type("endless\n")
    terminal.expect("and so on")
    terminal.interrupt()
    terminal.expect("stopped")
    terminal.expect("> ")
    terminal.type("/stats\n")
    terminal.expect("1 answered, 2 remembered")
    terminal.expect("> ")
    terminal.type("/nonsense\n")
    terminal.expect("There is no command /nonsense.")
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.child.wait(30) == 0
    history = tmp_path / ".local" / "state" / "quire" / "chat_history"
    assert "hello\nendless\n/stats\n" in history.read_text()


def test_ctrl_c_twice_at_the_prompt_leaves(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminal = Terminal(tmp_path, "chat")
    terminals.append(terminal)
    terminal.expect("> ")
    terminal.interrupt_until("Ctrl-C again")
    terminal.expect("> ")
    terminal.interrupt_until("text that never appears")
    assert terminal.child.wait(30) in (130, -signal.SIGINT)  # a third one, while Python leaves, ends it at once


def test_run_shows_a_summary_at_a_terminal_only(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminal = Terminal(tmp_path, "run", "hello")
    terminals.append(terminal)
    terminal.expect("Loading")
    terminal.expect("good\r\n")
    terminal.expect("first token 250 ms")
    assert terminal.child.wait(30) == 0


def test_ctrl_c_ends_a_run_at_once_without_a_word(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminal = Terminal(tmp_path, "run", "endless")
    terminals.append(terminal)
    terminal.expect("and so on")
    terminal.interrupt()
    terminal.expect("\r\n")
    assert terminal.child.wait(30) == 130
    assert "Traceback" not in terminal.seen and "error" not in terminal.seen


def test_our_warnings_are_notes_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    import warnings

    from quire.cli import output

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        others: list[object] = []
        warnings.showwarning = lambda *args: others.append(args[0])
        for _ in range(2):
            output.show_warnings_plainly()
        warnings.warn_explicit("A kernel\nfailed", UserWarning, output.__file__, 1)
        warnings.warn_explicit("somebody else's", UserWarning, "elsewhere.py", 7)
    assert capsys.readouterr().err == "quire: note: A kernel failed\n"
    assert [str(message) for message in others] == ["somebody else's"]
