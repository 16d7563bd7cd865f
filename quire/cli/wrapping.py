"""Wraps an answer at words while it streams to a terminal, which by itself breaks lines inside them.

`AnswerLines` feeds it pieces and writes what it returns. Text is written as it comes; a word that turns out to be too
long for the rest of the line is taken back and written again on the next one. Code between fences is left as it is, so
that it can be copied.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

FENCES = ("```", "~~~")
TAB = 8


@dataclass(slots=True)
class WordWrap:
    columns: Callable[[], int]  # of the terminal, which may change
    _column: int = 0  # where the next character goes
    _word: str = ""  # written at the end of the line, and may still grow
    _is_long: bool = False  # the word fits on no line, and the terminal breaks it
    _beginning: str = ""  # of the source's line, as far as a fence reaches
    _in_code: bool = False

    def feed(self, text: str) -> str:
        """What is to be written for more text."""
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
        if width == 2:  # between wide characters, as in Chinese, a line may be broken
            self._end_word()
        written = self._grow(character, width)
        if width == 2:
            self._end_word()
        return written

    def _grow(self, character: str, width: int) -> str:
        """The word with one more character. The last column stays free: a cursor behind it can't be moved back."""
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
