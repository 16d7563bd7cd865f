"""Fill-in-the-middle prompts: the control tokens with which a model marks what stands before and after a gap.

The tokens are found in the model's vocabulary by their known spellings; a model without them can't fill gaps.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.text.tokenizer import Tokenizer
from quire.types import QuireError


@dataclass(frozen=True, slots=True)
class InfillMarkers:
    """Spellings of one family's tokens. `suffix_first`: the suffix is written before the prefix, as Codestral does."""

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False


KNOWN = (
    InfillMarkers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen coder, Codegemma, Seed
    InfillMarkers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite code
    InfillMarkers("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillMarkers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek coder
    InfillMarkers("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    InfillMarkers("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    InfillMarkers("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)
# Tokens that end a filled gap, where the model has them.
ENDS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<file_sep>", "<|endoftext|>", "▁<EOT>", "<EOT>")


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The tokens of one model, by id."""

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    ends: tuple[int, ...]

    def join(self, before: list[int], after: list[int]) -> list[int]:
        """The prompt for the gap between two encoded texts."""
        parts = [[self.prefix, *before], [self.suffix, *after]]
        if self.suffix_first:
            parts.reverse()
        return [*parts[0], *parts[1], *(() if self.middle is None else (self.middle,))]


def find_infill(tokenizer: Tokenizer) -> InfillTokens:
    """The model's tokens. Raises `QuireError` for a model that has none."""
    for known in KNOWN:
        found = [_token(tokenizer, text) for text in (known.prefix, known.suffix, known.middle) if text]
        if None not in found:
            prefix, suffix, *middle = (token for token in found if token is not None)
            markers = {prefix, suffix, *middle}
            ends = {_token(tokenizer, text) for text in ENDS} - {None}
            stops = tuple(sorted(markers | {token for token in ends if token is not None}))
            return InfillTokens(prefix, suffix, middle[0] if middle else None, known.suffix_first, stops)
    what = "This model has no fill-in-the-middle tokens, so it can't write between two texts."
    raise QuireError("unsupported_parameter", what, "Use a code model that has them, such as Qwen2.5-Coder.", "suffix")


def _token(tokenizer: Tokenizer, spelling: str) -> int | None:
    ids = tokenizer.encode(spelling, add_special=False)
    return ids[0] if len(ids) == 1 else None
