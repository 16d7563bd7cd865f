"""Builds a `Tokenizer` from a GGUF file's own `tokenizer.*` metadata: vocabulary, merges or scores, types and flags.

Called through `Tokenizer.from_gguf`. Three kinds are known: `gpt2` (byte-level BPE with ranked merges), `llama`
(SentencePiece BPE, whose merges follow from the scores) and `gemma4` (ranked merges of SentencePiece's pieces). All
metadata is validated before use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from quire.text.pieces import SPACE_MARK, PieceRule
from quire.text.pretokenizers import pre_tokenizer_named
from quire.text.tokenizer import Tokenizer, TokenizerVocabulary
from quire.types import QuireError

MAX_PIECE_CHARS = 256  # merges build no longer piece; pieces of real models stay far below


class TokenType(IntEnum):
    """Types of tokens in a GGUF vocabulary."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Control tokens that end a turn or a text, independent of the file's keys: GGUF has one EOS id only, and many files
# name the end of text there while the model emits the end of turn, or vice versa.
_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
)
_NAMED_IDS = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}
_SENTENCEPIECE_IDS = {"unk": 0, "bos": 1, "eos": 2}  # defaults of `llama` files


@dataclass(frozen=True, slots=True)
class _Source:
    """Validated metadata: lists of one length, ids within them."""

    metadata: Mapping[str, object]
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]  # subset of "bos", "eos", "eot", "eom", "unk", "pad"

    @classmethod
    def read(cls, metadata: Mapping[str, object], default_ids: Mapping[str, int]) -> _Source:
        tokens = _list_of(metadata, "tokens", str)
        types = [TokenType.NORMAL.value] * len(tokens)
        if "tokenizer.ggml.token_type" in metadata:
            types = [*_list_of(metadata, "token_type", int, len(tokens))]
        ids = {}
        for name, key in _NAMED_IDS.items():
            token_id = metadata.get(f"tokenizer.ggml.{key}_token_id", default_ids.get(name))
            if token_id is None:
                continue
            if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
                raise _bad(f"{key}_token_id is {token_id!r}, but there are {len(tokens)} tokens")
            ids[name] = token_id
        for name in ("bos", "eos", "eot", "eom"):  # some converters forget to mark them
            if name in ids and types[ids[name]] in (TokenType.NORMAL, TokenType.USER_DEFINED):
                types[ids[name]] = TokenType.CONTROL.value
        return cls(metadata, tokens, types, ids)

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.metadata.get(f"tokenizer.ggml.{name}", default))

    def ids_of(self, *types: TokenType) -> list[int]:
        return [token_id for token_id, kind in enumerate(self.types) if kind in types]

    def vocabulary(self, rule: PieceRule, *, adds_bos: bool) -> TokenizerVocabulary:
        bos, eos = self.ids.get("bos"), self.ids.get("eos")
        template = self.metadata.get("tokenizer.chat_template")
        special = self.ids_of(TokenType.CONTROL, TokenType.UNKNOWN)
        return TokenizerVocabulary(
            size=len(self.tokens),
            rule=rule,
            token_text=self.tokens.__getitem__,
            special_ids=frozenset(special),
            added_ids=frozenset([*special, *self.ids_of(TokenType.USER_DEFINED)]),
            bos_id=bos,
            eos_ids=self._turn_ends(),
            special_tokens={f"{name}_token": self.tokens[token_id] for name, token_id in self.ids.items()},
            chat_template=template if isinstance(template, str) and template else None,
            prefix_ids=(bos,) if bos is not None and self.flag("add_bos_token", adds_bos) else (),
            suffix_ids=(eos,) if eos is not None and self.flag("add_eos_token", False) else (),
        )

    def _turn_ends(self) -> tuple[int, ...]:
        control = {self.tokens[token_id]: token_id for token_id in self.ids_of(TokenType.CONTROL)}
        named = [self.ids[name] for name in ("eos", "eot", "eom") if name in self.ids]
        if "<|return|>" in control:  # in this format <|end|> closes one of several messages of a turn
            control.pop("<|end|>", None)
        return tuple(dict.fromkeys([*named, *(control[text] for text in _TURN_ENDS if text in control)]))


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        return _byte_level(_Source.read(metadata, {}))
    if model == "llama":
        return _sentencepiece(_Source.read(metadata, _SENTENCEPIECE_IDS))
    if model == "gemma4":
        return _ranked_pieces(_Source.read(metadata, {}))
    if model is None:
        raise _bad("it has no tokenizer.ggml.model")
    raise QuireError(
        "unsupported_tokenizer",
        f"The GGUF's tokenizer model {model!r} is not known; gpt2, llama and gemma4 are.",
        "Use the model's folder with its tokenizer.json instead.",
    )


def _byte_level(source: _Source) -> Tokenizer:
    from tokenizers import models

    pre = pre_tokenizer_named(str(source.metadata.get("tokenizer.ggml.pre") or "default"))
    vocab = _vocab(source)
    model = models.BPE(vocab=vocab, merges=_ranked_merges(source, vocab), ignore_merges=pre.ignore_merges)
    backend = _backend(model, source)
    normalizer, backend.pre_tokenizer = pre.build()
    if normalizer is not None:
        backend.normalizer = normalizer
    return Tokenizer(backend, source.vocabulary(PieceRule("byte_level"), adds_bos=pre.adds_bos))


def _sentencepiece(source: _Source) -> Tokenizer:
    from tokenizers import models, normalizers

    scores = _list_of(source.metadata, "scores", float, len(source.tokens))
    unknown = source.tokens[source.ids["unk"]] if source.tokens else None
    model = models.BPE(
        vocab=_vocab(source),
        merges=merges_by_score(source.tokens, scores, source.ids_of(TokenType.NORMAL)),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = _backend(model, source)
    prefix = source.flag("add_space_prefix", True)
    # The prefix precedes each stretch of plain text, also after a special token, even if the text begins with a space.
    steps = [normalizers.Prepend(SPACE_MARK)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])
    return Tokenizer(backend, source.vocabulary(PieceRule("sentencepiece", strip_space=prefix), adds_bos=True))


def _ranked_pieces(source: _Source) -> Tokenizer:
    from tokenizers import Regex, models, normalizers, pre_tokenizers

    vocab = _vocab(source)
    unknown = source.tokens[source.ids["unk"]] if "unk" in source.ids else None
    merges = _ranked_merges(source, vocab)
    backend = _backend(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True), source
    )
    backend.normalizer = normalizers.Replace(" ", SPACE_MARK)
    # No piece contains a line break and other text, so the text between line breaks is merged and cached separately.
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    return Tokenizer(backend, source.vocabulary(PieceRule("sentencepiece", strip_space=False), adds_bos=True))


def _ranked_merges(source: _Source, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for line in _list_of(source.metadata, "merges", str):
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 1 or not right:
            raise _bad(f"its merge {line[:100]!r} is no pair of tokens")
        # A part may be an added token's text, which is matched before merging; such a merge has no effect.
        if left in vocab and right in vocab and left + right in vocab:
            merges.append((left, right))
    return merges


def merges_by_score(tokens: list[str], scores: list[float], usable_ids: list[int]) -> list[tuple[str, str]]:
    """Ranked merges equivalent to SentencePiece's scores, which join the neighbours with the best joint piece: every
    split of a piece into two pieces, best piece first."""
    usable = {tokens[token_id] for token_id in usable_ids}
    merges = []
    for token_id in sorted(usable_ids, key=lambda token_id: -scores[token_id]):
        piece = tokens[token_id]
        if len(piece) > MAX_PIECE_CHARS:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in usable and right in usable:
                merges.append((left, right))
    return merges


def _vocab(source: _Source) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(source.tokens) if token}


def _backend(model: Any, source: _Source) -> Any:
    """A backend that matches control and user-defined tokens before normalization and merging."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    backend = Backend(model)
    for is_special, ids in (
        (True, source.ids_of(TokenType.CONTROL, TokenType.UNKNOWN)),
        (False, source.ids_of(TokenType.USER_DEFINED)),
    ):
        texts = [source.tokens[token_id] for token_id in ids if source.tokens[token_id]]
        backend.add_tokens([AddedToken(text, normalized=False, special=is_special) for text in texts])
    return backend


def _list_of(metadata: Mapping[str, object], name: str, kind: type, expected_len: int | None = None) -> list[Any]:
    items = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(items, list) or not items:
        raise _bad(f"it has no tokenizer.ggml.{name}")
    if expected_len is not None and len(items) != expected_len:
        raise _bad(f"it has {len(items)} entries in {name} for {expected_len} tokens")
    accepted = (int, float) if kind is float else kind
    wrong = next((item for item in items if not isinstance(item, accepted)), None)
    if wrong is not None:
        raise _bad(f"tokenizer.ggml.{name} holds {str(wrong)[:100]!r}")
    return items


def _bad(why: str) -> QuireError:
    return QuireError("bad_gguf", f"The GGUF's tokenizer can't be used: {why}.", "Fetch or convert it again.")
