"""Runs a model over a stretch of text outside an engine: one row, one step, and a cache of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.layers.step import PagedInputs, StateInputs, Step
from quire.runtime.store import CacheStore

CPU = torch.device("cpu")
PAGE = 16  # tokens
CHUNK = 256  # tokens whose scores of the whole vocabulary are there at a time


def read_stretch(model: Any, tokens: Sequence[int]) -> Tensor:
    """Returns the hidden states of all tokens, [tokens, width]."""
    num_pages, count = -(-len(tokens) // PAGE), len(tokens)
    units = [num_pages if spec.kind == "paged" else 2 for spec in model.specs]
    caches = CacheStore(model.specs, units, None, CPU).tensors
    table = torch.arange(num_pages, dtype=torch.int32).view(1, -1)
    positions = torch.arange(count)
    paged, state = PagedInputs(table, positions), StateInputs(torch.ones(1, dtype=torch.int64))
    step = Step(
        tokens=torch.tensor(tokens),
        positions=positions,
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        logits_index=torch.arange(count),
        groups={spec.group: paged if spec.kind == "paged" else state for spec in model.specs},
        counts=[count],
        len_bounds=[count],
    )
    with torch.inference_mode():
        hidden: Tensor = model.forward(step, caches)
    return hidden


def next_token_scores(model: Any, tokens: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields log-probabilities of the tokens after the first, [n, vocab], and these tokens, [n], some at a time."""
    hidden, targets = read_stretch(model, tokens), torch.tensor(tokens[1:])
    for first in range(0, len(targets), CHUNK):
        with torch.inference_mode():
            scores = model.logits(hidden[first : first + CHUNK]).float().log_softmax(-1)
        wanted = targets[first : first + CHUNK]
        yield scores[: len(wanted)], wanted
