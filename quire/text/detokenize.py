"""Streaming detokenization and the search for stop strings. `TextStream` combines the two.

The results do not depend on how the input is split into pushes, and no emitted text is ever taken back: the detokenizer
holds back the bytes of an incomplete character, the scanner holds back a possible beginning of a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from quire.text.tokenizer import Tokenizer

_BROKEN = "\ufffd"


class Detokenizer:
    """Decodes incrementally: all results of `push` and `finish`, joined, equal `tokenizer.decode` of all ids. Constant
    work per token."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        is_opaque = tokenizer.rule.kind == "opaque"
        self._joiner: _Joiner = _OpaqueJoiner(tokenizer) if is_opaque else _ByteJoiner(tokenizer)

    def push(self, ids: Sequence[int]) -> str:
        """The text that later ids can't change."""
        return self._joiner.push(self._tokenizer.shown_ids(ids, self._skip_special))

    def finish(self) -> str:
        """The text held back, with an incomplete character as U+FFFD. Nothing may be pushed afterwards."""
        return self._joiner.finish()


class _Joiner(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class _ByteJoiner:
    """Joins tokens with known bytes by an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer):
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = tokenizer.rule.strip_space  # true until the first character is emitted

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
    """Joins tokens that only the backend can join: decodes each token together with the few before it and emits the
    text it adds. Joining depends on near neighbours only, so a short window is enough."""

    WINDOW = 4
    MAX_KEPT = 16  # tokens; longer broken text is not an incomplete character

    def __init__(self, tokenizer: Tokenizer):
        self._decode = tokenizer.decode_opaque
        self._window: list[int] = []
        self._shown = ""  # the part of the window's text that has been emitted
        self._num_kept = 0

    def push(self, ids: Sequence[int]) -> str:
        return "".join(map(self._push_one, ids))  # one by one: results must not depend on the pushes

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
    """Finds the first complete stop string in streamed text.

    The stop string that is complete first wins; of those that end at the same character, the longest. So the scanner
    never waits for a longer stop string. The text ends before the stop string, or after it with `include_stop`.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False):
        longest_first = sorted(dict.fromkeys(stops), key=len, reverse=True)
        self._matchers = [_Matcher(stop) for stop in longest_first]
        self._first_characters = frozenset(stop[0] for stop in longest_first)
        self._include_stop = include_stop
        self._kept = ""  # the longest suffix that may become a stop string
        self.hit: str | None = None

    @property
    def is_active(self) -> bool:
        return bool(self._matchers)

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Returns the text that is certainly not part of a stop string, and the stop string that was hit or None. After
        a hit all text is dropped. Unless `armed`, a stop string that is complete in this push is ignored; one that
        begins in it may be complete later."""
        if self.hit is not None:
            return "", self.hit
        if not self._kept and self._first_characters.isdisjoint(text):
            return text, None  # fast path: no match in progress and none begins
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
        """The text held back, which is no stop string since the text has ended."""
        text, self._kept = self._kept, ""
        return text


class _Matcher:
    """Knuth-Morris-Pratt for one stop string: tracks the longest prefix of it that is a suffix of the text.

    The fallback table grows with the matched length, so a long stop string that never begins costs nothing."""

    __slots__ = ("_fallback", "num_matched", "stop")

    def __init__(self, stop: str):
        self.stop = stop
        self.num_matched = 0  # less than the whole stop string
        self._fallback = [0]  # by matched length: the longest proper prefix that is also a suffix

    def feed(self, character: str) -> bool:
        """Take one character and return whether it completes the stop string."""
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
