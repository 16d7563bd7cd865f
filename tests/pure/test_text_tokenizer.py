"""`Tokenizer` from a Hugging Face folder, and the parts that are the same for every kind."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, processors

from quire.text.tokenizer import Tokenizer
from quire.types import QuireError
from tests.pure.test_text_support import (
    TEXTS,
    gpt2_words,
    sentencepiece_backend,
    train_byte_level,
    word_piece_backend,
    write_folder,
)

CONFIG = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>", "lstrip": False}, "pad_token": "the"}


@pytest.fixture
def byte_level(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(tmp_path, train_byte_level(gpt2_words()), tokenizer_config=CONFIG))


def test_byte_level_folder_round_trips(byte_level: Tokenizer) -> None:
    backend = train_byte_level(gpt2_words())
    for text in TEXTS:
        ids = byte_level.encode(text)
        assert ids == backend.encode(text).ids
        assert byte_level.decode(ids, skip_special=False) == text == backend.decode(ids, skip_special_tokens=False)
        assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()


def test_special_tokens_are_found_in_text_and_left_out_of_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|im_start|>the dog<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2
    assert byte_level.decode(ids) == "the dog"
    assert byte_level.eos_ids == (2,) and byte_level.bos_id == 0
    assert byte_level.is_special(1) and not byte_level.is_special(ids[1])
    assert byte_level.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "the"}


def test_a_padding_token_that_is_a_word_stays_a_word(byte_level: Tokenizer) -> None:
    (the_id,) = byte_level.encode("the")
    assert byte_level.decode([the_id]) == "the"


def test_unknown_ids_say_nothing(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("dog")
    assert byte_level.decode([*ids, byte_level.vocab_size, -1, 10**9]) == "dog"
    assert byte_level.token_bytes(-1) == byte_level.token_bytes(10**9) == b""


def test_broken_utf8_becomes_replacement_characters_as_in_the_library(byte_level: Tokenizer) -> None:
    backend = train_byte_level(gpt2_words())
    ids = backend.encode("🎉é漢").ids
    for cut in ([*ids[:-1]], [*ids[1:]], [*ids[:-1], *ids[:-1]], ids[::-1]):
        assert byte_level.decode(cut) == backend.decode(cut)


def test_an_added_word_with_accents_keeps_them(tmp_path: Path) -> None:
    backend = train_byte_level(gpt2_words())
    backend.add_tokens([AddedToken("Größe×", special=False, normalized=False)])
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend))
    ids = tokenizer.encode("the Größe×")
    assert ids[-1] == tokenizer.vocab_size - 1
    assert tokenizer.decode(ids) == "the Größe×"


def test_settings_that_cut_or_pad_are_not_obeyed(tmp_path: Path) -> None:
    backend = train_byte_level(gpt2_words())
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("the dog and the other dog")) == "the dog and the other dog"


def test_bos_from_the_post_processor(tmp_path: Path) -> None:
    backend = train_byte_level(gpt2_words())
    template = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(), template])
    config = CONFIG | {"add_bos_token": True, "add_eos_token": True}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend, tokenizer_config=config))
    plain = tokenizer.encode("the dog", add_special=False)
    assert tokenizer.encode("the dog") == [1, *plain]


@pytest.mark.parametrize(("flag", "expected"), [(True, [0]), (False, []), (None, [])])
def test_bos_from_the_config_where_no_post_processor_decides(tmp_path: Path, flag: bool | None, expected: list) -> None:
    backend = train_byte_level(gpt2_words())
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer = Tokenizer.from_folder(
        write_folder(tmp_path, backend, tokenizer_config=CONFIG | {"add_bos_token": flag, "add_eos_token": flag})
    )
    plain = tokenizer.encode("the dog", add_special=False)
    assert tokenizer.encode("the dog") == [*expected, *plain, *([2] if flag else [])]


def test_sentencepiece_folder_decodes_as_the_library(tmp_path: Path) -> None:
    backend = sentencepiece_backend()
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend, special_tokens_map={"bos_token": "<s>"}))
    for text in ["the dog", " the  dog", "in the 漢\n\t🎉 end", ""]:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids
        assert tokenizer.decode(ids) == backend.decode(ids) == text
        assert tokenizer.decode([1, *ids]) == text
    assert tokenizer.decode([1, *tokenizer.encode("the")], skip_special=False) == "<s> the"
    assert tokenizer.token_bytes(3 + 0xE2) == b"\xe2"
    assert tokenizer.bos_id == 1


def test_without_strip_the_leading_space_stays(tmp_path: Path) -> None:
    backend = sentencepiece_backend()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("the dog")) == " the dog"


def test_opaque_vocabulary_decodes_as_the_library(tmp_path: Path) -> None:
    backend = word_piece_backend()
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend))
    ids = tokenizer.encode("[CLS] the dogs play. don't")
    assert tokenizer.decode(ids) == backend.decode(ids) == "the dogs play. don ' t"


def test_chat_template_places(tmp_path: Path) -> None:
    backend = train_byte_level(gpt2_words())
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    for config, expected in [({}, None), ({"chat_template": "plain"}, "plain"), ({"chat_template": named}, "named")]:
        folder = write_folder(tmp_path, backend, tokenizer_config=config)
        assert Tokenizer.from_folder(folder).chat_template == expected
    (folder / "chat_template.jinja").write_text("from the file ü", encoding="utf-8")
    assert Tokenizer.from_folder(folder).chat_template == "from the file ü"


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("tokenizer.json", None, "no_tokenizer"),
        ("tokenizer.json", '{"model": {', "bad_tokenizer"),
        ("tokenizer.json", "{}", "bad_tokenizer"),
        ("tokenizer_config.json", "[1, 2]", "bad_tokenizer"),
        ("tokenizer_config.json", "not json", "bad_tokenizer"),
        ("special_tokens_map.json", "\xff", "bad_tokenizer"),
    ],
)
def test_bad_folders_are_one_clear_line(tmp_path: Path, name: str, content: str | None, code: str) -> None:
    folder = write_folder(tmp_path, train_byte_level(gpt2_words(), vocab_size=270))
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(QuireError) as caught:
        Tokenizer.from_folder(folder)
    assert caught.value.code == code
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_half_a_surrogate_pair_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(QuireError, match="surrogate"):
        byte_level.encode(json.loads('"a\\ud800"'))


def test_ids_containing_reads_bytes(byte_level: Tokenizer) -> None:
    found = byte_level.ids_containing("\n")
    assert found == byte_level.ids_containing("\n")
    assert set(found) == {i for i in range(byte_level.vocab_size) if b"\n" in byte_level.token_bytes(i)}
    assert found and byte_level.ids_containing("no token is this long") == ()


def test_threads_may_share_it(byte_level: Tokenizer) -> None:
    expected = [byte_level.encode(text) for text in TEXTS]
    failures: list[str] = []

    def work() -> None:
        for _ in range(10):
            for text, ids in zip(TEXTS, expected, strict=True):
                if byte_level.encode(text) != ids or byte_level.decode(ids, skip_special=False) != text:
                    failures.append(text)
            byte_level.ids_containing("e")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("text", ["e", "el", "ll", "\n", " w", "lo wo"])
def test_ids_containing_finds_what_a_look_at_every_token_finds(byte_level: Tokenizer, text: str) -> None:
    tokens = [byte_level.token_bytes(token_id) for token_id in range(byte_level.vocab_size)]
    assert byte_level.ids_containing(text) == tuple(i for i, own in enumerate(tokens) if text.encode() in own)
    assert byte_level.longest_token == max(map(len, tokens))
