"""Patterns by which byte-level vocabularies split text into words before merging, by the name in `tokenizer.ggml.pre`.

Called by `gguf_tokenizer`. A GGUF file holds only the name, so the patterns of the models' own tokenizers stand here. A
wrong pattern still round-trips but gives tokens that the model has not been trained on, so an unknown name is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.types import QuireError

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
)  # combining marks stay with their letters
_SEED = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES
_EXAONE_MOE = (  # letters separated by single spaces form one word
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(suffix: str, digits: str) -> str:
    """Words split where lower case turns to upper case, as Tekken and GPT-4o do."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


# Letters of the cased scripts, as the first DeepSeek tokenizer lists them.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Split patterns. Each one splits the pieces of the one before; matches and gaps both become pieces."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word in the vocabulary is taken without merging
    adds_bos: bool = False  # default for files without the flag
    nfc: bool = False  # the model's tokenizer normalizes to NFC first

    def build(self) -> tuple[Any, Any]:
        """The `tokenizers` components: (normalizer or None, pre-tokenizer)."""
        from tokenizers import Regex, normalizers, pre_tokenizers

        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return normalizers.NFC() if self.nfc else None, pre_tokenizers.Sequence([*splits, spell])


_FALCON_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|%s]+"
_KINDS: tuple[tuple[str, PreTokenizer], ...] = (
    # The default of the format's reference reader for files without a name.
    ("default", PreTokenizer((_FALCON_PUNCTUATION % "", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    (
        "gpt-2 phi-2 olmo mpt jais gigachat mellum modern-bert exaone4 trillion granite-docling",
        PreTokenizer((_GPT2,)),
    ),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b", PreTokenizer((r"\p{N}", _GPT2))),
    ("falcon", PreTokenizer((_FALCON_PUNCTUATION % "`", _GPT2, "[0-9][0-9][0-9]"))),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer((_WORDS % r"\p{N}{1,3}",), ignore_merges=True, adds_bos=True),
    ),
    ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer((_WORDS % r"\p{N}{1,3}",))),
    ("qwen2", PreTokenizer((_WORDS % r"\p{N}",), nfc=True)),
    ("deepseek-r1-qwen megrez stablelm2 hunyuan solar-open grok-2", PreTokenizer((_WORDS % r"\p{N}",))),
    ("qwen35", PreTokenizer((_QWEN35,), nfc=True)),
    ("seed-coder", PreTokenizer((_SEED,))),
    ("exaone-moe", PreTokenizer((_EXAONE_MOE,))),
    ("tekken mistral", PreTokenizer((_cased("", r"\p{N}"),), ignore_merges=True, adds_bos=True)),
    ("gpt-4o llama4 minimax-m2", PreTokenizer((_cased(_CONTRACTION + "?", r"\p{N}{1,3}"),))),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                _DEEPSEEK_HAN,
                r"\p{N}+",
            )
        ),
    ),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, r"\p{N}"))),
    (
        "deepseek-v3 hunyuan-dense",
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
                r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
                r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
            )
        ),
    ),
)
_BY_NAME = {name: kind for names, kind in _KINDS for name in names.split()}


def pre_tokenizer_names() -> list[str]:
    """Returns the usual name of each kind of pre-tokenizer."""
    return [names.split()[0] for names, _ in _KINDS]


def pre_tokenizer_named(name: str) -> PreTokenizer:
    if name not in _BY_NAME:
        raise QuireError(
            "unsupported_tokenizer",
            f"The GGUF's pre-tokenizer {name!r} is not known.",
            f"Use the model's folder with its tokenizer.json instead; known here: {', '.join(sorted(_BY_NAME))}.",
        )
    return _BY_NAME[name]
