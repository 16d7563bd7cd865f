"""The sampler's steps on a device with sampling kernels. `Sampler` passes whole batches to it.

Edits run on float32 copies of the samples that need any; all other samples are read from the model's logits directly.
DRY runs in torch here too: it is rare, and its cost is in the history, not in the vocabulary. Kernels are compiled when
a request first needs them; if one does not compile, torch does its part for the samples that need it, and the others
are still drawn by kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.table import SamplingOps
from quire.kernels.validation.failures import LazyKernels
from quire.sampling.batch import GREEDY, UNFILTERED, Batch, Cohort, EditedSamples, Histories
from quire.sampling.dry import apply_dry
from quire.sampling.edits import apply_edits
from quire.sampling.logprobs import Logprobs
from quire.sampling.rowwise import select

EDITS, FILTERS, LOGPROBS = "logit edits", "filtered sampling", "logprobs"
PLAIN = {  # (edited, masked) -> name of the kernel variant
    (False, False): "sampling",
    (True, False): "edited sampling",
    (False, True): "masked sampling",
    (True, True): "edited and masked sampling",
}
# Torch's noise and sums differ from the kernels' in the last bits, so the deterministic mode has no fallback for these;
# its edits are bitwise equal.
INEXACT_KERNELS = frozenset({FILTERS, LOGPROBS, *PLAIN.values()})
ALL_KERNELS = INEXACT_KERNELS | {EDITS}

Draw = Callable[[Tensor, Cohort, Tensor], Tensor]  # edited logits [n, vocab], cohort, positions [samples] -> tokens [n]


class FusedSampling:
    """Sampling by a device's kernels, with torch as the fallback for each."""

    def __init__(self, ops: SamplingOps, draw: Draw, lazy: LazyKernels):
        """`draw` samples one cohort in torch, as the fallback for filters."""
        self._ops = ops
        self._draw = draw
        self._lazy = lazy

    def choose(
        self, logits: Tensor, batch: Batch, histories: Histories, mask: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Runs steps 1 to 9 of the sampler's order. Returns tokens [samples] int64 and bad flags [samples] bool, or
        None if the caller must sample in torch. `mask` is packed."""
        draws, ops, device = batch.draws, self._ops, logits.device
        assert draws is not None
        edited = None if batch.edited is None else self.edit(logits, batch, batch.edited, histories)
        common = (logits, draws.key, histories.lengths, draws.inv_temperature)
        if draws.any_filter:
            filters = (draws.top_k, draws.top_p, draws.min_p, draws.top_n_sigma)
            chosen = self._lazy.attempt(
                FILTERS, device, lambda: ops.sample_filtered(*common, *filters, mask=mask, edited=edited)
            )
            if chosen is not None:
                return chosen
        name = PLAIN[edited is not None, mask is not None]
        chosen = self._lazy.attempt(name, device, lambda: ops.sample_rows(*common, mask=mask, edited=edited))
        if chosen is not None and draws.any_filter:
            return self._draw_filtered(*chosen, apply_edits(logits.float(), batch, histories, mask), batch, histories)
        return chosen

    def score(self, logits: Tensor, tokens: Tensor, batch: Batch) -> Logprobs | None:
        """Scores the samples with logprobs from the model's own logits; None if there are none or torch must score."""
        request = batch.logprobs
        if request is None:
            return None
        parts = self._lazy.attempt(
            LOGPROBS, logits.device, lambda: self._ops.score_rows(logits, request.samples, tokens, request.num_top)
        )
        return None if parts is None else Logprobs(*parts)

    def edit(self, logits: Tensor, batch: Batch, edited: EditedSamples, histories: Histories) -> tuple[Tensor, Tensor]:
        """Runs steps 2 to 6; returns the copies [edited samples, vocab] and each sample's index in them or -1."""
        found = self._lazy.attempt(EDITS, logits.device, lambda: self._edit(logits, batch, edited, histories))
        if found is not None:
            return found
        # Torch copies all samples, so a sample's index in the copies is its number.
        places = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
        return apply_edits(logits.float(), batch, histories), torch.where(edited.places < 0, edited.places, places)

    def _edit(self, logits: Tensor, batch: Batch, edited: EditedSamples, histories: Histories) -> tuple[Tensor, Tensor]:
        ops, places = self._ops, edited.places
        tokens, rows, lengths = histories.tokens, histories.rows, histories.lengths
        copies = ops.copy_samples(logits, edited.samples)
        if (bias := batch.bias) is not None:
            ops.add_bias(copies, places, bias.cells, bias.values)
        if (params := batch.penalties) is not None:
            penalties = (params.repetition, params.presence, params.frequency)
            ops.apply_penalties(copies, places, params.samples, params.prompt_len, *penalties, tokens, lengths, rows)
        if (dry := batch.dry) is not None:
            apply_dry(copies, dry, tokens, lengths, rows, histories.max_len(dry.host_samples), places)
        if (stops := batch.min_tokens) is not None:
            ops.forbid_stops(copies, places, stops.cells, stops.owners, stops.until, lengths)
        if (words := batch.bad_words) is not None:
            ops.forbid_bad_words(copies, places, words.cells, words.owners, words.prefixes, tokens, lengths, rows)
        return copies, places

    def _draw_filtered(
        self, tokens: Tensor, bad: Tensor, edited: Tensor, batch: Batch, histories: Histories
    ) -> tuple[Tensor, Tensor]:
        """Draws the samples with filters again, in torch."""
        for cohort in batch.cohorts:
            if cohort.width not in (GREEDY, UNFILTERED):
                drawn = self._draw(select(edited, cohort.samples), cohort, histories.lengths)
                tokens = drawn if cohort.samples is None else tokens.index_copy_(0, cohort.samples, drawn)
        return tokens.masked_fill(bad, 0), bad
