"""`quire chat` at a real terminal: Ctrl-C during an answer ends that answer, and the next question is answered."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

from tests.cpu.tiny_llm import make_tiny_llm

SECONDS = 60.0  # only a hang takes so long


class Terminal:
    """A program whose terminal is ours."""

    def __init__(self, command: list[str], home: Path):
        self._end, theirs = pty.openpty()
        environment = {**os.environ, "XDG_STATE_HOME": str(home), "TERM": "dumb", "QUIRE_DEBUG": "1"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
            preexec_fn=_take_terminal)  # fmt: skip
        os.close(theirs)
        self.said = ""

    def write(self, text: str) -> None:
        os.write(self._end, text.encode())

    def until(self, words: str) -> None:
        """Read on until it has said this since the last call."""
        end = time.monotonic() + SECONDS
        while words not in self.said:
            self._read(end)
        self.said = self.said.partition(words)[2]

    def until_more(self) -> None:
        end, length = time.monotonic() + SECONDS, len(self.said)
        while len(self.said) < length + 20:
            self._read(end)

    def _read(self, end: float) -> None:
        ready, _, _ = select.select([self._end], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"it says no more: {self.said[-2000:]!r}"
        try:
            self.said += os.read(self._end, 4096).decode("utf-8", "replace")
        except OSError:
            raise AssertionError(f"it ended: {self.said[-2000:]!r}") from None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)


def _take_terminal() -> None:
    """In the child, whose standard input is the terminal: Ctrl-C there is for it."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _without_end_tokens(folder: Path) -> Path:
    """Let the model's answers run to the limit of tokens: a random model may end its answer before Ctrl-C comes."""
    for name, key in (
        ("config", "eos_token_id"),
        ("generation_config", "eos_token_id"),
        ("tokenizer_config", "eos_token"),
    ):
        file = folder / f"{name}.json"
        fields = json.loads(file.read_text())
        fields.pop(key, None)
        file.write_text(json.dumps(fields))
    return folder


def test_ctrl_c_ends_the_answer_and_nothing_else(tmp_path: Path) -> None:
    folder = _without_end_tokens(make_tiny_llm(tmp_path / "model", max_position_embeddings=40_000))
    command = [
        sys.executable,
        "-m",
        "quire",
        "chat",
        "--plain",
        "--model",
        str(folder),
        "--temperature",
        "1.5",
        "--seed",
        "3",
        "--max-model-len",
        "40000",
        "--num-pages",
        "4000",
    ]
    terminal = Terminal(command, tmp_path)
    try:
        terminal.until("Ctrl-D leaves")
        for _ in range(4):
            terminal.until("> ")
            terminal.write("why is the sky blue\n")
            terminal.until("why is the sky blue\r\n")
            terminal.until_more()
            terminal.write("\x03")
            terminal.until("stopped")
        terminal.write("/exit\n")
        assert terminal.process.wait(SECONDS) == 0
    finally:
        terminal.close()
