"""The sampler's order on a device that has sampling kernels of its own. `Sampler` hands whole steps to it.

Edits happen on float32 copies of the samples that ask for any; every other sample is read from the model's logits as
they came. DRY is torch's work here too: it is rare, and its cost is in the history, not in the vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from quire.kernels.table import SamplingOps
from quire.sampling.batch import Batch, Edited, Histories
from quire.sampling.dry import apply_dry
from quire.sampling.logprobs import Logprobs


class FusedSampling:
    def __init__(self, ops: SamplingOps):
        self._ops = ops

    def choose(self, logits: Tensor, batch: Batch, histories: Histories, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Steps 1 to 9 of the sampler's order: tokens [samples] int64, bad flags [samples] bool. `mask` is packed."""
        draws = batch.draws
        assert draws is not None
        edited = None if batch.edited is None else self._edit(logits, batch, batch.edited, histories)
        common = (logits, draws.key, histories.lengths, draws.inv_temperature)
        if not draws.any_filter:
            return self._ops.sample_rows(*common, mask=mask, edited=edited)
        filters = (draws.top_k, draws.top_p, draws.min_p, draws.top_n_sigma)
        return self._ops.sample_filtered(*common, *filters, mask=mask, edited=edited)

    def score(self, logits: Tensor, tokens: Tensor, batch: Batch) -> Logprobs | None:
        """Of the samples that asked, from the logits as they came."""
        if batch.logprobs is None:
            return None
        return Logprobs(*self._ops.score_rows(logits, batch.logprobs.samples, tokens, batch.logprobs.num_top))

    def _edit(self, logits: Tensor, batch: Batch, edited: Edited, histories: Histories) -> tuple[Tensor, Tensor]:
        """Steps 2 to 6: the copies [edited samples, vocab] and where each sample's is."""
        ops, places = self._ops, edited.places
        tokens, rows, lengths = histories.tokens, histories.rows, histories.lengths
        copies = ops.copy_samples(logits, edited.samples)
        if (bias := batch.bias) is not None:
            ops.add_bias(copies, places, bias.cells, bias.values)
        if (ask := batch.penalties) is not None:
            penalties = (ask.repetition, ask.presence, ask.frequency)
            ops.apply_penalties(copies, places, ask.samples, ask.prompt_len, *penalties, tokens, lengths, rows)
        if (dry := batch.dry) is not None:
            apply_dry(copies, dry, tokens, lengths, rows, histories.max_len(dry.host_samples), places)
        if (stops := batch.min_tokens) is not None:
            ops.forbid_stops(copies, places, stops.cells, stops.owners, stops.until, lengths)
        if (words := batch.bad_words) is not None:
            ops.forbid_bad_words(copies, places, words.cells, words.owners, words.prefixes, tokens, lengths, rows)
        return copies, places
