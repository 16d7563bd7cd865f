"""What the rows of one step ask of the sampler: plain records of device tensors and the host's knowledge about them.

`rows` fills these in, `sampler` and its steps read them; nobody writes them. A part that nobody asked for is None, so
it costs nothing. A "sample" is a place in the step's logits; a "cell" is one logit in them, sample * vocab + token id.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

GREEDY = 0  # cohort widths; any other is a number of candidates
EVERYTHING = -1
UNFILTERED = -2


@dataclass(slots=True)
class Cohort:
    """Samples that are chosen in the same way. Which cohort a row belongs to depends on its own parameters alone, so
    that its neighbours never change how its token is computed."""

    width: int  # GREEDY, EVERYTHING (the whole vocabulary), UNFILTERED (all of it), or how many best are looked at
    samples: Tensor | None  # [n] int64; None: every sample of the step
    key: Tensor  # [n] int64: noise stream
    inv_temperature: Tensor  # [n] float32
    top_k: Tensor  # [n] int64; meaningful with candidates only
    top_p: Tensor  # [n] float64
    min_p: Tensor  # [n] float32
    top_n_sigma: Tensor  # [n] float32
    any_top_p: bool
    any_min_p: bool
    any_sigma: bool


@dataclass(slots=True)
class Bias:
    cells: Tensor  # [n] int64
    values: Tensor  # [n] float32


@dataclass(slots=True)
class MinTokens:
    """Stop ids that are forbidden while their row is shorter than `until`."""

    cells: Tensor  # [n] int64
    owners: Tensor  # [n] int64: which sample
    until: Tensor  # [n] int64: prompt length + min_tokens


@dataclass(slots=True)
class BadWords:
    """Last tokens of forbidden sequences, and what must stand before them."""

    cells: Tensor  # [n] int64
    owners: Tensor  # [n] int64: which sample
    prefixes: Tensor  # [n, longest prefix] int64, right-aligned, -1 where the prefix is shorter


@dataclass(slots=True)
class Penalties:
    samples: Tensor  # [n] int64
    host_samples: list[int]
    prompt_len: Tensor  # [n] int64
    repetition: Tensor  # [n] float32
    presence: Tensor  # [n] float32
    frequency: Tensor  # [n] float32
    any_repetition: bool
    any_output: bool  # presence or frequency


@dataclass(slots=True)
class Dry:
    samples: Tensor  # [n] int64
    host_samples: list[int]
    multiplier: Tensor  # [n] float32
    base: Tensor  # [n] float32
    allowed_len: Tensor  # [n] int64
    search_len: Tensor  # [n] int64: how many last tokens are searched
    breaker_cells: Tensor  # [m] int64: place in `samples` * vocab + token id


@dataclass(slots=True)
class LogprobsAsked:
    samples: Tensor | None  # [n] int64; None: every sample of the step
    host_samples: list[int]
    host_num_top: list[int]  # alternatives each of them asked for

    @property
    def num_top(self) -> int:
        return max(self.host_num_top)


@dataclass(slots=True)
class Draws:
    """How every sample is drawn, in their order: the cohorts again, for kernels that take rows as they come."""

    key: Tensor  # [samples] int64
    inv_temperature: Tensor  # [samples] float32; 0: greedy
    top_k: Tensor  # [samples] int64; 0: off
    top_p: Tensor  # [samples] float64
    min_p: Tensor  # [samples] float32
    top_n_sigma: Tensor  # [samples] float32
    any_filter: bool  # False: every sample is greedy or drawn by temperature alone


@dataclass(slots=True)
class Edited:
    """Samples that anything but a grammar's mask edits."""

    samples: Tensor  # [n] int64
    places: Tensor  # [samples] int32: where a sample stands in `samples`; -1: nowhere


@dataclass(slots=True)
class Batch:
    num_samples: int
    cohorts: list[Cohort] = field(default_factory=list)  # each sample is in exactly one
    bias: Bias | None = None
    penalties: Penalties | None = None
    dry: Dry | None = None
    min_tokens: MinTokens | None = None
    bad_words: BadWords | None = None
    logprobs: LogprobsAsked | None = None
    draws: Draws | None = None  # None: there is no sample
    edited: Edited | None = None

    @property
    def edits(self) -> bool:
        parts = (self.bias, self.penalties, self.dry, self.min_tokens, self.bad_words)
        return any(part is not None for part in parts)


@dataclass(slots=True)
class Histories:
    """The tokens each sample follows, on the device: row `rows[s]` of `tokens`, up to `lengths[s]`."""

    tokens: Tensor  # [max_rows, max_len] int32 or int64; past a row's length lies anything
    rows: Tensor  # [samples] int64
    lengths: Tensor  # [samples] int64: tokens before the sampled one, which is also the sampled one's position
    len_bounds: list[int]  # host upper bounds of `lengths`

    def max_len(self, samples: list[int]) -> int:
        return min(max(self.len_bounds[s] for s in samples), self.tokens.shape[1])
