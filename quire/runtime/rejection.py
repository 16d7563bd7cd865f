"""Verification of a step's drafts by rejection, in the runner: which samples verify which drafts, drawn from what."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.upload import send
from quire.runtime.proposals import Proposals
from quire.runtime.samples import StepSamples
from quire.sampling.batch import Batch, Histories
from quire.sampling.rejection import choose_tokens_by_rejection, one_hot
from quire.sampling.sampler import Sampled, Sampler, processed_logits


@dataclass(frozen=True, slots=True)
class Rejection:
    """Replaces the samples in the places of drafts by what the rule of rejection chooses."""

    sampler: Sampler
    proposals: Proposals | None  # has the distributions of the drafts that it has drawn

    def apply(
        self,
        sampled: Sampled,
        samples: StepSamples,
        logits: Tensor,
        batch: Batch,
        histories: Histories,
        mask: Tensor | None,
    ) -> Sampled:
        """Returns the samples of a step with drafts. `sampled`: those of the sampler. logits [samples, vocab]"""
        plan, device = samples.plan, logits.device
        indices: list[int] = []
        tokens: list[int] = []
        drawn: list[tuple[int, Tensor]] = []  # index into `tokens`, distribution
        first, proposed = 0, set(plan.proposed)
        for index in samples.places:
            drafts = plan.drafts.get(index, [])
            kept = self.proposals.kept(plan.rows[index].row) if self.proposals and index in proposed else []
            drawn += [(len(tokens) + place, kept[place]) for place in range(min(len(drafts), len(kept)))]
            indices += range(first, first + len(drafts))
            tokens += drafts
            first += len(drafts) + 1
        at = send(torch.tensor(indices), device)
        drafts_at = send(torch.tensor(tokens), device)
        q = one_hot(drafts_at, logits.shape[1])
        for place, distribution in drawn:
            q[place] = distribution
        assert batch.draws is not None
        processed = processed_logits(logits.float(), batch, histories, mask)[at]
        keys, positions = batch.draws.key[at], histories.lengths[at]
        chosen = choose_tokens_by_rejection(self.sampler.noise, processed, drafts_at, q, keys, positions)
        replaced = sampled.tokens.clone()
        replaced[at] = torch.where(sampled.bad[at], sampled.tokens[at], chosen)
        return Sampled(replaced, sampled.bad, self.sampler.score(logits, replaced, batch))
