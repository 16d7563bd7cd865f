"""Small tokenizers for the text tests: trained here, as Hugging Face folders and as GGUF metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from quire.files.builtin import BUILT_IN
from quire.files.store import cache_dir

CORPUS = [
    "the quick brown fox jumps over the lazy dog and the other dog",
    "numbers 1 12 123 2024 and 3.14159, don't I'm we'll",
    "def main():\n    return [x for x in range(10)]\n\n\n    # done  now",
    "Größe, naïve café, 漢字 かな, привет мир, 🎉🎉 emoji",
    "the the the and and in in on on er er re re  7  77  a 1 b 2",
] * 4
TEXTS = [
    "", " ", "  ", "the dog", " the dog", "a  1", "\n\n7", "1234567890", "don't I'M", "x=[1, 2]\n\n    y",
    "café 漢字🎉", "tab\t\tend ",
    "<|im_start|>user\nhi<|im_end|>\n", "\u0301e\u0301 x", "½ ²", "the\r\n\r\nend  \n ",
]  # fmt: skip
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def train_byte_level(pre_tokenizer: Any, vocab_size: int = 420) -> Tokenizer:
    """A byte-level BPE whose first ids are SPECIALS."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def gpt2_words() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def smollm_words() -> Any:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def gguf_of(backend: Tokenizer, pre_name: str, /, **changes: Any) -> dict[str, Any]:
    """The metadata a converter would write for a byte-level tokenizer. A change to None leaves the key out."""
    parts = json.loads(backend.to_str())
    by_id = {token_id: token for token, token_id in backend.get_vocab().items()}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_name,
        "tokenizer.ggml.tokens": [by_id[token_id] for token_id in range(len(by_id))],
        "tokenizer.ggml.token_type": [3 if by_id[i] in SPECIALS else 1 for i in range(len(by_id))],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in parts["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


PIECES = ["▁", "▁t", "he", "▁the", "▁th", "in", "▁in", "er", "▁▁", "▁▁▁▁", "▁d", "og", "▁dog", "th", "an", "nd", "and"]
LETTERS = "thedogxinraé,.漢"


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """A hand-made SentencePiece vocabulary: unk, BOS, EOS, all bytes, pieces by falling score, single letters."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES[1:]]
    tokens += ["▁", *LETTERS, "<tool>", "\n\n", "[PAD]"]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 262) + [3, 4, 5]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def sentencepiece_backend() -> Tokenizer:
    """The same kind of vocabulary as Hugging Face writes it for Llama 2."""
    vocab = {token: index for index, token in enumerate(sentencepiece_metadata()["tokenizer.ggml.tokens"][:-3])}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n"), ("▁", "in"), ("▁", "▁"), ("▁▁", "▁▁"), ("▁", "d")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ("<unk>", "<s>", "</s>")])
    return backend


def word_piece_backend() -> Tokenizer:
    """A vocabulary whose tokens only the library can join to text."""
    words = ["[UNK]", "[CLS]", "the", "dog", "##s", "##es", ".", "don", "'", "t", "play", "##ing"]
    backend = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken("[CLS]", special=True)])
    return backend


def write_folder(folder: Path, backend: Tokenizer, **files: Any) -> Path:
    """tokenizer.json and others beside it: `tokenizer_config={...}` becomes tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def smollm2_file() -> Path:
    """The real model's file if it has been fetched, else the test is skipped."""
    path = cache_dir() / "builtin" / BUILT_IN["smollm2"].file
    if not path.is_file():
        pytest.skip("smollm2 is not in the cache; `quire pull smollm2` fetches it")
    return path
