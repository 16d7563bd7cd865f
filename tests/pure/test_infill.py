"""Fill-in-the-middle prompts: each family's tokens are found and joined in its order."""

from __future__ import annotations

import pytest

pytest.importorskip("tokenizers")

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from quire.text.infill import KNOWN, InfillMarkers, find_infill
from quire.text.pieces import PieceRule
from quire.text.tokenizer import Tokenizer, TokenizerVocabulary
from quire.types import QuireError


def tokenizer_with(*special: str) -> Tokenizer:
    words = {word: place for place, word in enumerate(["<unk>", "a", "b", *special])}
    backend = Backend(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(list(special))
    spelled = {place: word for word, place in words.items()}
    ids = frozenset(words[word] for word in special)
    vocabulary = TokenizerVocabulary(len(words), PieceRule("opaque"), spelled.get, special_ids=ids, added_ids=ids)
    return Tokenizer(backend, vocabulary)


@pytest.mark.parametrize("markers", KNOWN, ids=[one.prefix for one in KNOWN])
def test_each_family(markers: InfillMarkers) -> None:
    given = [text for text in (markers.prefix, markers.suffix, markers.middle) if text]
    tokens = find_infill(tokenizer_with(*given, "<|endoftext|>"))
    assert (tokens.prefix, tokens.suffix) == (3, 4) and tokens.middle == (5 if markers.middle else None)
    joined = tokens.join([1], [2])
    assert joined == ([4, 2, 3, 1] if markers.suffix_first else [3, 1, 4, 2, 5])
    assert set(tokens.ends) == {*range(3, 3 + len(given)), 3 + len(given)}


def test_a_model_without_them() -> None:
    for special in ((), ("<|fim_prefix|>", "<|fim_suffix|>")):
        with pytest.raises(QuireError, match="no fill-in-the-middle tokens") as caught:
            find_infill(tokenizer_with(*special))
        assert caught.value.param == "suffix"
