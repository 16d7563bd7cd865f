"""Sampling parameters and grammar specifications of a request.

Construction validates every value, so code behind the front ends does not check them again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from quire.types.errors import QuireError
from quire.types.pooling import POOLINGS

MAX_LOGPROBS = 64
MAX_N = 128
MAX_STOPS = 64
MAX_BIASED = 4096
MAX_BAD_WORDS = 1024
MAX_BIAS = 10_000.0  # magnitude: far beyond any logit, and far below the limit of float32
MAX_TEXT = 4096  # characters of one stop string, bad word or sequence breaker


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint on a request's output.

    `value` is a JSON schema, a regular expression, a JSON list of choices, a grammar's text, or a structural tag as
    JSON, depending on `kind`.
    `json_object` needs no value. `free` constrains nothing and exists for its reasoning budget. A part of a schema that
    cannot be enforced is refused by keyword and place with `strict`, and dropped without.

    The constraint begins after the tokens `after_reasoning`, or with the first token where these are empty. With
    `opens_reasoning` the model may also answer directly: it reasons only if it writes that marker first.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "ebnf", "structural_tag", "free"]
    value: str = ""
    after_reasoning: tuple[int, ...] = ()  # the marker that ends reasoning
    budget: int | None = None  # reasoning tokens after which the end marker is forced
    opens_reasoning: tuple[int, ...] = ()  # the marker that begins reasoning; empty if the prompt holds it
    strict: bool = True
    warnings: tuple[str, ...] = ()  # parts of the schema that are not enforced, if a front end has checked

    @classmethod
    def json(cls, schema: Mapping[str, Any] | None = None, *, strict: bool = True) -> GrammarSpec:
        """Return a spec for JSON that conforms to the schema, or for any object without one."""
        if schema is None:
            return cls("json_object")
        try:
            return cls("json_schema", json.dumps(schema, allow_nan=False), strict=strict)
        except (TypeError, ValueError, RecursionError) as error:
            raise QuireError(
                "invalid_schema", f"The schema can't be written as JSON: {error}.", "Correct it."
            ) from None

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        return cls("regex", pattern)

    @classmethod
    def choice(cls, *texts: str) -> GrammarSpec:
        """Return a spec that allows exactly these texts."""
        return cls("choice", json.dumps(texts))

    @classmethod
    def ebnf(cls, grammar: str) -> GrammarSpec:
        """Return a spec for a grammar in Lark's notation with the start rule `start`."""
        return cls("ebnf", grammar)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are sampled. `None` stands for the model's own default, which `resolve` fills in."""

    temperature: float | None = None  # 0: greedy
    top_k: int | None = None  # 0: off
    top_p: float | None = None  # 1: off
    min_p: float | None = None  # 0: off
    top_n_sigma: float = 0.0  # 0: off
    repetition_penalty: float | None = None  # 1: off; counts prompt and output
    presence_penalty: float = 0.0  # counts output only
    frequency_penalty: float = 0.0  # counts output only
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_len: int = 2
    dry_range: int = 0  # number of last tokens searched; 0: all
    dry_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None  # None: the rest of the context
    min_tokens: int = 0
    n: int = 1
    seed: int | None = None  # None: drawn at random by the front end
    logprobs: int | None = None  # number of alternatives beside the sampled token
    prompt_logprobs: int | None = None
    pooling: str | None = None  # mean or last: return the prompt's hidden states as one vector (embeddings)
    skip_special_tokens: bool = True
    grammar: GrammarSpec | None = None  # the constraint on the output
    adapter: str | None = None  # name of a loaded LoRA adapter; None: the base model
    speculate: bool = True  # False: no drafts for this request; its tokens are the same
    prediction: str | None = None  # a text that the output is expected to resemble, which makes drafts
    # Token ids of the prediction, bad_words and dry_breakers, filled in by the front end, which has the tokenizer.
    prediction_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    dry_breaker_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        freeze = object.__setattr__
        if isinstance(self.stop, str):
            freeze(self, "stop", (self.stop,))
        if isinstance(self.logit_bias, dict):
            freeze(self, "logit_bias", tuple((int(k), float(v)) for k, v in self.logit_bias.items()))
        for name in ("stop", "stop_token_ids", "bad_words", "dry_breakers"):
            freeze(self, name, tuple(getattr(self, name)))
        for name, low, high, why in _FLOAT_BOUNDS:
            _check_number(name, getattr(self, name), low, high, why)
        for name, low, high in _INT_BOUNDS:
            _check_int(name, getattr(self, name), low, high)
        if self.grammar is not None and not isinstance(self.grammar, GrammarSpec):
            raise _bad("grammar", self.grammar, "must be a GrammarSpec, for instance GrammarSpec.json(schema)")
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise _bad("pooling", self.pooling, "must be mean or last")
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise _bad("adapter", self.adapter, "must be the name of an adapter")
        if self.prediction is not None and not isinstance(self.prediction, str):
            raise _bad("prediction", self.prediction, "must be a string")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", self.min_tokens, f"is larger than max_tokens={self.max_tokens}")
        for name, limit in (
            ("stop", MAX_STOPS),
            ("stop_token_ids", MAX_STOPS),
            ("bad_words", MAX_BAD_WORDS),
            ("dry_breakers", MAX_STOPS),
            ("logit_bias", MAX_BIASED),
        ):
            if len(getattr(self, name)) > limit:
                raise _bad(name, f"{len(getattr(self, name))} entries", f"may have at most {limit}")
        for name in ("stop", "bad_words", "dry_breakers"):
            for text in getattr(self, name):
                if not isinstance(text, str) or not text or len(text) > MAX_TEXT:
                    raise _bad(name, text, f"must hold non-empty strings of at most {MAX_TEXT} characters")
        for _, value in self.logit_bias:
            if value != -math.inf and not -MAX_BIAS <= value <= MAX_BIAS:  # also catches NaN
                why = f"must lie between -{MAX_BIAS:g} and {MAX_BIAS:g}, or be -inf to forbid a token"
                raise _bad("logit_bias", value, why)

    def resolve(self, defaults: dict[str, Any] | None = None) -> SamplingParams:
        """Return a copy with every `None` replaced by the model's default, or else by the neutral value."""
        known = {**_NEUTRAL, **{k: v for k, v in (defaults or {}).items() if k in _NEUTRAL and v is not None}}
        return replace(self, **{k: v for k, v in known.items() if getattr(self, k) is None})

    def of_sample(self, index: int) -> SamplingParams:
        """Return the parameters of sample `index` of a prompt; only sample 0 returns prompt logprobs."""
        return replace(self, prompt_logprobs=None) if index and self.prompt_logprobs is not None else self

    @property
    def needs_whole_prompt(self) -> bool:
        """True if every position of the prompt must be computed for this request, so prefix hits are unusable."""
        return self.prompt_logprobs is not None or self.pooling is not None

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]


_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
_FLOAT_BOUNDS = (
    ("temperature", 0.0, 100.0, "0 is greedy"),
    ("top_p", 0.0, 1.0, "1 switches it off"),
    ("min_p", 0.0, 1.0, "0 switches it off"),
    ("top_n_sigma", 0.0, 1e6, "0 switches it off"),
    ("repetition_penalty", 1e-3, 100.0, "1 switches it off"),  # a logit divided by less may leave float32
    ("presence_penalty", -100.0, 100.0, "0 switches it off"),
    ("frequency_penalty", -100.0, 100.0, "0 switches it off"),
    ("dry_multiplier", 0.0, 100.0, "0 switches it off"),
    ("dry_base", 1.0, 100.0, "usually 1.75"),
)
_INT_BOUNDS = (
    ("top_k", 0, 1 << 31),
    ("dry_allowed_len", 1, 1 << 20),
    ("dry_range", 0, 1 << 31),
    ("max_tokens", 1, 1 << 31),
    ("min_tokens", 0, 1 << 31),
    ("n", 1, MAX_N),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("seed", -(1 << 63), (1 << 63) - 1),
)


def _bad(name: str, value: object, why: str) -> QuireError:
    shown = repr(value if not isinstance(value, str) else value[:101])
    shown = shown if len(shown) <= 100 else f"{shown[:97]}..."
    return QuireError("invalid_parameter", f"{name}={shown} {why}.", param=name)


def _check_number(name: str, value: Any, low: float, high: float, why: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _bad(name, value, "must be a number")
    if not low <= value <= high:  # also catches NaN
        raise _bad(name, value, f"must lie between {low:g} and {high:g} ({why})")


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad(name, value, "must be a whole number")
    if not low <= value <= high:
        raise _bad(name, value, f"must lie between {low} and {high}")
