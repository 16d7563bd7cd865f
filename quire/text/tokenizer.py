"""Encodes and decodes text. `Tokenizer` wraps a `tokenizers` backend with the model's rules about special ids.

Front ends encode prompts with it; `Detokenizer` and `resolve` use `token_bytes`. It is built by `from_folder` (Hugging
Face files) or `from_gguf` (GGUF metadata) and is immutable, so threads may share it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from quire.text.pieces import PieceRule
from quire.types import QuireError

MAX_SEARCHES_KEPT = 256
MAX_WORDS_KEPT = 2048  # words in the backend's cache; its default of 10,000 grows by megabytes over hours
_ANCHOR = "\n"  # no vocabulary merges a line break with the following word


@dataclass(frozen=True, slots=True)
class TokenizerVocabulary:
    """The model's vocabulary as far as the backend does not describe it. Filled by the two builders."""

    size: int
    rule: PieceRule
    token_text: Callable[[int], str | None]  # spelling of an id; called only for 0 <= id < size
    special_ids: frozenset[int] = frozenset()  # control tokens: BOS, end of turn, ...
    added_ids: frozenset[int] = frozenset()  # spelled as plain text, not in the vocabulary's byte spelling
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()  # ids that end a turn; the first is EOS
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>", variables of chat templates
    chat_template: str | None = None
    prefix_ids: tuple[int, ...] = ()  # put before every encoded text if the post-processor does not add them
    suffix_ids: tuple[int, ...] = ()  # put after every encoded text likewise


class Tokenizer:
    """A model's tokenizer. Safe to call from any thread."""

    def __init__(self, backend: Any, vocabulary: TokenizerVocabulary):
        self._backend = backend
        with suppress(AttributeError):  # some kinds and versions of models have no such cache
            backend.model._resize_cache(MAX_WORDS_KEPT)
        self._vocabulary = vocabulary
        self._known_bytes: dict[int, bytes] = {}  # a cache; a race between threads only repeats work
        self._searches: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._search_lock = threading.Lock()

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """From `tokenizer.json` and the files beside it."""
        from quire.text.folder_tokenizer import tokenizer_from_folder

        return tokenizer_from_folder(Path(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """From the `tokenizer.*` keys of a GGUF file."""
        from quire.text.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(metadata)

    # -- vocabulary

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. A model's output layer may be padded beyond it."""
        return self._vocabulary.size

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._vocabulary.eos_ids

    @property
    def chat_template(self) -> str | None:
        return self._vocabulary.chat_template

    @property
    def special_tokens(self) -> dict[str, str]:
        return dict(self._vocabulary.special_tokens)

    @property
    def rule(self) -> PieceRule:
        return self._vocabulary.rule

    @cached_property
    def special_spellings(self) -> tuple[str, ...]:
        """Spellings of control tokens in text, longest first, without those of one character."""
        return self._spellings(self._vocabulary.special_ids)

    @cached_property
    def turn_spellings(self) -> tuple[str, ...]:
        """Spellings of the tokens that begin a text or end a turn."""
        bos = () if self.bos_id is None else (self.bos_id,)
        return self._spellings({*bos, *self.eos_ids})

    def _spellings(self, ids: Iterable[int]) -> tuple[str, ...]:
        known = (self._vocabulary.token_text(i) for i in ids if 0 <= i < self._vocabulary.size)
        return tuple(sorted({text for text in known if text and len(text) > 1}, key=lambda text: (-len(text), text)))

    def is_special(self, token_id: int) -> bool:
        return token_id in self._vocabulary.special_ids

    def to_json(self) -> str:
        """The content of a tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    # -- text to ids

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The text's ids; special tokens spelled in it are recognised. `add_special` adds BOS (and EOS) as the model
        requires; leave it off for text from a chat template, which writes them itself."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special).ids
        except TypeError:  # raised by the backend for other types and for text without a UTF-8 form
            why = "holds half a surrogate pair" if isinstance(text, str) else f"is of type {type(text).__name__}"
            raise QuireError("invalid_text", f"The text can't be encoded: it {why}.", "Send valid Unicode.") from None
        if add_special:
            return [*self._vocabulary.prefix_ids, *ids, *self._vocabulary.suffix_ids]
        return ids

    def encode_inside(self, text: str) -> list[int]:
        """The ids of a text inside another, without the space that the tokenizer puts before a text."""
        alone = self.encode(text, add_special=False)
        if b"".join(map(self.token_bytes, alone)) == text.encode():
            return alone
        before = self.encode(_ANCHOR, add_special=False)
        ids = self.encode(_ANCHOR + text, add_special=False)
        return ids[len(before) :] if ids[: len(before)] == before else alone

    # -- ids to text

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The ids' text; broken UTF-8 becomes U+FFFD. Spaces are never cleaned up, even if the model's files request
        it, because that would change text that is already streamed."""
        shown = self.shown_ids(ids, skip_special)
        if self.rule.kind == "opaque":
            return self.decode_opaque(shown)
        text = b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")
        return text[1:] if self.rule.strip_space and text.startswith(" ") else text

    def decode_opaque(self, ids: Sequence[int]) -> str:
        """The ids' text as the backend joins it, which is the only way for an opaque vocabulary."""
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text

    def shown_ids(self, ids: Iterable[int], skip_special: bool) -> list[int]:
        """The ids that contribute to the text: known ones, without special ones if `skip_special`."""
        size, hidden = self._vocabulary.size, self._vocabulary.special_ids if skip_special else frozenset()
        return [token_id for token_id in ids if 0 <= token_id < size and token_id not in hidden]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text, possibly part of a character; empty for an unknown id."""
        known = self._known_bytes.get(token_id)
        if known is None:
            known = self._known_bytes[token_id] = self._find_bytes(token_id)
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        vocabulary = self._vocabulary
        token = vocabulary.token_text(token_id) if 0 <= token_id < vocabulary.size else None
        if token is None:
            return b""
        return vocabulary.rule.to_bytes(
            token, is_special=token_id in vocabulary.special_ids, is_added=token_id in vocabulary.added_ids
        )

    def ids_containing(self, text: str) -> tuple[int, ...]:
        """Every id whose text contains this text, in order. One search over the bytes of the whole vocabulary; recent
        results are cached."""
        wanted = text.encode("utf-8", "replace")
        with self._search_lock:
            if wanted in self._searches:
                self._searches.move_to_end(wanted)
                return self._searches[wanted]
        found = tuple(self._find_containing(wanted))
        with self._search_lock:
            self._searches[wanted] = found
            if len(self._searches) > MAX_SEARCHES_KEPT:
                self._searches.popitem(last=False)
        return found

    def _find_containing(self, wanted: bytes) -> Iterable[int]:
        text, ends = self._all_bytes
        place = text.find(wanted)
        while 0 <= place < len(text):
            token_id = bisect_right(ends, place)
            if place + len(wanted) <= ends[token_id]:
                yield token_id
                place = text.find(wanted, ends[token_id])
            else:  # the match spans two tokens
                place = text.find(wanted, place + 1)

    @cached_property
    def _all_bytes(self) -> tuple[bytes, list[int]]:
        """The concatenated bytes of all tokens, and the end offset of each."""
        tokens = [self.token_bytes(token_id) for token_id in range(self.vocab_size)]
        return b"".join(tokens), list(accumulate(map(len, tokens)))

    @cached_property
    def longest_token(self) -> int:
        """The byte length of the longest token."""
        return max(1, max(map(len, map(self.token_bytes, range(self.vocab_size))), default=1))
