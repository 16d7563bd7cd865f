"""Samples the tokens of one step from logits. The runtime gathers a `Batch` from its rows and calls `sample`; only
`to_host` waits for the device.

The order, for each row:
 1. a row is bad if any logit is NaN or +inf or if none is finite; it still gets a valid id
 2. logit bias, 3. repetition, presence, frequency penalty, 4. DRY, 5. min_tokens, 6. bad words, 7. grammar mask
 8. greedy rows take the argmax of the logits (the first of equals)
 9. the others: temperature, top-k, top-n-sigma, top-p, min-p, then the argmax of score + Gumbel noise
A row in which edits forbid every token is bad, too. Logprobs are those of the logits before any edit.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.table import SamplingOps
from quire.kernels.validation.failures import LazyKernels
from quire.sampling.batch import GREEDY, UNFILTERED, Batch, Cohort, Histories, LogprobsRequest
from quire.sampling.edits import apply_edits
from quire.sampling.filters import apply_filters
from quire.sampling.fused import FusedSampling
from quire.sampling.logprobs import Logprobs, score, to_records
from quire.sampling.noise import Noise
from quire.sampling.rowwise import MINUS_INF, select
from quire.types import TokenLogprobs


@dataclass(slots=True)
class Sampled:
    """The sampled tokens of one step, on the device."""

    tokens: Tensor  # [samples] int64
    bad: Tensor  # [samples] bool
    logprobs: Logprobs | None  # scores of the samples in batch.logprobs, in that order


@dataclass(slots=True)
class HostSampled:
    """The sampled tokens of one step as Python values."""

    tokens: list[int]
    bad: list[int]  # samples whose logits can't be sampled from
    logprobs: dict[int, TokenLogprobs]  # sample -> its record, for samples with logprobs


# logits [samples, vocab], keys, positions, inverse temperatures (0: greedy), packed mask -> tokens, bad
Choice = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


class TokenSampler(Protocol):
    """What the runtime calls: a `Sampler`, or one that shares its tokens with other ranks."""

    def sample(self, logits: Tensor, batch: Batch, histories: Histories, mask: Tensor | None = None) -> Sampled:
        """Samples a token for each row of `logits` [samples, vocab]; see `Sampler.sample`."""
        ...


class Sampler:
    """Samples one token for each row of logits."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str,
        ops: SamplingOps | None = None,
        plain: Choice | None = None,
        irreplaceable: Container[str] = (),
    ):
        """`ops`: the device's sampling kernels, with the same semantics and noise; `plain`: a kernel for greedy and
        temperature sampling, equal up to the last bits of the noise. `irreplaceable`: kernels of `fused` for which
        torch must not be used as a fallback."""
        self.noise = Noise(vocab_size, device)
        self._fused = None if ops is None else FusedSampling(ops, self._choose, LazyKernels(irreplaceable))
        self._plain = plain

    def sample(self, logits: Tensor, batch: Batch, histories: Histories, mask: Tensor | None = None) -> Sampled:
        """Samples a token for each row of `logits` [samples, vocab], which are not changed. `mask`: the tokens that a
        grammar allows (see `apply_mask`)."""
        chosen, draws = None, batch.draws
        packed = mask is None or mask.dtype != torch.bool
        if self._fused is not None and packed and draws is not None:
            chosen = self._fused.choose(logits, batch, histories, mask)
        elif self._plain is not None and packed and draws is not None and not draws.any_filter and not batch.edits:
            chosen = self._plain(logits, draws.key, histories.lengths, draws.inv_temperature, mask)
        tokens, bad = chosen or self._choose_all(logits.float(), batch, histories, mask)
        return Sampled(tokens, bad, self.score(logits, tokens, batch))

    def _choose_all(
        self, logits: Tensor, batch: Batch, histories: Histories, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Samples in torch; returns tokens [samples] and bad flags [samples]."""
        edited = apply_edits(logits, batch, histories, mask)
        bad = ~torch.isfinite(logits.amax(1))  # amax propagates NaN
        if edited is not logits:
            bad |= ~torch.isfinite(edited.amax(1))
        tokens = torch.zeros(batch.num_samples, dtype=torch.int64, device=logits.device)
        for cohort in batch.cohorts:
            chosen = self._choose(select(edited, cohort.samples), cohort, histories.lengths)
            tokens = chosen if cohort.samples is None else tokens.index_copy_(0, cohort.samples, chosen)
        return tokens.masked_fill(bad, 0), bad

    def score(self, logits: Tensor, tokens: Tensor, batch: Batch) -> Logprobs | None:
        """Returns the logprobs of the samples that have them in `batch`."""
        if batch.logprobs is None:
            return None
        scored = None if self._fused is None else self._fused.score(logits, tokens, batch)
        if scored is not None:
            return scored
        asked = batch.logprobs.samples
        return score(select(logits, asked).float(), select(tokens, asked), batch.logprobs.num_top)

    def _choose(self, logits: Tensor, cohort: Cohort, positions: Tensor) -> Tensor:
        """Samples the tokens [n] of one cohort's rows [n, vocab]."""
        if cohort.width == GREEDY:
            return logits.max(1).indices  # the first of equals, as argmax, but faster on the CPU
        if cohort.width == UNFILTERED and self._plain is not None:  # same bits as in a step of plain rows
            return self._plain(logits, cohort.key, select(positions, cohort.samples), cohort.inv_temperature, None)[0]
        scores, token_ids = apply_filters(logits, cohort)
        noise = self.noise.gumbel(cohort.key, select(positions, cohort.samples), token_ids)
        best = noise.add_(scores).max(1, keepdim=True).indices
        return (best if token_ids is None else token_ids.gather(1, best)).squeeze(1)


def processed_logits(logits: Tensor, batch: Batch, histories: Histories, mask: Tensor | None = None) -> Tensor:
    """Returns the distribution that `sample` draws from as logits [samples, vocab], up to a constant per row: tokens
    that can't be drawn are -inf, as are all but the argmax of a greedy row. For tests and verification only."""
    edited = apply_edits(logits, batch, histories, mask)
    result = torch.full_like(edited, MINUS_INF)
    for cohort in batch.cohorts:
        part = select(edited, cohort.samples)
        if cohort.width == GREEDY:
            scores, token_ids = torch.zeros_like(part[:, :1]), part.max(1, keepdim=True).indices
        else:
            scores, token_ids = apply_filters(part, cohort)  # type: ignore[assignment]
        if token_ids is not None:
            scores = torch.full_like(part, MINUS_INF).scatter_(1, token_ids, scores)
        result = scores if cohort.samples is None else result.index_copy_(0, cohort.samples, scores)
    return result


def start_copy(sampled: Sampled) -> Sampled:
    """Starts an asynchronous copy to the host; the caller must wait for it, e.g. with an event, before `to_host`."""
    logprobs = sampled.logprobs
    if logprobs is not None:
        logprobs = Logprobs(*(part.to("cpu", non_blocking=True) for part in logprobs.parts()))
    return Sampled(sampled.tokens.to("cpu", non_blocking=True), sampled.bad.to("cpu", non_blocking=True), logprobs)


def to_host(sampled: Sampled, asked: LogprobsRequest | None) -> HostSampled:
    """Converts samples to Python values; waits for the device if they are still on it."""
    bad = [sample for sample, is_bad in enumerate(sampled.bad.tolist()) if is_bad]
    records: dict[int, TokenLogprobs] = {}
    if sampled.logprobs is not None and asked is not None:
        scored = to_records(sampled.logprobs, asked.host_num_top)
        records = dict(zip(asked.host_samples, scored, strict=True))
    return HostSampled(sampled.tokens.tolist(), bad, records)
