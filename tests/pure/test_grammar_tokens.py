"""Text that a grammar forces has the tokens of the model, whatever its kind of tokenizer; what can not be written so is
written in other tokens, byte for byte."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.engine.grammar.canonical_tokens import LONG_BYTES, CanonicalTokens
from quire.engine.grammar.matcher import GrammarCompiler, MaskFiller
from quire.files.gguf import open_gguf
from quire.text.tokenizer import Tokenizer
from quire.types import GrammarSpec, Plan, PlanRow, Request, SamplingParams
from tests.pure.test_text_support import (
    gguf_of,
    gpt2_words,
    sentencepiece_backend,
    sentencepiece_metadata,
    smollm2_file,
    smollm_words,
    train_byte_level,
    word_piece_backend,
    write_folder,
)

MADE: dict[str, Callable[[Path], Tokenizer]] = {
    "folder, byte level": lambda path: Tokenizer.from_folder(write_folder(path, train_byte_level(gpt2_words()))),
    "folder, SentencePiece": lambda path: Tokenizer.from_folder(write_folder(path, sentencepiece_backend())),
    "GGUF, byte level": lambda path: Tokenizer.from_gguf(gguf_of(train_byte_level(smollm_words()), "smollm")),
    "GGUF, SentencePiece": lambda path: Tokenizer.from_gguf(sentencepiece_metadata()),
}


def tokens_of(tokenizer: Tokenizer) -> list[bytes]:
    return [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]


def specials_of(tokenizer: Tokenizer) -> list[int]:
    return [token_id for token_id in range(tokenizer.vocab_size) if tokenizer.is_special(token_id)]


def compiler_of(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(
        tokens_of(tokenizer),
        tokenizer.eos_ids or (2,),
        special_ids=specials_of(tokenizer),
        encode=tokenizer.encode_inside,
    )


def allowed(mask: bytes) -> list[int]:
    return [8 * place + bit for place, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]


def written(compiler: GrammarCompiler, spec: GrammarSpec, pick: Callable[[list[int]], int]) -> list[int]:
    """The ids a model writes under this grammar until it may end, if it chooses with `pick`."""
    grammar, ids = compiler.compile(spec), []
    while True:
        found = allowed(grammar.mask(ids))
        assert found and grammar.error is None, (ids, grammar.error)
        if grammar.accepts_end:
            return ids
        ids.append(pick(found))


@pytest.mark.parametrize("kind", MADE)
def test_forced_text_has_the_tokens_of_the_tokenizer(kind: str, tmp_path: Path) -> None:
    tokenizer = MADE[kind](tmp_path)
    compiler = compiler_of(tokenizer)
    for text in ("the dog and the other dog", " the dog", "x the", "漢é the dog", "12 the\n dog", "a🎉 the"):
        ids = written(compiler, GrammarSpec.choice(text), lambda found: found[0])
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        assert ids == tokenizer.encode_inside(text), text
    compiler.close()


def test_the_example_takes_eight_tokens_at_most() -> None:
    tokenizer = Tokenizer.from_gguf(open_gguf(smollm2_file()).metadata)
    compiler = compiler_of(tokenizer)
    spec = GrammarSpec.regex(r"The capital of France is (Paris|Berlin)\.")
    paris = tokenizer.encode_inside(" Paris")[0]
    ids = written(compiler, spec, lambda found: paris if paris in found else found[0])
    assert tokenizer.decode(ids) == "The capital of France is Paris."
    assert len(ids) <= 8, [tokenizer.token_bytes(token_id) for token_id in ids]
    compiler.close()


@pytest.mark.parametrize("kind", MADE)
def test_half_characters_and_special_spellings_are_written_byte_for_byte(kind: str, tmp_path: Path) -> None:
    tokenizer = MADE[kind](tmp_path)
    tokens, special = tokens_of(tokenizer), set(specials_of(tokenizer))
    write = CanonicalTokens(tokens, special, tokenizer.encode_inside)
    cases = [
        "é".encode()[:1],
        "the 漢".encode()[:-1],
        "🎉".encode()[1:],
        b"the \xff dog",
        b"<|im_end|> the",
        b"</s>the",
        b"",
    ]
    for raw in cases:
        ids = write(raw)
        assert b"".join(tokens[token_id] for token_id in ids) == raw and not special & set(ids), raw
    compiler = compiler_of(tokenizer)
    for text in ("é|è", "漢|字|é", "<|im_end|>", "</s> the"):
        spec, seen = GrammarSpec.choice(*text.split("|") if "<" not in text else [text]), set()
        for seed in range(40):
            ids = written(compiler, spec, random.Random(seed).choice)
            assert not special & set(ids)
            seen.add(b"".join(map(tokenizer.token_bytes, ids)).decode())
        assert seen == ({text} if "<" in text else set(text.split("|")))
    compiler.close()


def test_a_vocabulary_only_the_library_can_join_is_written_with_the_longest_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, word_piece_backend()))
    write = CanonicalTokens(tokens_of(tokenizer), specials_of(tokenizer), tokenizer.encode_inside)
    assert [tokenizer.token_bytes(token_id) for token_id in write("thedon")] == [b"the", b"don"]


def test_any_bytes_come_back_from_their_tokens(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    made = [make(tmp_path / str(place)) for place, make in enumerate(MADE.values())]
    parts = [" ", "  ", "\n", "the", "dog", '{"', "é", "漢", "🎉", "<s>", "<|im_end|>", "e\u0301", "\x00"]
    for tokenizer in made:
        tokens, special = tokens_of(tokenizer), set(specials_of(tokenizer))
        write = CanonicalTokens(tokens, special, tokenizer.encode_inside)
        for _ in range(150):
            raw = "".join(rng.choices(parts, k=rng.randrange(12))).encode()
            raw = raw[rng.randrange(3) : len(raw) - rng.randrange(3)]
            ids = write(raw)
            assert b"".join(tokens[token_id] for token_id in ids) == raw and not special & set(ids)


def test_a_long_text_is_encoded_once_and_not_at_every_step(tmp_path: Path) -> None:
    tokenizer = MADE["folder, byte level"](tmp_path)
    encoded: list[int] = []

    def encode(text: str) -> list[int]:
        encoded.append(len(text))
        return tokenizer.encode_inside(text)

    compiler = GrammarCompiler(tokens_of(tokenizer), (2,), special_ids=specials_of(tokenizer), encode=encode)
    text = "the dog and " * 400
    written(compiler, GrammarSpec.choice(text), lambda found: found[0])
    longest = [size for size in encoded if size > LONG_BYTES]
    assert len(longest) <= 3, f"{len(longest)} texts of {sum(longest)} characters were encoded"
    compiler.close()


def test_forced_text_in_the_threads_of_the_library(tmp_path: Path) -> None:
    """A batch is filled by threads that are not Python's, and each of them asks the tokenizer."""
    compiler = compiler_of(MADE["GGUF, byte level"](tmp_path))
    requests, plan = {}, Plan(1)
    for index in range(12):
        request = Request(f"r{index}", [9], 1, SamplingParams(), 100)
        schema = {"type": "object", "properties": {f"the dog {index}": {"const": "and the other"}}}
        schema |= {"required": [f"the dog {index}"], "additionalProperties": False}
        request.grammar = compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
        requests[request.id] = request
        plan.rows.append(PlanRow(request.id, index, 0, 1, 0, True))
    fill = MaskFiller(num_threads=4)
    for _ in range(6):
        for index, mask in fill(plan, requests).items():
            requests[f"r{index}"].tokens.append(allowed(mask)[0])
    assert all(request.grammar.error is None for request in requests.values())
    compiler.close()
