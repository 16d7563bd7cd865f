"""The samples of one step: the rows and positions that are sampled, and the acceptance of drafts afterwards.

A row without drafts has one sample, a row with k drafts has 1 + k in order. The runner makes one of these per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.upload import send, upload
from quire.runtime.rows import DeviceRows
from quire.sampling.sampler import HostSampled
from quire.sampling.verify import NO_DRAFT, accepted_tokens, count_accepted
from quire.types import Plan, StepOutput


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The samples of a plan, in its order."""

    plan: Plan
    places: list[int]  # plan index of each row that samples
    rows: list[int]  # device row of each sample
    bounds: list[int]  # host upper bound of the number of tokens before each sample
    behind: list[int]  # number of the row's samples after each sample

    @classmethod
    def of(cls, plan: Plan) -> StepSamples:
        places = [index for index, row in enumerate(plan.rows) if row.wants_sample]
        chosen = [plan.rows[index] for index in places]
        if not plan.drafts:
            ends = [row.start + row.count for row in chosen]
            return cls(plan, places, [row.row for row in chosen], ends, [0] * len(ends))
        each = [(row, left) for row in chosen for left in range(row.num_drafts, -1, -1)]
        bounds = [row.start + row.count - left for row, left in each]
        return cls(plan, places, [row.row for row, _ in each], bounds, [left for _, left in each])

    def lengths(self, computed: Tensor) -> Tensor:
        """Returns the number of tokens before each sample, [samples] int64. computed [samples]: those of its row, with
        the drafts."""
        if not self.plan.drafts:
            return computed
        return computed - send(torch.tensor(self.behind, dtype=torch.int64), computed.device)

    def settle(self, rows: DeviceRows, tokens: Tensor, bad: Tensor, lengths: Tensor) -> Tensor:
        """Moves rows with drafts back behind the last accepted one; recurrent state returns to that before the step.

        Returns where each sampling row's last token is, [sampling rows] int64. tokens, bad, lengths [samples]
        """
        if not self.plan.drafts:
            return lengths
        drafted = [self.plan.rows[index] for index in self.plan.drafts]
        longest = max(row.num_drafts for row in drafted)
        padded = np.full((len(drafted), longest), NO_DRAFT, np.int64)
        for place, drafts in enumerate(self.plan.drafts.values()):
            padded[place, : len(drafts)] = drafts
        first_samples = np.cumsum([0, *(self.plan.rows[index].num_drafts + 1 for index in self.places)])
        order = {index: place for place, index in enumerate(self.places)}
        counts = np.array([row.num_drafts for row in drafted], np.int64)
        whole = np.array([row.count for row in drafted], np.int64)
        parts = {
            "rows": np.array([row.row for row in drafted], np.int64),
            "firsts": np.array([first_samples[order[index]] for index in self.plan.drafts], np.int64),
            "drafts": padded,
            "counts": counts,
            "whole": whole,
            "places": np.array([order[index] for index in self.plan.drafts], np.int64),
            "lasts": first_samples[1:] - 1,
        }
        sent = upload({"drafts": parts}, rows.device)["drafts"]
        rejected = sent["counts"] - count_accepted(tokens, bad, sent["firsts"], sent["drafts"])
        newest = lengths[sent["lasts"]]
        newest[sent["places"]] -= rejected
        if rows.has_state:
            rejected = torch.where(rejected > 0, sent["whole"], 0)
        rows.computed[sent["rows"]] -= rejected
        return newest

    def masks(self, masks: Mapping[int, bytes], vocab_size: int, device: torch.device) -> Tensor:
        """Returns grammar masks as [samples, ceil(vocab / 32)] int32, one bit per token; without a mask all are
        allowed."""
        num_words = -(-vocab_size // 32)
        words = torch.full((len(self.rows), num_words), -1, dtype=torch.int32)
        sample = 0
        for index in self.places:
            count = self.plan.rows[index].num_drafts + 1
            if index in masks:
                width = len(masks[index]) // count
                for place in range(count):
                    part = masks[index][place * width : (place + 1) * width]
                    bits = bytearray(part.ljust(4 * num_words, b"\0"))
                    words[sample + place] = torch.frombuffer(bits, dtype=torch.int32)
            sample += count
        return send(words, device)

    def fill(self, output: StepOutput, host: HostSampled) -> None:
        """Writes each row's tokens with their logprobs to the output."""
        bad, sample = set(host.bad), 0
        for index in self.places:
            drafts = self.plan.drafts.get(index, [])
            output.tokens[index] = accepted_tokens(host.tokens, drafts, bad, sample)
            if sample in bad:
                output.bad_rows.append(index)
            if sample in host.logprobs:
                records = range(sample, sample + len(output.tokens[index]))
                output.logprobs[index] = [host.logprobs[record] for record in records]
            sample += len(drafts) + 1
