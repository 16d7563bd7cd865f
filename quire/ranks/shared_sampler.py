"""Sampling in a group of ranks: one rank samples, the others get its tokens.

`Runner` calls either of these in place of a `Sampler`. Ranks never sample on their own, because their logits may differ
in the last bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.parallel import Communicator
from quire.runtime.stage_runner import BAD, StageInput
from quire.sampling.batch import Batch, Histories
from quire.sampling.sampler import Sampled, Sampler, TokenSampler


class SharedSampler:
    """Samples on rank `source` of a group and gives its tokens to all ranks."""

    def __init__(self, sampler: Sampler, communicator: Communicator, source: int):
        self._sampler = sampler
        self._communicator = communicator
        self._source = source

    def sample(self, logits: Tensor, batch: Batch, histories: Histories, mask: Tensor | None = None) -> Sampled:
        """As `Sampler.sample`. Other ranks than the source read no logits and return no logprobs."""
        if self._communicator.rank == self._source:
            sampled = self._sampler.sample(logits, batch, histories, mask)
            self._communicator.broadcast(torch.where(sampled.bad, BAD, sampled.tokens), self._source)
            return sampled
        empty = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        tokens = self._communicator.broadcast(empty, self._source)
        bad = tokens == BAD
        return Sampled(tokens.masked_fill(bad, 0), bad, None)


class StageSampler:
    """Samples on the last stage of a pipeline and sends the tokens to the stages before it."""

    def __init__(self, sampler: TokenSampler, stage: StageInput):
        self._sampler = sampler
        self._stage = stage

    def sample(self, logits: Tensor, batch: Batch, histories: Histories, mask: Tensor | None = None) -> Sampled:
        sampled = self._sampler.sample(logits, batch, histories, mask)
        self._stage.send_tokens(torch.where(sampled.bad, BAD, sampled.tokens))
        return sampled
