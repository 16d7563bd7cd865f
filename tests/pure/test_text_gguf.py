"""Tokenizers built from GGUF metadata, against independent constructions of the same thing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, trainers

from quire.files.gguf import open_gguf
from quire.text.gguf_tokenizer import MAX_PIECE_CHARS, merges_by_score
from quire.text.pieces import BYTE_OF_CHARACTER
from quire.text.pretokenizers import pre_tokenizer_named
from quire.text.tokenizer import Tokenizer
from quire.types import QuireError
from tests.pure.test_text_support import (
    CORPUS,
    SPECIALS,
    TEXTS,
    gguf_of,
    gpt2_words,
    sentencepiece_metadata,
    smollm2_file,
    smollm_words,
    train_byte_level,
)

# -- byte-level


@pytest.mark.parametrize(("pre", "words"), [("smollm", smollm_words), ("gpt-2", gpt2_words), ("olmo", gpt2_words)])
def test_byte_level_matches_the_tokenizer_it_was_made_from(pre: str, words: Any) -> None:
    backend = train_byte_level(words())
    tokenizer = Tokenizer.from_gguf(gguf_of(backend, pre))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids, text
        assert tokenizer.decode(ids, skip_special=False) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_the_digit_split_matters() -> None:
    """The trap: merges learned across digits must not be used when the pre-tokenizer splits digits."""
    metadata = gguf_of(train_byte_level(gpt2_words(), vocab_size=600), "smollm")
    with_split, without = Tokenizer.from_gguf(metadata), Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "gpt-2"})
    assert len(with_split.encode(" 77")) == 3
    assert len(without.encode(" 77")) < 3


PRE_CASES = [
    ("default", "it's 12345 a,b", ["it", "'", "s", " ", "123", "45", " a", ",", "b"]),
    ("gpt-2", "it's 12345 a,b\n\n c", ["it", "'s", " 12345", " a", ",", "b", "\n\n", " c"]),
    ("phi-2", "  x", [" ", " x"]),
    ("starcoder", "v12 3", ["v", "1", "2", " ", "3"]),
    ("refact", "v12", ["v", "1", "2"]),
    ("command-r", "v12", ["v", "1", "2"]),
    ("falcon", "a``b 1234", ["a", "``", "b", " ", "123", "4"]),
    ("llama-bpe", "HE'LL say:hi 12345\n\n x", ["HE", "'LL", " say", ":hi", " ", "123", "45", "\n\n", " x"]),
    ("qwen2", "HE'LL 123 a.b", ["HE", "'LL", " ", "1", "2", "3", " a", ".b"]),
    ("qwen2", "हिन्दी", ["ह", "िन", "्द", "ी"]),
    ("qwen35", "हिन्दी", ["हिन्दी"]),
    ("seed-coder", "HE'LL 12 a.\n\nb", ["HE", "'LL", " ", "1", "2", " a", ".", "\n\n", "b"]),
    ("exaone-moe", "Tell him 12 of it.\n\nb", ["Tell him", " ", "1", "2", " of it", ".\n", "\n", "b"]),
    ("tekken", "HelloWORLD don't 12/", ["Hello", "WORLD", " don", "'t", " ", "1", "2", "/"]),
    ("mistral", "getName", ["get", "Name"]),
    ("gpt-4o", "HelloWORLD don't 1234/\n", ["Hello", "WORLD", " don't", " ", "123", "4", "/\n"]),
    ("deepseek-llm", "ab  漢字12!é\n", ["ab", "  ", "漢字", "12", "!", "é", "\n"]),
    ("deepseek-coder", "ab 12!?x\n\n", ["ab", " ", "1", "2", "!?", "x", "\n", "\n"]),
    ("deepseek-v3", "漢字かなab 1234 .x", ["漢字かな", "ab", " ", "123", "4", " .", "x"]),
]


@pytest.mark.parametrize(("pre", "text", "words"), PRE_CASES)
def test_words_of_each_pre_tokenizer(pre: str, text: str, words: list[str]) -> None:
    _, splitter = pre_tokenizer_named(pre).build()
    spelled = [word for word, _ in splitter.pre_tokenize_str(text)]
    assert [bytes(BYTE_OF_CHARACTER[c] for c in word).decode() for word in spelled] == words


def test_ranked_pieces_match_the_tokenizer_they_were_made_from() -> None:
    """As Gemma's own: spaces are marked, all of a text is one word, and what is in no piece is spelled in bytes."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    spelled = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", *SPECIALS, *spelled], show_progress=False)
    backend.train_from_iterator([line for line in CORPUS if "\n" not in line], trainer)
    metadata = gguf_of(backend, "gemma4", model="gemma4", add_bos_token=False, unknown_token_id=0)
    kinds = [6 if token in spelled else kind for token, kind in zip(metadata["tokenizer.ggml.tokens"],
             metadata["tokenizer.ggml.token_type"], strict=True)]  # fmt: skip
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.token_type": kinds})
    for text in [*TEXTS, "  two  spaces ", "漢字 and 🙂", "line\n\nline\n"]:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids, text
        assert tokenizer.decode(ids, skip_special=False) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert len(tokenizer.encode("the the")) < len("the the"), "pieces are merged"


def test_a_word_in_the_vocabulary_is_taken_whole_only_where_merges_are_ignored() -> None:
    """Llama 3 takes a known word even if no chain of merges leads to it."""
    backend = train_byte_level(gpt2_words())
    metadata = gguf_of(backend, "llama-bpe", add_bos_token=False)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "zyzzyva"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    assert Tokenizer.from_gguf(metadata).encode("zyzzyva") == [backend.get_vocab_size()]
    assert len(Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "gpt-2"}).encode("zyzzyva")) > 1


@pytest.mark.parametrize(
    ("pre", "flags", "before", "after"),
    [
        ("smollm", {}, [], []),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, [1], [2]),
        ("llama-bpe", {}, [1], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
        ("llama-bpe", {"bos_token_id": None}, [], []),
    ],
)
def test_bos_and_eos_flags(pre: str, flags: dict[str, Any], before: list[int], after: list[int]) -> None:
    tokenizer = Tokenizer.from_gguf(gguf_of(train_byte_level(gpt2_words()), pre, **flags))
    plain = tokenizer.encode("the dog", add_special=False)
    assert tokenizer.encode("the dog") == [*before, *plain, *after]


def test_token_types_and_named_ids() -> None:
    metadata = gguf_of(train_byte_level(gpt2_words()), "gpt-2", eot_token_id=1, padding_token_id=2)
    tokens = metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "Größe  ", "[PAD7]", "</x>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 4, 5, 3]
    metadata["tokenizer.chat_template"] = "{{ messages }}"
    tokenizer = Tokenizer.from_gguf(metadata)
    user_defined, unused, control = range(len(tokens) - 3, len(tokens))
    assert tokenizer.encode("theGröße  the").count(user_defined) == 1
    assert tokenizer.decode([user_defined]) == "Größe  "
    assert unused not in tokenizer.encode("[PAD7]")
    assert tokenizer.encode("</x>") == [control] and tokenizer.decode([control]) == ""
    assert tokenizer.decode([control], skip_special=False) == "</x>"
    assert tokenizer.eos_ids == (2, 1, 0)  # EOS, EOT, and <|endoftext|> by its name
    assert tokenizer.special_tokens["pad_token"] == "<|im_end|>" and tokenizer.bos_id == 1
    assert tokenizer.chat_template == "{{ messages }}"


def test_an_end_token_marked_as_a_word_is_special_all_the_same() -> None:
    metadata = gguf_of(train_byte_level(gpt2_words()), "gpt-2", token_type=None)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("the<|im_end|>")[-1] == 2
    assert tokenizer.is_special(2) and not tokenizer.is_special(0)


def test_a_message_end_is_no_turn_end_where_turns_have_several_messages() -> None:
    metadata = gguf_of(train_byte_level(gpt2_words()), "gpt-4o")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<|end|>", "<|return|>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 3, 3]
    end, turn_end = len(metadata["tokenizer.ggml.tokens"]) - 2, len(metadata["tokenizer.ggml.tokens"]) - 1
    eos_ids = Tokenizer.from_gguf(metadata).eos_ids
    assert turn_end in eos_ids and end not in eos_ids


# -- SentencePiece


def reference_encode(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's rule taken at its word: join the two neighbours whose joint piece scores best, leftmost first,
    until none can be joined; then write what is no piece as bytes."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    types = metadata["tokenizer.ggml.token_type"]
    ids = {token: i for i, token in enumerate(tokens) if types[i] == 1}
    prefix = "▁" if metadata.get("tokenizer.ggml.add_space_prefix", True) and text else ""
    symbols = list(prefix + text.replace(" ", "▁"))
    while True:
        joints = [(left + right, place) for place, (left, right) in enumerate(pairwise(symbols))]
        known = [(scores[ids[joint]], -place) for joint, place in joints if joint in ids]
        best = max(known, default=None)  # of equal scores the leftmost
        if best is None:
            break
        place = -best[1]
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    found = [[ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()] for symbol in symbols]
    return [token_id for group in found for token_id in group]


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="thedogin xr▁é漢🎉\n\t", max_size=24), st.booleans())
@example("", True)
@example(" ", True)
@example("the  dog", False)
def test_sentencepiece_matches_the_plain_rule(text: str, add_space_prefix: bool) -> None:
    metadata = sentencepiece_metadata(add_space_prefix=add_space_prefix, add_bos_token=False)
    metadata["tokenizer.ggml.token_type"][-2] = 5  # without the user-defined line break, which the rule does not know
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode(text)
    assert ids == reference_encode(metadata, text)
    assert tokenizer.decode(ids) == text.replace("▁", " ")


def test_sentencepiece_flags_and_types() -> None:
    metadata = sentencepiece_metadata()
    tokenizer = Tokenizer.from_gguf(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    tool, line_break, the = tokens.index("<tool>"), tokens.index("\n\n"), tokens.index("▁the")
    assert tokenizer.encode("the") == [1, the]  # BOS is the default of this kind
    assert tokenizer.encode("") == [1] and tokenizer.encode("", add_special=False) == []
    assert tokenizer.encode("the<tool>the\n\nthe", add_special=False) == [the, tool, the, line_break, the]
    assert tokenizer.decode([1, the, tool, line_break, the, 2]) == "the\n\n the"
    assert tokenizer.token_bytes(3 + 0x0A) == b"\n" and tokenizer.token_bytes(the) == b" the"
    assert tokenizer.bos_id == 1 and tokenizer.eos_ids == (2,) and tokenizer.is_special(0)
    both = Tokenizer.from_gguf(sentencepiece_metadata(add_bos_token=True, add_eos_token=True))
    assert both.encode("the") == [1, the, 2]


def test_ids_that_a_sentencepiece_file_leaves_out_have_their_usual_places() -> None:
    names = ("bos", "eos", "unknown")
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(**{f"{name}_token_id": None for name in names}))
    assert tokenizer.bos_id == 1 and tokenizer.eos_ids == (2,)


def test_merges_by_score_are_all_cuts_best_first() -> None:
    tokens, scores = ["a", "b", "ab", "abb", "bb", "x" * (MAX_PIECE_CHARS + 1)], [-9.0, -9.0, -2.0, -1.0, -3.0, 0.0]
    assert merges_by_score(tokens, scores, [0, 1, 2, 3, 4, 5]) == [("a", "bb"), ("ab", "b"), ("a", "b"), ("b", "b")]
    assert merges_by_score(tokens, scores, [0, 1, 4]) == [("b", "b")]


# -- files that lie


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({"model": None}, "bad_gguf", "tokenizer.ggml.model"),
        ({"model": "t5"}, "unsupported_tokenizer", "t5"),
        ({"model": "gemma4", "merges": None}, "bad_gguf", "merges"),
        ({"model": "bert"}, "unsupported_tokenizer", "bert"),
        ({"pre": "brand-new"}, "unsupported_tokenizer", "brand-new"),
        ({"tokens": None}, "bad_gguf", "tokens"),
        ({"tokens": [1, 2]}, "bad_gguf", "tokens"),
        ({"token_type": [1]}, "bad_gguf", "token_type"),
        ({"merges": None}, "bad_gguf", "merges"),
        ({"merges": ["nospace"]}, "bad_gguf", "nospace"),
        ({"merges": ["a "]}, "bad_gguf", "pair"),
        ({"eos_token_id": 10**6}, "bad_gguf", "eos_token_id"),
        ({"bos_token_id": -1}, "bad_gguf", "bos_token_id"),
        ({"model": "llama"}, "bad_gguf", "scores"),
        ({"model": "llama", "scores": [0.5]}, "bad_gguf", "scores"),
    ],
)
def test_bad_metadata_is_one_clear_line(changes: dict[str, Any], code: str, word: str) -> None:
    with pytest.raises(QuireError) as caught:
        Tokenizer.from_gguf(gguf_of(train_byte_level(gpt2_words(), vocab_size=270), "gpt-2", **changes))
    assert caught.value.code == code
    assert word in str(caught.value) and "\n" not in str(caught.value)


def test_metadata_is_left_as_it_was() -> None:
    metadata = gguf_of(train_byte_level(gpt2_words()), "gpt-2")
    metadata["tokenizer.ggml.token_type"][2] = 1
    before = {key: list(value) if isinstance(value, list) else value for key, value in metadata.items()}
    Tokenizer.from_gguf(metadata)
    assert metadata == before


# -- the real one


def test_smollm2() -> None:
    metadata = open_gguf(smollm2_file()).metadata
    tokenizer = Tokenizer.from_gguf(metadata)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids[0]) == (49152, 1, 2)
    assert tokenizer.encode("a  1") == [81, 256, 33] and tokenizer.encode("\n\n7") == [1116, 39]
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>") == [1, 4093, 198, 26843, 2]

    vocab = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(line.split(" ")) for line in metadata["tokenizer.ggml.merges"]]
    independent = Backend(models.BPE(vocab, merges))
    independent.pre_tokenizer = smollm_words()
    independent.add_special_tokens(metadata["tokenizer.ggml.tokens"][:17])
    for text in [*TEXTS, "".join(TEXTS), "Why is the sky blue? 2024-11-15 12:30", *SPECIALS]:
        assert tokenizer.encode(text) == independent.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    assert tokenizer.chat_template is not None and "<|im_start|>" in tokenizer.chat_template
