"""Reads what a person says to `quire chat`: a line, a paste of several lines, or a block between triple quotes.

`Prompt` reads from a terminal, with line editing and a history file where Python has readline; `join_blocks` puts the
lines of a pipe together by the same rule for triple quotes.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from quire.cli.output import is_terminal
from quire.types import QuireError

QUOTES = '"""'
HISTORY_LINES = 1000
MAX_CHARACTERS = 16 << 20  # of one message; a paste that is larger was not meant


class Message(NamedTuple):
    text: str
    is_quoted: bool = False  # came between triple quotes: text, even if it looks like a command


class Prompt:
    """Whole messages from a terminal, one for each call."""

    def __init__(self, readline: Any = None, ask: Callable[[str], str] = input):
        """`readline`: the module, or None where lines can't be edited; `ask`: how a line is read."""
        self._readline, self._ask = readline, ask
        self._first, self._more = ("> ", "... ") if is_terminal(sys.stdout) else ("", "")
        # `input` edits lines only where both ends are a terminal; GNU readline then marks a paste by itself.
        self._marks_pastes = _is_gnu(readline) and is_terminal(sys.stdout)

    def read(self) -> Message:
        """The next message. Raises EOFError at the end of input, KeyboardInterrupt for Ctrl-C on an empty line; on a
        line with text, Ctrl-C drops what was typed and asks again."""
        while True:
            lines: list[str] = []
            try:
                self._read_into(lines)
            except KeyboardInterrupt:
                if not lines and not self._typed():
                    raise
                print(file=sys.stderr)  # after the ^C the terminal shows
                continue
            text = "\n".join(lines)
            self._remember(text)
            return unquote(text) if opens_block(lines[0]) else Message(text)

    def _read_into(self, lines: list[str]) -> None:
        lines.append(self._line(self._first))
        while opens_block(lines[0]) and not is_closed(lines):
            lines.append(self._line(self._more))
            check_length(lines)

    def _line(self, prompt: str) -> str:
        """One line, or all lines of a paste. Where pastes are not marked, lines that are there already when the first
        one was read belong to the same one."""
        text = self._ask(prompt)
        if not self._marks_pastes:
            with suppress(EOFError):  # the next call meets it again
                while _more_waits():
                    text += "\n" + self._ask("")
        return text

    def _typed(self) -> str:
        return "" if self._readline is None else str(self._readline.get_line_buffer())

    def _remember(self, message: str) -> None:
        if self._readline is not None and message.strip():
            newest = self._readline.get_history_item(self._readline.get_current_history_length())
            if newest != message:
                self._readline.add_history(message)


# ---------------------------------------------------------------------------------------------------------------------
# Triple quotes


def opens_block(line: str) -> bool:
    return line.lstrip().startswith(QUOTES)


def is_closed(lines: list[str]) -> bool:
    """Whether the block that the first line opens ends with the last line."""
    text = "\n".join(lines).strip()
    return len(text) >= 2 * len(QUOTES) and text.endswith(QUOTES)


def unquote(block: str) -> Message:
    return Message(block.strip().removeprefix(QUOTES).removesuffix(QUOTES).strip("\n"), is_quoted=True)


def join_blocks(lines: Iterable[str]) -> Iterator[Message]:
    """The messages of a pipe: its lines, those between triple quotes as one. A block that is still open at the end of
    input is an error, since the rest of it may be missing."""
    block: list[str] = []
    for line in lines:
        text = line.rstrip("\r\n")
        if not block and not opens_block(text):
            yield Message(text)
            continue
        block.append(text)
        check_length(block)
        if is_closed(block):
            yield unquote("\n".join(block))
            block = []
    if block:
        raise QuireError(
            "invalid_prompt", f"stdin ends inside a block that {QUOTES} opens.", f"Close it with {QUOTES}."
        )


def check_length(lines: list[str]) -> None:
    num = sum(map(len, lines))
    if num > MAX_CHARACTERS:
        what = f"The message has more than {MAX_CHARACTERS} characters."
        raise QuireError("invalid_prompt", what, "Send less text.")


# ---------------------------------------------------------------------------------------------------------------------
# Line editing


def history_path() -> Path:
    base = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    return folder / "quire" / "chat_history"


@contextmanager
def line_editing(path: Path) -> Iterator[Any]:
    """The readline module set up for messages (arrow keys, earlier messages, pastes), or None where Python has none.
    The history is kept between conversations in a file only its owner reads."""
    try:
        import readline
    except ImportError:
        yield None
        return
    if _is_gnu(readline):
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python switches it off
        readline.parse_and_bind("set enable-active-region off")  # a paste needs no highlighting
        readline.parse_and_bind("tab: tab-insert")  # there is nothing to complete
    readline.set_auto_history(False)  # a message of several lines is one entry
    readline.set_history_length(HISTORY_LINES)
    with suppress(OSError, UnicodeDecodeError):
        for line in path.read_text("utf-8").splitlines()[-HISTORY_LINES:]:
            readline.add_history(_unescape(line))
    try:
        yield readline
    finally:
        with suppress(OSError):  # a read-only home only means no history
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            last = readline.get_current_history_length()
            entries = [readline.get_history_item(i) for i in range(max(1, last - HISTORY_LINES + 1), last + 1)]
            lines = [_escape(entry) + "\n" for entry in entries if entry]
            path.write_text("".join(lines), "utf-8", errors="replace")


def _escape(message: str) -> str:
    """One line of the history file: `splitlines` would cut at other characters than line feeds, too."""
    return "\\n".join(message.replace("\\", "\\\\").splitlines())


def _unescape(line: str) -> str:
    return "\\".join(part.replace("\\n", "\n") for part in line.split("\\\\"))


def _is_gnu(readline: Any) -> bool:
    return readline is not None and "libedit" not in (readline.__doc__ or "")


def _more_waits() -> bool:
    """Whether another line can be read at once."""
    try:
        return bool(select.select([sys.stdin], [], [], 0)[0])
    except (OSError, ValueError):  # no descriptor, or one that can't be waited for
        return False
