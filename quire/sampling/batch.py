"""Sampling parameters of one step: plain records of device tensors with what the host knows about them.

`rows` builds these, `sampler` and its steps read them without changing them. Parameters that no row uses are None and
cost nothing. A "sample" is a row of the step's logits; a "cell" is one logit, addressed as sample * vocab + token id.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

# Values of `Cohort.width` that are not a number of candidates.
GREEDY = 0
EVERYTHING = -1  # filtered over the whole vocabulary
UNFILTERED = -2  # drawn by temperature only, over the whole vocabulary


@dataclass(slots=True)
class Cohort:
    """Samples that are drawn by the same algorithm. A row's cohort depends only on its own parameters, so that other
    rows never change how its token is computed."""

    width: int  # GREEDY, EVERYTHING, UNFILTERED, or the number of top candidates that filters consider
    samples: Tensor | None  # [n] int64; None: every sample of the step
    key: Tensor  # [n] int64: noise stream
    inv_temperature: Tensor  # [n] float32
    top_k: Tensor  # [n] int64; used only if `width` is a number of candidates
    top_p: Tensor  # [n] float64, or float32 on devices without it
    min_p: Tensor  # [n] float32
    top_n_sigma: Tensor  # [n] float32
    any_top_p: bool
    any_min_p: bool
    any_sigma: bool


@dataclass(slots=True)
class Bias:
    """Values that are added to single logits."""

    cells: Tensor  # [n] int64
    values: Tensor  # [n] float32


@dataclass(slots=True)
class MinTokens:
    """Stop ids that are forbidden while their row is shorter than `until`."""

    cells: Tensor  # [n] int64
    owners: Tensor  # [n] int64: the sample of each cell
    until: Tensor  # [n] int64: prompt length + min_tokens


@dataclass(slots=True)
class BadWords:
    """Forbidden sequences as their last token and the prefix before it."""

    cells: Tensor  # [n] int64: last tokens
    owners: Tensor  # [n] int64: the sample of each cell
    prefixes: Tensor  # [n, longest prefix] int64, right-aligned, -1 where the prefix is shorter


@dataclass(slots=True)
class Penalties:
    """Repetition, presence and frequency penalties of the samples that have any."""

    samples: Tensor  # [n] int64
    host_samples: list[int]
    prompt_len: Tensor  # [n] int64
    repetition: Tensor  # [n] float32
    presence: Tensor  # [n] float32
    frequency: Tensor  # [n] float32
    any_repetition: bool
    any_output: bool  # whether any row has a presence or frequency penalty


@dataclass(slots=True)
class Dry:
    """DRY penalties of the samples that have them."""

    samples: Tensor  # [n] int64
    host_samples: list[int]
    multiplier: Tensor  # [n] float32
    base: Tensor  # [n] float32
    allowed_len: Tensor  # [n] int64
    search_len: Tensor  # [n] int64: number of last tokens that are searched
    breaker_cells: Tensor  # [m] int64: index into `samples` * vocab + token id


@dataclass(slots=True)
class LogprobsRequest:
    """The samples whose log-probabilities are returned."""

    samples: Tensor | None  # [n] int64; None: every sample of the step
    host_samples: list[int]
    host_num_top: list[int]  # number of alternatives per sample

    @property
    def num_top(self) -> int:
        return max(self.host_num_top)


@dataclass(slots=True)
class Draws:
    """Parameters of all samples in order, for kernels that draw all cohorts in one launch."""

    key: Tensor  # [samples] int64
    inv_temperature: Tensor  # [samples] float32; 0: greedy
    top_k: Tensor  # [samples] int64; 0: off
    top_p: Tensor  # [samples] float64
    min_p: Tensor  # [samples] float32
    top_n_sigma: Tensor  # [samples] float32
    any_filter: bool  # False: every sample is greedy or drawn by temperature only


@dataclass(slots=True)
class EditedSamples:
    """Samples whose logits are edited by anything other than a grammar mask."""

    samples: Tensor  # [n] int64
    places: Tensor  # [samples] int32: index of each sample in `samples`, or -1


@dataclass(slots=True)
class Batch:
    """All sampling parameters of one step."""

    num_samples: int
    cohorts: list[Cohort] = field(default_factory=list)  # each sample is in exactly one
    bias: Bias | None = None
    penalties: Penalties | None = None
    dry: Dry | None = None
    min_tokens: MinTokens | None = None
    bad_words: BadWords | None = None
    logprobs: LogprobsRequest | None = None
    draws: Draws | None = None  # None: the step has no samples
    edited: EditedSamples | None = None

    @property
    def edits(self) -> bool:
        parts = (self.bias, self.penalties, self.dry, self.min_tokens, self.bad_words)
        return any(part is not None for part in parts)


@dataclass(slots=True)
class Histories:
    """The tokens before each sample, on the device: the first `lengths[s]` of row `rows[s]` of `tokens`."""

    tokens: Tensor  # [max_rows, max_len] int32 or int64; undefined past a row's length
    rows: Tensor  # [samples] int64
    lengths: Tensor  # [samples] int64: number of tokens before the sampled one, which is its position
    len_bounds: list[int]  # host upper bounds of `lengths`

    def max_len(self, samples: list[int]) -> int:
        return min(max(self.len_bounds[s] for s in samples), self.tokens.shape[1])
