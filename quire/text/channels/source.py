"""A reader over text that arrives in chunks; the parsers of all formats are written on it.

A parser is a generator that yields whenever it needs more text. It reads only through the methods here, whose results
depend on characters and never on chunk boundaries; so the parse does not depend on the chunking.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from quire.text.channels.events import EventLog

T = TypeVar("T")
Reading = Generator[None, None, T]

MAX_SPACES = 1024  # characters of white space held back because a marker may follow
MAX_NAME = 256  # characters of a tool's or parameter's name
MAX_HELD = 16384  # characters held back of a call that is not certain yet
_STRING_BREAK = re.compile(r'["\\]')
_OPEN_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?$")
_NOT_SPACE = re.compile(r"\S")


class Source:
    """The text so far, with the position of the parser."""

    def __init__(self, log: EventLog):
        self.log = log
        self.closed = False  # the text is complete
        self.drops: tuple[str, ...] = ()  # markers around the answer, which `plain` and `rest` leave out
        self.cut = False  # a token limit or stop string ended the text: an incomplete part may have become a call
        self._text = ""
        self._at = 0
        self._kept: list[str] | None = None  # text read since `keep`, emitted as text by `give_back`
        self.kept_len = 0
        self._may_be_text = False  # no marker has announced a call in the kept text

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    @property
    def broke_off(self) -> bool:
        """Whether all text has been read and it was cut."""
        return self.closed and self.cut and self._at >= len(self._text)

    # -- reading

    def more(self) -> Reading[bool]:
        """Whether there is a next character. Waits until that is known."""
        while self._at >= len(self._text):
            if self.closed:
                return False
            yield
        return True

    def next_is(self, characters: str) -> Reading[bool]:
        """Whether the next character is one of these."""
        there = yield from self.more()
        return there and self._text[self._at] in characters

    def take_to(self, end: int) -> str:
        taken = self._text[self._at : end]
        self._at = end
        if self._kept is not None:
            self._kept.append(taken)
            self.kept_len += len(taken)
        return taken

    def take_char(self) -> str:
        return self.take_to(self._at + 1)

    def match(self, *literals: str) -> Reading[str]:
        """Read one of these literals if it comes next, else nothing. No literal may be a prefix of another. If the text
        was cut and ends with a prefix of one, that prefix is dropped."""
        while True:
            at, text = self._at, self._text
            for literal in literals:
                if text.startswith(literal, at):
                    return self.take_to(at + len(literal))
            rest = text[at : at + max(map(len, literals))]
            begins = any(literal.startswith(rest) for literal in literals)
            if self.closed or not begins:
                if self.closed and self.cut and begins:
                    self._at = len(text)
                return ""
            yield

    def spaces(self) -> Reading[str]:
        """Read white space, at most MAX_SPACES characters."""
        found = ""
        while len(found) < MAX_SPACES and (yield from self.more()):
            other = _NOT_SPACE.search(self._text, self._at)
            end = min(other.start() if other else len(self._text), self._at + MAX_SPACES - len(found))
            if end == self._at:
                break
            found += self.take_to(end)
        return found

    def word(self, pattern: re.Pattern[str], limit: int = MAX_NAME) -> Reading[str]:
        """Read characters of one class, at most `limit`."""
        found = ""
        while len(found) < limit and (yield from self.more()) and pattern.match(self._text[self._at]):
            found += self.take_char()
        return found

    def string(self, limit: int = MAX_HELD, *, partial: bool = False) -> Reading[str | None]:
        """Read a JSON string from its opening quote and return it decoded; None if it is invalid or longer than
        `limit`. `partial`: return the available part of a string that the cut left open."""
        raw = self.take_char()
        escaped = False
        while (yield from self.more()):
            char = self.take_char()
            raw += char
            if len(raw) > limit:
                return None
            if char == '"' and not escaped:
                try:
                    text: str = json.loads(raw, strict=False)
                except ValueError:
                    return None
                return text
            escaped = char == "\\" and not escaped
        return _unclosed_string(raw) if partial and self.broke_off else None

    def span(self, scan: JsonSpan, emit: Callable[[str], Any] | None) -> Reading[bool]:
        """Read a JSON object or list to its closing bracket and emit it as it arrives. Returns False if it is broken,
        or exceeds MAX_HELD while it is held back."""
        while not scan.done and (yield from self.more()):
            room = len(self._text) if self._kept is None else self._at + MAX_HELD - self.kept_len
            end = scan.feed(self._text, self._at, min(room, len(self._text)))
            if end <= self._at:
                return False
            taken = self.take_to(end)
            if emit is not None:
                emit(taken)
        return scan.done

    def rest(self, emit: Callable[[str], Any]) -> Reading[None]:
        """Emit all remaining text as it arrives."""
        if self.drops:
            yield from self.plain(emit, ())
            return
        while (yield from self.more()):
            emit(self.take_to(len(self._text)))

    def until(self, marker: str, limit: int) -> Reading[tuple[str, bool]]:
        """Read text up to and including a marker, at most `limit` characters. Returns the text and whether the marker
        was found."""
        found = ""
        while len(found) < limit and (yield from self.more()):
            start = self._text.find(marker[0], self._at)
            end = min(start if start >= 0 else len(self._text), self._at + limit - len(found))
            found += self.take_to(end)
            if end == start and len(found) < limit:
                if (yield from self.match(marker)):
                    return found, True
                if not self.broke_off:
                    found += self.take_char()
        if len(found) == limit and (yield from self.match(marker)):
            return found, True
        return found, False

    def plain(self, emit: Callable[[str], Any], markers: tuple[str, ...]) -> Reading[tuple[str, str]]:
        """Emit text up to one of the markers. Returns the white space before the marker, which is not emitted, and the
        marker. At the end of the text the marker is empty and everything has been emitted.

        A marker in `drops` is left out. Only white space and prefixes of a marker are held back, because a marker may
        follow.
        """
        known = (*markers, *self.drops)
        firsts = re.compile("[" + re.escape("".join({marker[0] for marker in known})) + "]")
        held = ""
        while (yield from self.more()):
            first = firsts.search(self._text, self._at)
            body = self.take_to(first.start() if first else len(self._text))
            shown = body.rstrip()
            if shown:
                emit(held + shown)
                held = ""
            held += body[len(shown) :]
            if len(held) > MAX_SPACES:
                emit(held[:-MAX_SPACES])
                held = held[-MAX_SPACES:]
            if first:
                marker = yield from self.match(*known)
                if marker in markers and marker:
                    return held, marker
                if marker:
                    continue
                if self.broke_off:
                    return "", ""
                emit(held + self.take_char())
                held = ""
        emit(held)
        return "", ""

    # -- text that is not certain yet

    def keep(self, already_read: str, *, may_be_text: bool = False) -> None:
        """Start to record what is read, beginning with `already_read`, because it may be plain text. If the text is cut
        before that is known, the record is dropped, unless it `may_be_text` because no marker announced a call."""
        self._kept = [already_read]
        self._may_be_text = may_be_text
        self.kept_len = len(already_read)

    def settle(self) -> None:
        """Drop the record: what was read is certainly not text."""
        self._kept = None
        self.kept_len = 0

    def give_back(self) -> None:
        """Emit the record as plain text. Reading continues at the same position, so nothing is read twice."""
        if self._kept is not None and (self._may_be_text or not self.broke_off):
            self.log.text("".join(self._kept))
        self.settle()

    def give_back_unless_blank(self) -> None:
        """Emit the record as plain text unless it is white space only, which is dropped after a call."""
        if self._kept is not None and not "".join(self._kept).strip():
            self.settle()
        self.give_back()


def _unclosed_string(raw: str) -> str | None:
    """The content of an unclosed JSON string, without an incomplete escape; None if it is invalid."""
    try:
        return str(json.loads(_OPEN_ESCAPE.sub(r"\1", raw) + '"', strict=False))
    except ValueError:
        return None


class JsonSpan:
    """Finds the end of a JSON object or list. It tracks brackets and strings, and stops at characters that JSON does
    not allow outside strings. It does not validate further."""

    MAX_DEPTH = 512
    _OUTSIDE = re.compile(r"[^\s:,0-9+\-.a-zA-Z]")  # brackets, quotes, and invalid characters

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False
        self._broken = False
        self.done = False

    def feed(self, text: str, at: int, stop: int) -> int:
        """The end of the value's part in `text[at:stop]`. A result equal to `at` means that the value is broken."""
        while at < stop and not self._broken:
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                    at += 1
                    continue
                found = _STRING_BREAK.search(text, at, stop)
                if found is None:
                    return stop
                at = found.end()
                self._escaped = found.group() == "\\"
                self._in_string = self._escaped
                continue
            found = self._OUTSIDE.search(text, at, stop)
            if found is None:
                return stop
            if not self._bracket(found.group()):
                self._broken = True
                return found.start()
            at = found.end()
            if not self._open:
                self.done = True
                return at
        return at

    def _bracket(self, char: str) -> bool:
        if char == '"':
            self._in_string = True
            return True
        if char in "{[":
            self._open.append("}" if char == "{" else "]")
            return len(self._open) <= self.MAX_DEPTH
        return bool(self._open) and self._open.pop() == char
