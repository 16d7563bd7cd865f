"""The commands in a real terminal (a pty), with a model that speaks prepared answers: Ctrl-C, Ctrl-D, colours."""

from __future__ import annotations

import ast
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
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
        content = self.asked[-1][-1]["content"]
        with open("asked", "a") as file:
            file.write(repr(content) + "\\n")
        if content == "endless":
            pieces = self.endless()
        if content == "long":
            pieces = ["The qui", "ck brown fox jum", "ps over the lazy dog aga", "in and again."]
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

    def __init__(self, folder: Path, *argv: str, columns: int = 80, into: str = os.devnull):
        model = folder / "some.gguf"
        model.write_bytes(b"GGUF")
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(folder), "TERM": "xterm"}
        command = [sys.executable, "-c", CHILD, *argv, "--model", str(model)]
        self.side, child_side = pty.openpty()
        fcntl.ioctl(child_side, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        output = os.open(folder / into, os.O_WRONLY | os.O_CREAT)
        self.child = subprocess.Popen(
            command,
            stdin=child_side,
            stdout=child_side if into == os.devnull else output,
            stderr=child_side,
            cwd=folder,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job may ignore it
        )
        os.close(output)
        os.close(child_side)
        self.seen = ""
        self.history = ""  # all that was ever seen

    def expect(self, text: str) -> None:
        while text not in self.seen:
            ready, _, _ = select.select([self.side], [], [], 30)
            try:
                news = os.read(self.side, 4096).decode() if ready else ""
            except OSError:  # the child has left
                news = ""
            assert news, f"{text!r} did not appear in {self.seen!r}"
            self.seen += news
            self.history += news
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
                news = os.read(self.side, 4096).decode()
                self.seen += news
                self.history += news
            except OSError:  # the child has left
                return

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        os.close(self.side)


def open_chat(folder: Path, terminals: list[Terminal], columns: int = 80) -> Terminal:
    terminal = Terminal(folder, "chat", "--plain", columns=columns)
    terminals.append(terminal)
    terminal.expect("Ctrl-D leaves")
    terminal.expect("> ")
    return terminal


def asked(folder: Path) -> list[str]:
    """What reached the model, message by message."""
    return [ast.literal_eval(line) for line in (folder / "asked").read_text().splitlines()]


def screen(text: str, columns: int) -> list[str]:
    """The lines a terminal shows after this text: letters, line ends, and the two movements that wrapping uses."""
    lines, column = [""], 0
    for back, character in re.findall(r"\x1b\[(\d+)D\x1b\[K|([^\x1b])", text.replace("\r", "")):
        if back:
            column -= int(back)
            lines[-1] = lines[-1][:column]
        elif character == "\n":
            lines, column = [*lines, ""], 0
        else:
            if column == columns:
                lines, column = [*lines, ""], 0
            lines[-1] += character
            column += 1
    return [line.rstrip() for line in lines if line.strip()]


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def test_chat_stops_an_answer_and_leaves(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminal = Terminal(tmp_path, "chat", "--plain")
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
    terminal.expect("1 answered, 2 in the context")
    terminal.expect("> ")
    terminal.type("/nonsense\n")
    terminal.expect("There is no command /nonsense.")
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.child.wait(30) == 0
    history = tmp_path / ".local" / "state" / "quire" / "chat_history"
    assert "hello\nendless\n/stats\n" in history.read_text()


def test_ctrl_c_twice_at_the_prompt_leaves(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminal = Terminal(tmp_path, "chat", "--plain")
    terminals.append(terminal)
    terminal.expect("> ")
    terminal.interrupt_until("Ctrl-C again")
    terminal.expect("> ")
    terminal.interrupt_until("text that never appears")
    assert terminal.child.wait(30) in (130, -signal.SIGINT)  # a third one, while Python leaves, ends it at once


def test_a_paste_of_several_lines_is_one_message(tmp_path: Path, terminals: list[Terminal]) -> None:
    """Between the marks that a terminal sets around a paste; its line ends are carriage returns."""
    terminal = open_chat(tmp_path, terminals)
    assert "[?2004h" in terminal.history  # asked for
    terminal.type("\x1b[200~say\rfirst\r\r\tsecond\r\x1b[201~")
    terminal.expect("second")
    terminal.type(" and more\n")
    terminal.expect("1 tokens")
    assert asked(tmp_path) == ["say\nfirst\n\n\tsecond\n and more"]
    terminal.expect("> ")
    terminal.type("\x1b[A\n")  # the whole message comes back with the arrow
    terminal.expect("1 tokens")
    assert asked(tmp_path)[-1] == asked(tmp_path)[0]


def test_a_paste_is_one_message_where_lines_are_not_edited(tmp_path: Path, terminals: list[Terminal]) -> None:
    """With stdout in a file Python asks without readline, and a paste comes as plain lines."""
    terminal = Terminal(tmp_path, "chat", "--plain", into="answers")
    terminals.append(terminal)
    terminal.expect("Ctrl-D leaves")
    terminal.type("say\nfirst\nsecond\n")
    terminal.expect("1 tokens")
    assert asked(tmp_path) == ["say\nfirst\nsecond"]


def test_triple_quotes_hold_a_message_of_several_lines(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminal = open_chat(tmp_path, terminals)
    for line in ('"""first', "second"):
        terminal.type(f"{line}\n")
        terminal.expect("... ")
    terminal.type('third"""\n')
    terminal.expect("1 tokens")
    assert asked(tmp_path) == ["first\nsecond\nthird"]


def test_ctrl_c_clears_a_typed_line_and_an_open_block(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminal = open_chat(tmp_path, terminals)
    for _ in range(3):
        terminal.type("never sent")
        terminal.expect("never sent")
        terminal.interrupt_until("> ")
        terminal.expect("> ")
    terminal.type('"""\n')
    terminal.expect("... ")
    terminal.interrupt_until("> ")
    terminal.expect("> ")
    terminal.type("sent\n")
    terminal.expect("1 tokens")
    assert asked(tmp_path) == ["sent"]
    assert "leaves" not in terminal.history.partition("Ctrl-D leaves")[2]


def test_an_answer_wraps_at_words(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminal = open_chat(tmp_path, terminals, columns=20)
    terminal.type("long\n")
    terminal.expect("12 tokens")
    shown = screen(terminal.history.partition("[?2004l\r")[2].partition("\x1b[2m")[0], 20)
    assert shown == ["The quick brown fox", "jumps over the lazy", "dog again and", "again."]


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
