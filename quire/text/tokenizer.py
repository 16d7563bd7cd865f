"""Text to token ids and back. `Tokenizer` wraps one `tokenizers` backend with the model's own rules about special ids.

Front ends call it to encode prompts; `Detokenizer` and `resolve` build on `token_bytes`. Built by `from_folder`
(Hugging Face files) or `from_gguf` (the GGUF's metadata). It never changes after it is built: threads may share it.
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
MAX_WORDS_KEPT = 2048  # of which the backend remembers the tokens; its own 10,000 are megabytes that fill for hours
_ANCHOR = "\n"  # no vocabulary merges a line break with the word after it


@dataclass(frozen=True, slots=True)
class TokenizerVocabulary:
    """What a tokenizer must know beside its backend. The two builders fill it in."""

    size: int
    rule: PieceRule
    token_text: Callable[[int], str | None]  # an id's written form; asked only for 0 <= id < size
    special_ids: frozenset[int] = frozenset()  # carry no text of their own: BOS, end of turn, ...
    added_ids: frozenset[int] = frozenset()  # written as plain text, not in the vocabulary's spelling
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()  # each of them ends a turn; the first is the EOS proper
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>", as chat templates want it
    chat_template: str | None = None
    prefix_ids: tuple[int, ...] = ()  # put around every encoded text, where the backend's own
    suffix_ids: tuple[int, ...] = ()  # post-processor does not do it already


class Tokenizer:
    def __init__(self, backend: Any, vocabulary: TokenizerVocabulary):
        self._backend = backend
        with suppress(AttributeError):  # not every kind of model has such a cache, nor every version of it a size
            backend.model._resize_cache(MAX_WORDS_KEPT)
        self._vocabulary = vocabulary
        self._known_bytes: dict[int, bytes] = {}  # filled as ids are met; a lost race only repeats the work
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

    # -- what the vocabulary says

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to this; a model's output layer may be padded beyond it."""
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
        """How control tokens are written in text, longest first. One character alone is no spelling."""
        return self._spellings(self._vocabulary.special_ids)

    @cached_property
    def turn_spellings(self) -> tuple[str, ...]:
        """The spellings of the tokens that begin a text or end a turn."""
        bos = () if self.bos_id is None else (self.bos_id,)
        return self._spellings({*bos, *self.eos_ids})

    def _spellings(self, ids: Iterable[int]) -> tuple[str, ...]:
        known = (self._vocabulary.token_text(i) for i in ids if 0 <= i < self._vocabulary.size)
        return tuple(sorted({text for text in known if text and len(text) > 1}, key=lambda text: (-len(text), text)))

    def is_special(self, token_id: int) -> bool:
        return token_id in self._vocabulary.special_ids

    # -- text to ids

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Special tokens written in the text are recognised. `add_special` puts BOS (and EOS) where the model wants
        them; leave it off for text from a chat template, which writes its own."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special).ids
        except TypeError:  # what the backend says to other types, and to text that has no UTF-8 form
            why = "holds half a surrogate pair" if isinstance(text, str) else f"is of type {type(text).__name__}"
            raise QuireError("invalid_text", f"The text can't be encoded: it {why}.", "Send valid Unicode.") from None
        if add_special:
            return [*self._vocabulary.prefix_ids, *ids, *self._vocabulary.suffix_ids]
        return ids

    def encode_inside(self, text: str) -> list[int]:
        """The ids of a text in the middle of another: a space that the tokenizer puts before a text is left out."""
        alone = self.encode(text, add_special=False)
        if b"".join(map(self.token_bytes, alone)) == text.encode():
            return alone
        before = self.encode(_ANCHOR, add_special=False)
        ids = self.encode(_ANCHOR + text, add_special=False)
        return ids[len(before) :] if ids[: len(before)] == before else alone

    # -- ids to text

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Broken UTF-8 becomes U+FFFD. No clean-up of spaces is done, whatever the model's files ask for: it would
        change text that has been streamed already."""
        shown = self.shown_ids(ids, skip_special)
        if self.rule.kind == "opaque":
            return self.decode_opaque(shown)
        text = b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")
        return text[1:] if self.rule.strip_space and text.startswith(" ") else text

    def decode_opaque(self, ids: Sequence[int]) -> str:
        """The backend's own way of joining tokens; the only one there is for an opaque vocabulary."""
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text

    def shown_ids(self, ids: Iterable[int], skip_special: bool) -> list[int]:
        """The ids that have a say in the text: known ones, and special ones only if wanted."""
        size, hidden = self._vocabulary.size, self._vocabulary.special_ids if skip_special else frozenset()
        return [token_id for token_id in ids if 0 <= token_id < size and token_id not in hidden]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text (part of a character, maybe); empty for an id nobody knows."""
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
        """Every id whose own text contains this text, in order. One search over the bytes of the whole vocabulary,
        remembered for the last texts."""
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
            else:  # it reaches into the next token
                place = text.find(wanted, place + 1)

    @cached_property
    def _all_bytes(self) -> tuple[bytes, list[int]]:
        """The bytes of all tokens side by side, and where each one's end."""
        tokens = [self.token_bytes(token_id) for token_id in range(self.vocab_size)]
        return b"".join(tokens), list(accumulate(map(len, tokens)))

    @cached_property
    def longest_token(self) -> int:
        """The most bytes of text that one token stands for."""
        return max(1, max(map(len, map(self.token_bytes, range(self.vocab_size))), default=1))
