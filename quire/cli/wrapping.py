"""Word wrap for an answer that streams to a terminal; a terminal alone breaks lines inside words.

`AnswerLines` feeds `WordWrap` pieces of text and writes the returned text at once. A word that outgrows its line is
erased with an escape sequence and written again on the next line. Fenced code is not wrapped, so that it can be copied.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

FENCES = ("```", "~~~")
TAB = 8


@dataclass(slots=True)
class WordWrap:
    """The state of the current line of a wrapped answer."""

    columns: Callable[[], int]  # current width of the terminal
    _column: int = 0  # column of the next character
    _word: str = ""  # unfinished word at the end of the line, already written
    _is_long: bool = False  # the word is wider than a line, so the terminal breaks it
    _beginning: str = ""  # first characters of the source line, enough to recognise a fence
    _in_code: bool = False

    def feed(self, text: str) -> str:
        """Return the text to write to the terminal for the next piece."""
        return "".join(map(self._take, text))

    def _take(self, character: str) -> str:
        if character == "\n":
            return self._end_line()
        if len(self._beginning) < TAB:
            self._beginning += character
        if self._in_code:
            return character
        if character in " \t":
            return self._space(character)
        width = _width(character)
        if width == 2:  # a line may break between wide characters, as in Chinese
            self._end_word()
        written = self._grow(character, width)
        if width == 2:
            self._end_word()
        return written

    def _grow(self, character: str, width: int) -> str:
        """Add a character to the word. The last column stays free, since a cursor behind it can't be moved back."""
        columns = max(self.columns(), 2)
        before = sum(map(_width, self._word))
        if self._is_long or self._column + width < columns:
            self._word += character
            self._column = width if self._column + width > columns else self._column + width
            return character
        if before < self._column and before + width < columns:
            self._word += character
            self._column = before + width
            back = f"\x1b[{before}D\x1b[K" if before else ""
            return f"{back}\n{self._word}"
        self._is_long = True
        return self._grow(character, width)

    def _space(self, character: str) -> str:
        self._end_word()
        stop = (self._column // TAB + 1) * TAB if character == "\t" else self._column + 1
        if stop >= self.columns():
            return ""  # the next word begins a line anyway
        self._column = stop
        return character

    def _end_word(self) -> None:
        self._word, self._is_long = "", False

    def _end_line(self) -> str:
        if self._beginning.lstrip().startswith(FENCES):
            self._in_code = not self._in_code
        self._end_word()
        self._column, self._beginning = 0, ""
        return "\n"


def _width(character: str) -> int:
    if unicodedata.category(character) in ("Cf", "Cc", "Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
