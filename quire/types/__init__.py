"""Plain data that all packages share: requests, sampling parameters, cache specs, plans, step outputs and errors.

Nothing here imports torch or holds a lock. Types that cross a process boundary consist of numbers, strings, tuples and
lists only. The scheduler writes plans, the runtime executes them, and the front ends translate requests and deltas.
"""

from quire.types.errors import PromptTooLong, QuireError, is_out_of_memory
from quire.types.params import MAX_BAD_WORDS, MAX_BIASED, MAX_STOPS, GrammarSpec, SamplingParams
from quire.types.plans import (
    STEP_SIZES,
    AdapterLoad,
    CacheSpec,
    Copy,
    CopyKind,
    PageWrite,
    Plan,
    PlanRow,
    RowInit,
    StepOutput,
    TokenArray,
    TokenLogprobs,
    pack_tokens,
)
from quire.types.pooling import POOLINGS, PoolingRule, choose_pooling
from quire.types.requests import CacheLease, Delta, FinishReason, GrammarState, Request, Status, Timing, Usage

__all__ = [
    "MAX_BAD_WORDS",
    "MAX_BIASED",
    "MAX_STOPS",
    "POOLINGS",
    "STEP_SIZES",
    "AdapterLoad",
    "CacheLease",
    "CacheSpec",
    "Copy",
    "CopyKind",
    "Delta",
    "FinishReason",
    "GrammarSpec",
    "GrammarState",
    "PageWrite",
    "Plan",
    "PlanRow",
    "PoolingRule",
    "PromptTooLong",
    "QuireError",
    "Request",
    "RowInit",
    "SamplingParams",
    "Status",
    "StepOutput",
    "Timing",
    "TokenArray",
    "TokenLogprobs",
    "Usage",
    "choose_pooling",
    "is_out_of_memory",
    "pack_tokens",
]
