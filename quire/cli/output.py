"""Terminal output of all commands: answers go to stdout, notes, errors and progress to stderr.

Every command writes through these functions. Only a terminal gets colour and wrapped lines, and text from a model or a
file is stripped of control characters before it reaches a terminal.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from quire.cli.wrapping import WordWrap

if TYPE_CHECKING:
    from quire.config import Config

# Characters that move the cursor or start an escape sequence. Line feeds and tabs are not among them.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def printable(text: str) -> str:
    """Return the text without control characters, which a terminal would execute."""
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def write_text(text: str) -> None:
    """Write text to stdout and flush. A terminal gets it without control characters, a pipe unchanged."""
    sys.stdout.write(printable(text) if is_terminal(sys.stdout) else text)
    sys.stdout.flush()


class AnswerLines:
    """Writes an answer to stdout, wrapped at words on a terminal. On exit, ends the last line if it is not ended."""

    def __init__(self) -> None:
        self.text = ""
        can_wrap = is_terminal(sys.stdout) and os.environ.get("TERM") != "dumb"
        self._wrap = WordWrap(lambda: _num_columns(sys.stdout)) if can_wrap else None

    def write(self, text: str) -> None:
        self.text += text
        if self._wrap is None:
            write_text(text)
        else:
            sys.stdout.write(self._wrap.feed(printable(text)))
            sys.stdout.flush()

    def __enter__(self) -> AnswerLines:
        return self

    def __exit__(self, *_: object) -> None:
        if self.text and not self.text.endswith("\n"):
            write_text("\n")


def _num_columns(stream: TextIO) -> int:
    """Return the width of a terminal, or 80 if it is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def write_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
    sys.stdout.flush()


def print_error(what: str, hint: str = "") -> None:
    _mark("error", "31;1", f"{what} {hint}")


def print_note(text: str) -> None:
    """Print a notice to stderr that is not an error."""
    _mark("note", "33", text)


def show_warnings_plainly() -> None:
    """Print warnings of this package as one-line notes, without the source line that raised them."""
    shown_before = warnings.showwarning
    if isinstance(shown_before, _PlainWarnings):
        return
    warnings.showwarning = _PlainWarnings(shown_before)


class _PlainWarnings:
    OURS = str(Path(__file__).parents[1])

    def __init__(self, others: Callable[..., None]):
        self._others = others

    def __call__(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category is UserWarning and filename.startswith(self.OURS):
            print_note(str(message))
        else:
            self._others(message, category, filename, lineno, file, line)


def print_dim(text: str) -> None:
    """Print secondary text to stderr, wrapped at words; prints nothing if stderr is not a terminal."""
    if is_terminal(sys.stderr):
        from textwrap import fill

        print(_styled("2", fill(one_line(text), max(_num_columns(sys.stderr) - 1, 20))), file=sys.stderr, flush=True)


def _mark(word: str, style: str, text: str) -> None:
    print(f"quire: {_styled(style, word + ':')} {one_line(text)}", file=sys.stderr, flush=True)


def _styled(style: str, text: str) -> str:
    plain = not is_terminal(sys.stderr) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[{style}m{text}\x1b[0m"


@contextmanager
def waiting(message: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on stderr if that is a terminal. Yields a function that replaces the spinner's text."""
    if not is_terminal(sys.stderr) or find_spec("rich") is None:
        yield lambda text: None
        return
    from rich.console import Console  # imported late, since it takes 0.1 s

    with Console(stderr=True, highlight=False).status(one_line(message)) as status:
        yield lambda text: status.update(one_line(text))


class LoadingProgress:
    """Shows the loaded percentage of a model as a spinner's text. Implements `files.progress.Progress`."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._what, self._total, self._shown = "", 1, -1

    def start(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._shown = what, max(total, 1), -1
        self.update(done)

    def update(self, done: int) -> None:
        share = 100 * done // self._total
        if share != self._shown:
            self._shown = share
            self._say(f"{self._what} … {share}%")

    def finish(self) -> None:
        pass

    def note(self, line: str) -> None:
        self._say(line)


def format_memory(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def format_seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def show_config(config: Config) -> None:
    """Print the effective settings as a TOML file, each with a comment that names its source."""
    from quire.config import knobs
    from quire.config_build import describe_config

    table = ""
    for name, value, source in describe_config(config):
        if knobs()[name].table != table:
            table = knobs()[name].table
            print(f"\n[{table}]" if table != "model" else f"[{table}]")
        shown = f"{name} = {json.dumps(value)}" if value is not None else f"# {name} = {knobs()[name].none_word}"
        print(f"{shown:<40} # {source}")
