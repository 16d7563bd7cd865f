"""Text that arrives in chunks, read as if it were all there: the base every format's parser stands on.

A parser is a generator that yields whenever it needs more text. It looks at the text only through the reads here, and
each of them decides by characters, never by where a chunk ended; so every chunking gives the same parse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from quire.text.channels.events import EventLog

T = TypeVar("T")
Reading = Generator[None, None, T]

MAX_SPACES = 1024  # white space kept back in the hope of a marker
MAX_NAME = 256  # characters of a tool's or parameter's name
MAX_HELD = 16384  # characters kept back of a call that is not certain yet
_STRING_BREAK = re.compile(r'["\\]')
_OPEN_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?$")
_NOT_SPACE = re.compile(r"\S")


class Source:
    def __init__(self, log: EventLog):
        self.log = log
        self.closed = False  # no more text will come
        self.cut = False  # the text was stopped in mid-course: whatever is incomplete may have become a call
        self._text = ""
        self._at = 0
        self._kept: list[str] | None = None  # what was read since `keep`, to give it back as text if need be
        self.kept_len = 0
        self._may_be_text = False  # what is kept: no marker has announced a call

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    @property
    def broke_off(self) -> bool:
        """Has all text been read, and was it stopped in mid-course?"""
        return self.closed and self.cut and self._at >= len(self._text)

    # -- reading

    def more(self) -> Reading[bool]:
        """Is there a next character? Waits until that is known."""
        while self._at >= len(self._text):
            if self.closed:
                return False
            yield
        return True

    def next_is(self, characters: str) -> Reading[bool]:
        """Is the next character one of these?"""
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
        """Read one of these if it stands here, else read nothing. None of them may be the start of another. Where the
        text was cut, a beginning of one that ends it is dropped."""
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
        """All white space up to the next other character; at most MAX_SPACES of it."""
        found = ""
        while len(found) < MAX_SPACES and (yield from self.more()):
            other = _NOT_SPACE.search(self._text, self._at)
            end = min(other.start() if other else len(self._text), self._at + MAX_SPACES - len(found))
            if end == self._at:
                break
            found += self.take_to(end)
        return found

    def word(self, pattern: re.Pattern[str], limit: int = MAX_NAME) -> Reading[str]:
        """Characters of one class, at most `limit`."""
        found = ""
        while len(found) < limit and (yield from self.more()) and pattern.match(self._text[self._at]):
            found += self.take_char()
        return found

    def string(self, limit: int = MAX_HELD, *, partial: bool = False) -> Reading[str | None]:
        """A JSON string, decoded; None if it is none, or longer than `limit`. Starts at its opening quote. `partial`:
        of one that the text's cut leaves open, what there is."""
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
        """A JSON object or list from its bracket to the matching one, passed on as it arrives. False: it broke off,
        or, while it is kept back, grew beyond MAX_HELD."""
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
        """Everything that is still to come, as it comes."""
        while (yield from self.more()):
            emit(self.take_to(len(self._text)))

    def until(self, marker: str, limit: int) -> Reading[tuple[str, bool]]:
        """Text up to a marker, which is read too, and whether it was found; at most `limit` characters of text."""
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
        """Pass text on up to one of the markers. Returns the white space before it, which is not passed on, and the
        marker; both are read. At the end of all text the marker is empty, and everything has been passed on.

        White space is kept back because a marker may follow, and a marker's beginning because the rest may; all else
        goes out at once.
        """
        firsts = re.compile("[" + re.escape("".join({marker[0] for marker in markers})) + "]")
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
                marker = yield from self.match(*markers)
                if marker:
                    return held, marker
                if self.broke_off:
                    return "", ""
                emit(held + self.take_char())
                held = ""
        emit(held)
        return "", ""

    # -- what is not certain yet

    def keep(self, already_read: str, *, may_be_text: bool = False) -> None:
        """From here on what is read may turn out to be plain text: remember it, and this that was just read. Where the
        text is cut before that is known, it is dropped, unless it `may_be_text` since no marker announced a call."""
        self._kept = [already_read]
        self._may_be_text = may_be_text
        self.kept_len = len(already_read)

    def settle(self) -> None:
        """It is certain: nothing needs to be given back."""
        self._kept = None
        self.kept_len = 0

    def give_back(self) -> None:
        """It was plain text after all: out with it. Reading goes on where it is, so nothing is read twice."""
        if self._kept is not None and (self._may_be_text or not self.broke_off):
            self.log.text("".join(self._kept))
        self.settle()

    def give_back_unless_blank(self) -> None:
        """The same after a call, where white space is only framing."""
        if self._kept is not None and not "".join(self._kept).strip():
            self.settle()
        self.give_back()


def _unclosed_string(raw: str) -> str | None:
    """What an open JSON string holds, without an escape that is not whole."""
    try:
        return str(json.loads(_OPEN_ESCAPE.sub(r"\1", raw) + '"', strict=False))
    except ValueError:
        return None


class JsonSpan:
    """Finds the end of a JSON object or list. Brackets and strings are followed, and whatever can't stand in JSON
    outside a string breaks it off; the finer grammar is left to whoever loads it."""

    MAX_DEPTH = 512
    _OUTSIDE = re.compile(r"[^\s:,0-9+\-.a-zA-Z]")  # brackets, quotes, and what does not belong

    def __init__(self) -> None:
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False
        self._broken = False
        self.done = False

    def feed(self, text: str, at: int, stop: int) -> int:
        """How far the value reaches in this text, read from `at` to `stop`. No progress means that it is broken."""
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
