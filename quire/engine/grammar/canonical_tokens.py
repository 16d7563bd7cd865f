"""Tokenizes text that a grammar forces in the same way as the model's own tokenizer.

`library_tokenizer` passes `CanonicalTokens` to the grammar library, which calls it whenever only one continuation is
possible. Its text then consists of the tokens the model was trained on, and not of single letters.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

Encode = Callable[[str], Sequence[int]]  # the token ids of a text inside another
LONG_BYTES = 256  # longer texts are cached, since the library requests the rest of the text at each step
MAX_KEPT = 8


@dataclass(frozen=True, slots=True)
class _EncodedText:
    """A long text and its tokens."""

    raw: bytes
    ids: list[int]
    starts: list[int]  # byte offset of each token, and of the end

    def tail(self, raw: bytes) -> list[int] | None:
        """Return the tokens of `raw` if this text ends with it and a token begins there, else None."""
        start = len(self.raw) - len(raw)
        if start < 0 or not self.raw.endswith(raw):
            return None
        place = bisect_left(self.starts, start)
        return self.ids[place:] if self.starts[place] == start else None


class CanonicalTokens:
    """Converts bytes to token ids that spell exactly these bytes, without special tokens.

    Where the tokenizer would change the text (a normalizer, half a character, the spelling of a special token), greedy
    longest matching is used instead. Safe to call from any thread.
    """

    def __init__(self, tokens: Sequence[bytes], special_ids: Collection[int], encode: Encode | None = None):
        """`tokens`: the bytes of each id. Without `encode` all text is tokenized by greedy longest matching."""
        self._tokens = tokens
        self._special_ids = special_ids
        self._encode = encode
        self._lock = threading.Lock()
        self._by_bytes: dict[bytes, int] = {}  # built on first use
        self._longest = 0
        self._kept: deque[_EncodedText] = deque(maxlen=MAX_KEPT)

    def __call__(self, text: bytes | str) -> list[int]:
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        if len(raw) <= LONG_BYTES:
            return self._write(raw)
        for written in tuple(self._kept):
            found = written.tail(raw)
            if found is not None:
                return found
        ids = self._write(raw)
        starts = [0, *accumulate(len(self._tokens[token_id]) for token_id in ids)]
        if starts[-1] == len(raw):
            self._kept.append(_EncodedText(raw, ids, starts))
        return ids

    def _write(self, raw: bytes) -> list[int]:
        if self._encode is None:
            return self._longest_match(raw)
        whole = raw[: _whole_characters(raw)]
        return [*self._encoded(whole), *self._longest_match(raw[len(whole) :])]

    def _encoded(self, raw: bytes) -> list[int]:
        if not raw or self._encode is None:
            return []
        ids = list(self._encode(raw.decode()))
        tokens, special = self._tokens, self._special_ids
        is_plain = all(0 <= token_id < len(tokens) and token_id not in special for token_id in ids)
        if is_plain and b"".join([tokens[token_id] for token_id in ids]) == raw:
            return ids
        return self._longest_match(raw)

    def _longest_match(self, raw: bytes) -> list[int]:
        """Tokenize by greedy longest matching, dropping bytes for which the vocabulary has no token."""
        if raw and not self._longest:
            self._build()
        ids: list[int] = []
        start = 0
        while start < len(raw):
            for stop in range(min(len(raw), start + self._longest), start, -1):
                found = self._by_bytes.get(raw[start:stop])
                if found is not None:
                    ids.append(found)
                    start = stop
                    break
            else:
                start += 1
        return ids

    def _build(self) -> None:
        with self._lock:
            if self._longest:
                return
            for token_id, token in enumerate(self._tokens):
                if token and token_id not in self._special_ids:
                    self._by_bytes.setdefault(token, token_id)
            self._longest = max(map(len, self._by_bytes), default=1)


def _whole_characters(raw: bytes) -> int:
    """Return the number of leading bytes that are complete, valid UTF-8."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(raw)
