"""The plain data every room shares: requests, sampling parameters, cache specs, plans, outputs and errors.

Nothing here imports torch, holds a lock or knows where it runs; every type that crosses a process boundary is made of
numbers, strings, tuples and lists. The scheduler fills these in, the runtime reads them, the front ends show them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Literal

import msgspec

# ---------------------------------------------------------------------------------------------------------------------
# Errors


class QuireError(Exception):
    """What happened, why, and what to do, in one line. `code` is for machines: a front end maps it to a status."""

    def __init__(self, code: str, what: str, hint: str = "", param: str | None = None):
        super().__init__(what)
        self.code = code
        self.what = what
        self.hint = hint
        self.param = param

    def __str__(self) -> str:
        return f"{self.what} {self.hint}".strip()


class FinishReason(str, Enum):
    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the model's context
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


# ---------------------------------------------------------------------------------------------------------------------
# Grammars


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What a request's output must look like. `value`: a JSON schema, a regular expression, a JSON list of choices or a
    grammar's text, by kind; `json_object` needs none, `free` binds nothing (it is there for its budget).

    It binds after the tokens `after_reasoning` have been written, from the first token where there are none. With
    `opens_reasoning` the model may also answer at once: only if it writes that marker first, it reasons."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "ebnf", "free"]
    value: str = ""
    after_reasoning: tuple[int, ...] = ()  # the marker that ends reasoning
    budget: int | None = None  # after so many tokens of reasoning its end marker is forced
    opens_reasoning: tuple[int, ...] = ()  # the marker that begins it; empty: the prompt has begun it already

    @classmethod
    def json(cls, schema: Mapping[str, Any] | None = None) -> GrammarSpec:
        """JSON that fits the schema; without one any object."""
        if schema is None:
            return cls("json_object")
        try:
            return cls("json_schema", json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise QuireError(
                "invalid_schema", f"The schema can't be written as JSON: {error}.", "Correct it."
            ) from None

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        return cls("regex", pattern)

    @classmethod
    def choice(cls, *texts: str) -> GrammarSpec:
        """One of these texts."""
        return cls("choice", json.dumps(texts))

    @classmethod
    def ebnf(cls, grammar: str) -> GrammarSpec:
        """A grammar in Lark's notation; `start` is where it begins."""
        return cls("ebnf", grammar)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling parameters

MAX_LOGPROBS = 64
MAX_N = 128
MAX_STOPS = 64
MAX_BIASED = 4096
MAX_BAD_WORDS = 1024
MAX_TEXT = 4096  # characters of one stop string, bad word or sequence breaker


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen. `None` means "the model's own default", filled in by `resolve`."""

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
    dry_range: int = 0  # how many last tokens are searched; 0: all
    dry_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None  # None: what is left of the context
    min_tokens: int = 0
    n: int = 1
    seed: int | None = None  # None: drawn at the edge
    logprobs: int | None = None  # how many alternatives beside the chosen token
    prompt_logprobs: int | None = None
    pooling: str | None = None  # mean or last: the prompt's hidden states come back as one vector, for embeddings
    skip_special_tokens: bool = True
    grammar: GrammarSpec | None = None  # what the output must look like
    # Filled in at the edge, where the tokenizer is: what bad_words and dry_breakers are in token ids.
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
        if self.repetition_penalty is not None and self.repetition_penalty == 0:
            raise _bad("repetition_penalty", 0, "must be above 0 (1 switches it off)")
        if self.grammar is not None and not isinstance(self.grammar, GrammarSpec):
            raise _bad("grammar", self.grammar, "must be a GrammarSpec, for instance GrammarSpec.json(schema)")
        if self.pooling not in (None, "mean", "last"):
            raise _bad("pooling", self.pooling, "must be mean or last")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", self.min_tokens, f"is larger than max_tokens={self.max_tokens}")
        for name, limit in (("stop", MAX_STOPS), ("stop_token_ids", MAX_STOPS), ("bad_words", MAX_BAD_WORDS),
                            ("dry_breakers", MAX_STOPS), ("logit_bias", MAX_BIASED)):  # fmt: skip
            if len(getattr(self, name)) > limit:
                raise _bad(name, f"{len(getattr(self, name))} entries", f"may have at most {limit}")
        for name in ("stop", "bad_words", "dry_breakers"):
            for text in getattr(self, name):
                if not isinstance(text, str) or not text or len(text) > MAX_TEXT:
                    raise _bad(name, text, f"must hold non-empty strings of at most {MAX_TEXT} characters")
        for _, value in self.logit_bias:
            if math.isnan(value) or value == math.inf:
                raise _bad("logit_bias", value, "values must be numbers, or -inf to forbid a token")

    def resolve(self, defaults: dict[str, Any] | None = None) -> SamplingParams:
        """Fill every `None` that has a default: the model's own first, then the neutral value."""
        known = {**_NEUTRAL, **{k: v for k, v in (defaults or {}).items() if k in _NEUTRAL and v is not None}}
        return replace(self, **{k: v for k, v in known.items() if getattr(self, k) is None})

    @property
    def needs_whole_prompt(self) -> bool:
        """Every position of the prompt must be computed for this request itself: no head start from the cache."""
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
    ("repetition_penalty", 0.0, 100.0, "1 switches it off"),
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
    return QuireError("invalid_parameter", f"{name}={value!r} {why}.", param=name)


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


# ---------------------------------------------------------------------------------------------------------------------
# Cache specs: what a model needs kept between steps


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One group of layers that keep the same kind of state. A model declares a list of these, one line a group.

    `paged` state can be cut at any token: bytes lie as [layers, planes, pages, page_tokens, *shape].
    `state` is atomic, a snapshot at one length: bytes lie as [layers, slots, *shape].
    """

    group: str
    kind: Literal["paged", "state"]
    layers: tuple[int, ...]
    shape: tuple[int, ...]  # per token and plane (paged), or of one layer's whole state (state)
    dtype: str
    planes: int = 2  # keys and values; 1 for a latent
    page_tokens: int = 16  # one number per model
    window: int | None = None  # a token sees itself and the window - 1 tokens before it
    snapshot_tokens: int = 1024  # state: a snapshot is taken at each multiple of this

    @property
    def unit_elements(self) -> int:
        """Elements of one page (paged) or one slot (state), all layers together."""
        per = math.prod(self.shape) * len(self.layers)
        return per * self.planes * self.page_tokens if self.kind == "paged" else per


# ---------------------------------------------------------------------------------------------------------------------
# Requests


class Status(str, Enum):
    WAITING = "waiting"  # holds nothing
    HELD = "held"  # waits for a request that is computing the same prompt
    RUNNING = "running"  # holds a row and a lease
    DRAINING = "draining"  # chosen as a victim; its steps in flight must commit first
    SWAPPED = "swapped"  # its bytes are on the host
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. `tokens` grows; `computed` catches up with it, and `planned` runs ahead of `computed`."""

    id: str
    tokens: list[int]  # prompt, then what was sampled and committed
    prompt_len: int
    params: SamplingParams
    max_len: int  # tokens may grow to this, never beyond
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence and stop ids, ready to test
    seed: int = 0
    sample_index: int = 0  # which of n
    priority: int = 0  # smaller runs first
    arrival: float = 0.0
    deadline: float | None = None  # on the engine's clock
    salt: bytes = b""  # requests share prefixes only within one salt
    adapter: str | None = None
    grammar: Any = None
    resumed: bool = False  # goes on from an engine that died: it was taken once and is not refused now
    suspect: bool = False  # was in the step that died: runs alone until it is past that point
    # -- moved by the scheduler
    planned: int = 0  # tokens whose state some planned step computes
    computed: int = 0  # tokens whose state is in the cache for sure
    pending: int = 0  # samples in flight: tokens that exist on the device only
    inflight: int = 0  # steps in flight that hold this request
    status: Status = Status.WAITING
    row: int = -1
    lease: Any = None
    cached_len: int = 0  # tokens the cache offered when it was first admitted
    first_token_at: float = 0.0
    admitted_at: float = 0.0
    preemptions: int = 0
    prompt_scored: int = 0  # prompt tokens whose logprobs were sent; a request that fell back computes them again

    @property
    def expected_len(self) -> int:
        """Tokens there will be once every step in flight has committed."""
        return len(self.tokens) + self.pending

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - self.prompt_len


# ---------------------------------------------------------------------------------------------------------------------
# Plan: all that a rank must know to run one step. The only way the host changes anything on the device.


class PlanRow(msgspec.Struct, gc=False):
    request_id: str
    row: int
    start: int  # upper bound; the true length lives in the device row
    count: int
    num_drafts: int
    wants_sample: bool


@dataclass(slots=True)
class RowInit:
    """A request takes a row: everything the device needs to know of it from now on."""

    request_id: str
    row: int
    tokens: Sequence[int]
    prompt_len: int
    computed: int
    params: SamplingParams
    stop_ids: tuple[int, ...]
    seed: int
    sample_index: int


@dataclass(slots=True)
class PageWrite:
    group: int  # index into the model's cache specs
    row: int
    first: int  # page index within the row's table
    pages: list[int]


class CopyKind(str, Enum):
    DEVICE = "device"  # page to page, slot to slot (copy-on-write, snapshots)
    OUT = "out"  # device to host
    IN = "in"  # host to device
    ZERO = "zero"  # clear a state slot


@dataclass(slots=True)
class Copy:
    kind: CopyKind
    group: int
    source: int
    target: int


@dataclass(slots=True)
class Plan:
    step: int
    rows: list[PlanRow] = field(default_factory=list)
    added: list[RowInit] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    page_writes: list[PageWrite] = field(default_factory=list)  # for state groups `pages` is the one live slot
    copies: list[Copy] = field(default_factory=list)  # before the forward, in order
    snapshots: list[Copy] = field(default_factory=list)  # after the forward
    may_mask: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(r.count for r in self.rows)


# ---------------------------------------------------------------------------------------------------------------------
# What comes back


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probability and rank of one token, and the most likely alternatives at its place, best first."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class StepOutput:
    """Per plan row, in plan order; `tokens[i]` is empty where the row did not sample."""

    step: int
    tokens: list[list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # plan index -> one per token
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # plan index -> one per prompt token
    drafts: dict[int, list[int]] = field(default_factory=dict)
    pooled: dict[int, list[float]] = field(default_factory=dict)  # plan index -> the pooled hidden states of its prompt
    bad_rows: list[int] = field(default_factory=list)  # plan indices whose logits were not finite


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class Timing:
    """Seconds. `queue` until first admitted, `first_token` and `total` since arrival."""

    queue: float = 0.0
    first_token: float = 0.0
    total: float = 0.0


class Delta(msgspec.Struct, gc=False):
    """News of one request: new token ids, and, once, why it ended."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: list[float] | None = None  # once, when the prompt of a request with `pooling` is computed
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_code: str | None = None
    usage: Usage | None = None  # with the finish reason
    timing: Timing | None = None
