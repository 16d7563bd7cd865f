"""Input of `quire chat`: a message is a line, a paste of several lines, or a block between triple quotes.

`Prompt` reads messages from a terminal, with line editing and a history file where Python has readline. `join_blocks`
applies the rule for triple quotes to the lines of a pipe.
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
MAX_CHARACTERS = 16 << 20  # per message


class Message(NamedTuple):
    """One message of the user."""

    text: str
    is_quoted: bool = False  # stood between triple quotes, so it is never a slash command


class Prompt:
    """Reads messages from a terminal."""

    def __init__(self, readline: Any = None, ask: Callable[[str], str] = input):
        """`readline` is the module, or None where lines can't be edited; `ask` prints a prompt and reads a line."""
        self._readline, self._ask = readline, ask
        self._first, self._more = ("> ", "... ") if is_terminal(sys.stdout) else ("", "")
        # `input` uses readline only if stdin and stdout are terminals. GNU readline then returns a paste as one line.
        self._marks_pastes = _is_gnu(readline) and is_terminal(sys.stdout)

    def read(self) -> Message:
        """Return the next message. Raises EOFError at the end of input and KeyboardInterrupt for Ctrl-C on an empty
        line; Ctrl-C on a line with text discards the text and reads again."""
        while True:
            lines: list[str] = []
            try:
                self._read_into(lines)
            except KeyboardInterrupt:
                if not lines and not self._typed():
                    raise
                print(file=sys.stderr)  # ends the line on which the terminal shows ^C
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
        """Return one line, or all lines of a paste. Without bracketed paste, lines that are readable at once after the
        first one count as one paste."""
        text = self._ask(prompt)
        if not self._marks_pastes:
            with suppress(EOFError):  # the next call raises it again
                while _has_more_input():
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
    """Return whether the last line closes the block that the first line opens."""
    text = "\n".join(lines).strip()
    return len(text) >= 2 * len(QUOTES) and text.endswith(QUOTES)


def unquote(block: str) -> Message:
    return Message(block.strip().removeprefix(QUOTES).removesuffix(QUOTES).strip("\n"), is_quoted=True)


def join_blocks(lines: Iterable[str]) -> Iterator[Message]:
    """Yield the messages of a pipe: each line is one, and so is each block between triple quotes. A block that is
    still open at the end of input raises QuireError, since its rest may be missing."""
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
    """Yield the readline module, configured for messages, or None where Python has none. The history is read from
    `path` and written back with mode 0600."""
    try:
        import readline
    except ImportError:
        yield None
        return
    if _is_gnu(readline):
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python disables it
        readline.parse_and_bind("set enable-active-region off")  # no highlighting of a paste
        readline.parse_and_bind("tab: tab-insert")  # no completion
    readline.set_auto_history(False)  # a message of several lines is one entry
    readline.set_history_length(HISTORY_LINES)
    with suppress(OSError, UnicodeDecodeError):
        for line in path.read_text("utf-8").splitlines()[-HISTORY_LINES:]:
            readline.add_history(_unescape(line))
    try:
        yield readline
    finally:
        with suppress(OSError):  # a read-only home directory keeps no history
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            last = readline.get_current_history_length()
            entries = [readline.get_history_item(i) for i in range(max(1, last - HISTORY_LINES + 1), last + 1)]
            lines = [_escape(entry) + "\n" for entry in entries if entry]
            path.write_text("".join(lines), "utf-8", errors="replace")


def _escape(message: str) -> str:
    """Return a message as one line of the history file. `splitlines` also cuts at separators other than line feeds."""
    return "\\n".join(message.replace("\\", "\\\\").splitlines())


def _unescape(line: str) -> str:
    return "\\".join(part.replace("\\n", "\n") for part in line.split("\\\\"))


def _is_gnu(readline: Any) -> bool:
    return readline is not None and "libedit" not in (readline.__doc__ or "")


def _has_more_input() -> bool:
    """Return whether another line of stdin can be read without waiting."""
    try:
        return bool(select.select([sys.stdin], [], [], 0)[0])
    except (OSError, ValueError):  # stdin has no descriptor, or one that `select` does not support
        return False
