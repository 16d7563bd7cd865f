"""What the sampling tests share: random parameters and histories, and one call of the sampler on them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from quire.sampling.batch import Batch, Histories
from quire.sampling.rows import SamplingRows
from quire.types import RowInit, SamplingParams


@dataclass
class Case:
    """One row: what it asks for and where it stands."""

    params: SamplingParams
    prompt_ids: list[int] = field(default_factory=lambda: [1])
    output_ids: list[int] = field(default_factory=list)
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    sample_index: int = 0

    @property
    def history(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def forbidden(self) -> set[int]:
        """Tokens that may be forbidden, by one parameter or another, whatever the logits."""
        ids = {token for token, value in self.params.logit_bias if value == -np.inf}
        ids |= {word[-1] for word in self.params.bad_token_ids}
        return ids | set(self.stop_ids if self.params.min_tokens else ())

    def init(self, row: int) -> RowInit:
        return RowInit(
            f"r{row}", row, self.history, len(self.prompt_ids), 0, self.params, self.stop_ids, self.seed,
            self.sample_index,
        )  # fmt: skip


def resolved(**params) -> SamplingParams:
    return SamplingParams(**params).resolve()


def set_up(
    cases: list[Case], vocab_size: int, rng: np.random.Generator | None = None, device: str = "cpu"
) -> tuple[Batch, Histories]:
    """Cases spread over rows of a larger house, whose unused places hold rubbish."""
    rng = rng or np.random.default_rng(0)
    max_rows = len(cases) + 5
    rows = rng.permutation(max_rows)[: len(cases)].tolist()
    max_len = max(len(case.history) for case in cases) + 3
    tokens = torch.from_numpy(rng.integers(-1, vocab_size, (max_rows, max_len)).astype(np.int32))
    sampling = SamplingRows(max_rows, vocab_size, device)
    for row, case in zip(rows, cases, strict=True):
        tokens[row, : len(case.history)] = torch.tensor(case.history, dtype=torch.int32)
        sampling.set(case.init(row))
    lengths = torch.tensor([len(case.history) for case in cases], device=device)
    bounds = [len(case.history) + int(rng.integers(0, 3)) for case in cases]
    return sampling.gather(rows), Histories(tokens.to(device), torch.tensor(rows, device=device), lengths, bounds)


def random_logits(rng: np.random.Generator, num_rows: int, vocab_size: int) -> np.ndarray:
    spread = rng.choice([0.5, 1.5, 4.0], (num_rows, 1))
    return (rng.standard_normal((num_rows, vocab_size)) * spread).astype(np.float32)


def random_history(rng: np.random.Generator, vocab_size: int, max_len: int = 40) -> tuple[list[int], list[int]]:
    """Prompt and output, of few different tokens, so that things repeat."""
    used = rng.integers(0, vocab_size, int(rng.integers(2, 12)))
    ids = rng.choice(used, int(rng.integers(1, max_len))).tolist()
    if rng.random() < 0.3:
        ids = ids + ids[-int(rng.integers(1, len(ids) + 1)) :]
    prompt_len = int(rng.integers(1, len(ids) + 1))
    return ids[:prompt_len], ids[prompt_len:]


def random_case(rng: np.random.Generator, vocab_size: int, *names: str) -> Case:
    """A case with these parameters switched on (any of them by chance if none is named)."""
    prompt_ids, output_ids = random_history(rng, vocab_size)
    history = prompt_ids + output_ids
    biased = rng.choice(vocab_size, min(int(rng.integers(1, 9)), vocab_size), replace=False).tolist()
    stop_ids = rng.choice(vocab_size, min(3, vocab_size - 1), replace=False).tolist()
    pool = {
        "temperature": {"temperature": float(rng.uniform(0.3, 2.0))},
        "greedy": {"temperature": 0.0},
        "top_k": {"top_k": int(rng.choice([1, 2, 5, 20, 100, 1 << 20]))},
        "top_p": {"top_p": float(rng.choice([0.0, 0.1, 0.5, 0.9, 0.99, rng.random()]))},
        "min_p": {"min_p": float(rng.choice([0.02, 0.3, 1.0, rng.random()]))},
        "top_n_sigma": {"top_n_sigma": float(rng.uniform(0.2, 2.5))},
        "repetition_penalty": {"repetition_penalty": float(rng.uniform(0.6, 2.0))},
        "presence_penalty": {"presence_penalty": float(rng.uniform(-2, 2))},
        "frequency_penalty": {"frequency_penalty": float(rng.uniform(-1, 1))},
        "dry": {
            "dry_multiplier": float(rng.uniform(0.2, 1.5)), "dry_base": float(rng.uniform(1, 2)),
            "dry_allowed_len": int(rng.integers(1, 4)), "dry_range": int(rng.choice([0, 0, 5, 20])),
            "dry_breaker_ids": tuple({int(i) for i in rng.choice(history, int(rng.integers(0, 3)))}),
        },
        "logit_bias": {"logit_bias": tuple((i, float(rng.choice([-np.inf, -3.0, 0.5, 4.0]))) for i in biased)},
        "bad_words": {"bad_token_ids": tuple(_bad_word(rng, history, vocab_size) for _ in range(rng.integers(1, 6)))},
        "min_tokens": {"min_tokens": int(rng.integers(1, 12))},
    }  # fmt: skip
    chosen = names or tuple(name for name in pool if name != "greedy" and rng.random() < 0.35)
    params: dict = {}
    for name in chosen:
        params |= pool[name]
    seed, sample_index = int(rng.integers(-(1 << 62), 1 << 62)), int(rng.integers(0, 4))
    return Case(resolved(**params), prompt_ids, output_ids, tuple(stop_ids), seed, sample_index)


def _bad_word(rng: np.random.Generator, history: list[int], vocab_size: int) -> tuple[int, ...]:
    """Sometimes begun by the history, sometimes longer than it, sometimes just random."""
    prefix_len = int(rng.integers(0, 4))
    prefix = history[len(history) - prefix_len :] if rng.random() < 0.7 else rng.integers(0, vocab_size, prefix_len)
    before = [int(rng.integers(0, vocab_size))] if rng.random() < 0.2 else []
    return (*before, *(int(i) for i in prefix), int(rng.integers(0, vocab_size)))
