"""The line editor of the agent's terminal, with keys that a test presses."""

from __future__ import annotations

import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli.agent_chat.repl.completion import complete_line
from quire.cli.agent_chat.repl.line_editor import ToolkitReader
from quire.cli.messages import Message

pytest.importorskip("prompt_toolkit", reason='prompt_toolkit is not installed: pip install "quire[agent]"')
ENTER, NEW_LINE, TAB, CTRL_C, CTRL_D, UP = "\r", "\x1b\r", "\t", "\x03", "\x04", "\x1b[A"


@pytest.fixture
def press(tmp_path: Path) -> Iterator[Callable[[str], Message]]:
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    (tmp_path / "notes.txt").write_text("x")
    with create_pipe_input() as pipe:
        reader = ToolkitReader(
            lambda before: complete_line(before, tmp_path, ["help", "reset", "retry"]),
            lambda: "the status",
            tmp_path / "state" / "history",
            input=pipe,
            output=DummyOutput(),
        )

        def read(keys: str, until: str = "", then: str = "") -> Message:
            """Presses keys; once the line reads `until`, presses `then`."""

            def wait() -> None:
                deadline = time.monotonic() + 60
                while reader._session.default_buffer.text != until and time.monotonic() < deadline:
                    time.sleep(0.01)
                pipe.send_text(then)

            if until:
                threading.Thread(target=wait, daemon=True).start()
            pipe.send_text(keys)
            return reader.read()

        yield read


def test_enter_sends_and_alt_enter_begins_a_line(press: Any) -> None:
    assert press(f"one{NEW_LINE}two{ENTER}") == Message("one\ntwo")
    assert press(f"\x1b[200~a paste\rof lines\x1b[201~{ENTER}") == Message("a paste\nof lines")


def test_a_block_of_triple_quotes_is_one_message(press: Any) -> None:
    assert press(f'"""first{ENTER}/reset{ENTER}"""{ENTER}') == Message("first\n/reset", is_quoted=True)


def test_tab_completes_commands_and_paths(press: Any) -> None:
    assert press(f"/h{TAB}", "/help", ENTER) == Message("/help")  # completion is not done at once
    assert press(f"see @no{TAB}", "see @notes.txt", f" now{ENTER}") == Message("see @notes.txt now")


def test_ctrl_c_drops_the_line_and_ctrl_d_ends_the_input(press: Any) -> None:
    assert press(f"never sent{CTRL_C}sent{ENTER}") == Message("sent")
    with pytest.raises(KeyboardInterrupt):
        press(CTRL_C)
    with pytest.raises(EOFError):
        press(CTRL_D)


def test_the_history_is_kept_for_the_user_alone(press: Any, tmp_path: Path) -> None:
    press(f"remember me{ENTER}")
    assert press(f"{UP}{ENTER}") == Message("remember me")
    path = tmp_path / "state" / "history"
    assert "remember me" in path.read_text() and stat.S_IMODE(path.stat().st_mode) == 0o600
