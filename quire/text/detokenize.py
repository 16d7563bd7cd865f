"""Token ids to text as they come, and the search for stop strings in that text. `TextStream` ties the two together.

Both give the same result however their input is cut into pushes, and neither hands out anything it would have to take
back: the detokenizer keeps the bytes of an unfinished character, the scanner keeps what may become a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from quire.text.tokenizer import Tokenizer

_BROKEN = "\ufffd"


class Detokenizer:
    """All that `push` and `finish` return, joined, is `tokenizer.decode` of all the ids. Constant work per token."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        is_opaque = tokenizer.rule.kind == "opaque"
        self._joiner: _Joiner = _OpaqueJoiner(tokenizer) if is_opaque else _ByteJoiner(tokenizer)

    def push(self, ids: Sequence[int]) -> str:
        """The text that is now certain."""
        return self._joiner.push(self._tokenizer.shown_ids(ids, self._skip_special))

    def finish(self) -> str:
        """What was kept back, an unfinished character as U+FFFD. Nothing may be pushed after this."""
        return self._joiner.finish()


class _Joiner(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class _ByteJoiner:
    """Tokens with exact bytes: a UTF-8 decoder that keeps the start of a character until the rest has come."""

    def __init__(self, tokenizer: Tokenizer):
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = tokenizer.rule.strip_space  # until the first character has been seen

    def push(self, ids: Sequence[int]) -> str:
        return self._strip(self._utf8.decode(b"".join(map(self._token_bytes, ids))))

    def finish(self) -> str:
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text[1:] if text.startswith(" ") else text
        return text


class _OpaqueJoiner:
    """Tokens only the backend can join: each one is decoded together with the few before it, and what it adds to their
    text is new. How tokens join depends on near neighbours only, so a short window is enough."""

    WINDOW = 4
    MAX_KEPT = 16  # broken text longer than this is no unfinished character

    def __init__(self, tokenizer: Tokenizer):
        self._decode = tokenizer.decode_opaque
        self._window: list[int] = []
        self._shown = ""  # the part of the window's text that has been handed out
        self._num_kept = 0

    def push(self, ids: Sequence[int]) -> str:
        return "".join(map(self._push_one, ids))  # one by one, so that cutting ids differently changes nothing

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        self._num_kept += 1
        text = self._decode(self._window)
        if text.endswith(_BROKEN) and self._num_kept < self.MAX_KEPT:
            return ""
        new = text[len(self._shown) :]
        self._window = self._window[-self.WINDOW :]
        self._shown = self._decode(self._window)
        self._num_kept = 0
        return new

    def finish(self) -> str:
        text = self._decode(self._window) if self._num_kept else self._shown
        self._num_kept, new = 0, text[len(self._shown) :]
        return new


class StopScanner:
    """Finds the first stop string that is complete in a text that comes in pieces.

    The stop whose last character comes first wins; of stops that end at the same character, the longest. So the text
    ends as early as it can and never waits to see whether a longer stop follows. The text ends before the stop, or
    after it with `include_stop`.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False):
        longest_first = sorted(dict.fromkeys(stops), key=len, reverse=True)
        self._matchers = [_Matcher(stop) for stop in longest_first]
        self._first_characters = frozenset(stop[0] for stop in longest_first)
        self._include_stop = include_stop
        self._kept = ""  # ends with what may become a stop string; the longest such ending is all there is in it
        self.hit: str | None = None

    @property
    def is_active(self) -> bool:
        return bool(self._matchers)

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """(text that is certainly no stop, the stop that was hit or None). After a hit all text is dropped. Unless
        `armed`, a stop that would be complete now is passed over; it may still begin now and be complete later."""
        if self.hit is not None:
            return "", self.hit
        if not self._kept and self._first_characters.isdisjoint(text):
            return text, None  # the usual case: nothing is under way and nothing begins
        seen = self._kept + text
        for place, character in enumerate(text, start=len(self._kept) + 1):
            complete = [matcher.stop for matcher in self._matchers if matcher.feed(character)]
            if complete and armed:
                self.hit, self._kept = complete[0], ""
                return seen[: place if self._include_stop else place - len(self.hit)], self.hit
        num_kept = max(matcher.num_matched for matcher in self._matchers)
        self._kept = seen[len(seen) - num_kept :]
        return seen[: len(seen) - num_kept], None

    def finish(self) -> str:
        """The text has ended: what was kept back is no stop after all."""
        text, self._kept = self._kept, ""
        return text


class _Matcher:
    """Knuth-Morris-Pratt for one stop: knows how long a beginning of it the text ends with right now.

    The table of fallbacks grows with what has been matched: a stop that never begins costs nothing, however long."""

    __slots__ = ("_fallback", "num_matched", "stop")

    def __init__(self, stop: str):
        self.stop = stop
        self.num_matched = 0  # always less than the whole stop
        self._fallback = [0]  # by length matched: the longest shorter beginning that is also an ending of it

    def feed(self, character: str) -> bool:
        """Take one character; true if the stop is complete with it."""
        length = self.num_matched
        while length and self.stop[length] != character:
            length = self._fallback[length - 1]
        length += self.stop[length] == character
        if length > len(self._fallback):
            self._add_fallback()
        is_complete = length == len(self.stop)
        self.num_matched = self._fallback[length - 1] if is_complete else length
        return is_complete

    def _add_fallback(self) -> None:
        stop, index, length = self.stop, len(self._fallback), self._fallback[-1]
        while length and stop[index] != stop[length]:
            length = self._fallback[length - 1]
        self._fallback.append(length + (stop[index] == stop[length]))
