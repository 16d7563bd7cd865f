"""A model's vocabulary for grammars: the library's tokenizer, and masks that need no matcher."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Any

from quire.engine.grammar.canonical_tokens import CanonicalTokens, Encode
from quire.types import QuireError


class GrammarVocabulary:
    """The vocabulary that all grammars of a model share. The library's tokenizer is built once, on first use."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        eos_ids: Sequence[int],
        special_ids: Collection[int] = (),
        vocab_size: int | None = None,
        encode: Encode | None = None,
    ):
        size = max(len(tokens), vocab_size or 0)
        if not eos_ids:
            raise QuireError("no_end_token", "The model has no end-of-sequence token.", "Grammars need one.")
        self._tokens = [*tokens, *[b""] * (size - len(tokens))]
        self._special_ids = frozenset(special_ids)
        self._encode = encode
        self._lock = threading.Lock()
        self._library: Any = None
        self.eos_ids = frozenset(eos_ids)
        self._eos_order = list(dict.fromkeys(eos_ids))
        self.mask_bytes = 4 * -(-size // 32)
        self.full_mask = _mask(range(size), self.mask_bytes)
        self.end_mask = _mask(self.eos_ids, self.mask_bytes)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]

    def text(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(self._tokens[token_id] for token_id in token_ids)

    @property
    def library(self) -> Any:
        with self._lock:
            if self._library is None:
                self._library = library_tokenizer(self._tokens, self._eos_order, self._special_ids, self._encode)
            return self._library


class _Wrapped:
    """The tokenizer interface that the library expects. The library calls it for the tokens of forced text."""

    is_tokenizer_wrapper = True

    def __init__(
        self, tokens: Sequence[bytes], eos_ids: Sequence[int], special_ids: Collection[int], encode: Encode | None
    ):
        self.tokens = list(tokens)
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(special_ids)
        self._write = CanonicalTokens(tokens, frozenset([*special_ids, *eos_ids]), encode)

    def __call__(self, text: bytes | str) -> list[int]:
        return self._write(text)


def library_tokenizer(
    tokens: Sequence[bytes], eos_ids: Sequence[int], special_ids: Collection[int] = (), encode: Encode | None = None
) -> Any:
    """Build the library's tokenizer. `tokens`: the bytes of each id, one entry per logit, empty for ids without text.
    `encode`: see `CanonicalTokens`."""
    from llguidance import LLTokenizer

    return LLTokenizer(_Wrapped(tokens, eos_ids, special_ids, encode), eos_token=list(eos_ids))  # type: ignore[arg-type]


def _mask(ids: Collection[int], num_bytes: int) -> bytes:
    mask = bytearray(num_bytes)
    for token_id in ids:
        mask[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(mask)


def one_token_mask(token_id: int, num_bytes: int) -> bytes:
    return _mask((token_id,), num_bytes)


def with_token(mask: bytes, token_id: int) -> bytes:
    """Return the mask with one more token allowed."""
    place = token_id >> 3
    return mask[:place] + bytes([mask[place] | 1 << (token_id & 7)]) + mask[place + 1 :]


def allows(mask: bytes, token_id: int) -> bool:
    return token_id >> 3 < len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)
