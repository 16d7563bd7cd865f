"""Runs a draft network beside the model: it follows every step, and proposes drafts for the rows that the plan names.

After a step has sampled, the network computes the step's tokens (a head: from the model's hidden states), so that its
cache is never behind the model's, whatever happens to a request. For rows with proposals it then samples drafts one by
one, with the noise and parameters that the model's own samples will have, so that a sampled draft is accepted as often
as the two distributions agree. The runner calls it; the drafts return to the host with the step's output.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.kernels.upload import upload
from quire.layers.step import Samples, Step
from quire.models.drafting import DraftNetwork
from quire.runtime.rows import DeviceRows
from quire.sampling.batch import Histories
from quire.sampling.rejection import for_drafting
from quire.sampling.rows import SamplingRows
from quire.sampling.sampler import Sampler, processed_logits
from quire.types import Plan, StepOutput


@dataclass(slots=True)
class Following:
    """The entries that a draft network computes for one step, as indices on the device."""

    plan: Plan
    counts: list[int]  # entries per row of the plan
    asking: list[int]  # plan indices of the rows with proposals, those with most first
    arrays: dict[str, Tensor]
    starts: Tensor  # [rows] int64: tokens computed before the step


@dataclass(slots=True)
class Proposed:
    """The drafts of one step. A row with fewer than the longest has any values behind its own."""

    asking: list[int]  # plan indices
    lengths: list[int]  # drafts of each
    tokens: Tensor  # [asking, longest] int64
    chances: Tensor  # [asking, longest] float32: the network's own probabilities
    clock: Clock

    def start_copy(self) -> Proposed:
        """Starts a copy to the host; the caller waits for it, with an event, before `fill`."""
        tokens, chances = (part.to("cpu", non_blocking=True) for part in (self.tokens, self.chances))
        return replace(self, tokens=tokens, chances=chances)

    def fill(self, output: StepOutput) -> None:
        """Writes the drafts to the output."""
        for index, length, tokens, chances in zip(
            self.asking, self.lengths, self.tokens.tolist(), self.chances.tolist(), strict=True
        ):
            output.drafts[index] = tokens[:length]
            output.draft_chances[index] = chances[:length]
        output.draft_seconds = self.clock.seconds()


class Clock:
    """Times what a device does between `__init__` and `stop`, without waiting for it."""

    def __init__(self, device: torch.device):
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)]
            self._events[0].record()
        self._began = self._ended = time.perf_counter()

    def stop(self) -> None:
        self._ended = time.perf_counter()
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        """Returns the time between; on CUDA only once both ends have passed."""
        if self._events:
            return float(self._events[0].elapsed_time(self._events[1])) / 1000
        return self._ended - self._began


class Proposals:
    """A draft network with its place in a runner."""

    def __init__(
        self,
        network: DraftNetwork,
        caches: Mapping[str, Tensor],
        rows: DeviceRows,
        sampling: SamplingRows,
        sampler: Sampler,
        *,
        keeps_distributions: bool = False,
    ):
        """`keeps_distributions`: drafts are drawn with noise of their own, and what they were drawn from is kept for
        verification by rejection."""
        self._kept: dict[int, list[Tensor]] | None = {} if keeps_distributions else None  # device row -> each [vocab]
        self._network = network
        self._caches = caches
        self._rows = rows
        self._sampling = sampling
        self._sampler = sampler
        self._lag = int(network.takes_hidden)  # how far a token's entry is before the token

    @property
    def takes_hidden(self) -> bool:
        return self._network.takes_hidden

    def kept(self, row: int) -> list[Tensor]:
        """Returns the distributions that a row's last drafts were drawn from, each [vocab] float32."""
        return [] if self._kept is None else self._kept.get(row, [])

    def begin(self, plan: Plan) -> Following:
        """Notes the rows' lengths. Called before the model's forward pass, which moves them."""
        # A row with proposals also computes the token that the step samples.
        extra = 1 - self._lag
        counts = [row.count + (extra if index in plan.proposals else 0) for index, row in enumerate(plan.rows)]
        asking = sorted(plan.proposals, key=lambda index: -plan.proposals[index])
        ends = np.cumsum(counts)
        places = np.repeat(np.arange(len(counts)), counts)
        asked = np.array(asking, np.int64)
        order = {index: place for place, index in enumerate(i for i, row in enumerate(plan.rows) if row.wants_sample)}
        sent = upload(
            {
                "following": {
                    "rows": np.array([row.row for row in plan.rows], np.int64),
                    "places": places,
                    "offsets": np.arange(ends[-1]) - np.repeat(ends - counts, counts),
                    "counts": np.array(counts, np.int64),
                    "query_starts": np.concatenate(([0], ends)).astype(np.int32),
                    "asked": asked,
                    "asked_rows": np.array([plan.rows[index].row for index in asking], np.int64),
                    "asked_begins": (ends - counts)[asked] if asking else asked,
                    "asked_samples": np.array([order[index] for index in asking], np.int64),
                }
            },
            self._rows.device,
        )["following"]
        return Following(plan, counts, asking, sent, self._rows.computed[sent["rows"]])

    def run(self, following: Following, hidden: Tensor | None, lengths: Tensor | None) -> Proposed | None:
        """Follows a step, and proposes. hidden [tokens, width]: the model's, if the network takes them. lengths
        [sampled rows] int64: the place of the token that each has sampled last; None if none has sampled."""
        sent, lag = following.arrays, self._lag
        rows, places = sent["rows"], sent["places"]
        positions = following.starts[places] + sent["offsets"]
        token_rows = rows[places]
        newest = begins = None
        if following.asking:
            assert lengths is not None
            newest = lengths[sent["asked_samples"]]  # [asking]
            begins = sent["asked_begins"] + newest - lag - following.starts[sent["asked"]]
        bounds = [row.start + count for row, count in zip(following.plan.rows, following.counts, strict=True)]
        asking_bounds = [bounds[index] for index in following.asking]
        step = Step(
            tokens=self._known(self._rows.tokens[token_rows, positions + lag].long()),
            positions=positions,
            query_starts=sent["query_starts"],
            seq_lens=(following.starts + sent["counts"]).to(torch.int32),
            logits_index=sent["asked"] if begins is None else begins,
            groups=self._rows.draft_groups(rows, token_rows, positions),
            counts=following.counts,
            len_bounds=bounds,
            samples=Samples(sent["asked"], asking_bounds),
        )
        out = self._network.forward(step, hidden, self._caches)
        if newest is None:
            return None
        return self._propose(following, out, newest, asking_bounds)

    def _propose(self, following: Following, hidden: Tensor, newest: Tensor, bounds: list[int]) -> Proposed:
        """Samples drafts. hidden [asking, width]: the network's, at the newest token of each row."""
        plan, device = following.plan, self._rows.device
        wanted = [plan.proposals[index] for index in following.asking]
        all_rows = following.arrays["asked_rows"]
        tokens = torch.zeros(len(wanted), wanted[0], dtype=torch.int64, device=device)
        chances = torch.zeros(len(wanted), wanted[0], dtype=torch.float32, device=device)
        clock = Clock(device)
        for place in range(wanted[0]):
            num = sum(count > place for count in wanted)  # rows are in the order of their number of drafts
            rows, before = all_rows[:num], newest[:num] + place + 1
            host_rows = [plan.rows[index].row for index in following.asking[:num]]
            logits = self._fit(self._network.logits(hidden[:num]))
            histories = Histories(self._rows.tokens, rows, before, [bound + place + 1 for bound in bounds[:num]])
            batch = replace(self._sampling.gather(host_rows), logprobs=None)
            if self._kept is not None:
                batch = for_drafting(batch)
                self._keep(host_rows, torch.softmax(processed_logits(logits.float(), batch, histories), 1), place)
            sampled = self._sampler.sample(logits, batch, histories).tokens
            self._rows.append(rows, before, sampled)
            tokens[:num, place] = sampled
            chances[:num, place] = torch.softmax(logits.float(), 1).gather(1, sampled[:, None])[:, 0]
            num = sum(count > place + 1 for count in wanted)
            if num:
                step = self._one_token(all_rows[:num], sampled[:num], before[:num] - self._lag, bounds, place + 1)
                hidden = self._network.forward(step, hidden[:num], self._caches)
        clock.stop()
        return Proposed(following.asking, wanted, tokens, chances, clock)

    def _keep(self, rows: list[int], distributions: Tensor, place: int) -> None:
        """Keeps what the drafts in one place of these rows are drawn from. distributions [rows, vocab]"""
        assert self._kept is not None
        for row, distribution in zip(rows, distributions, strict=True):
            if not place:
                self._kept[row] = []
            self._kept[row].append(distribution)

    def _one_token(self, rows: Tensor, tokens: Tensor, positions: Tensor, bounds: list[int], more: int) -> Step:
        num = len(rows)
        arange = torch.arange(num + 1, dtype=torch.int32, device=rows.device)
        return Step(
            tokens=self._known(tokens),
            positions=positions,
            query_starts=arange,
            seq_lens=(positions + 1).to(torch.int32),
            logits_index=arange[:num].long(),
            groups=self._rows.draft_groups(rows, rows, positions),
            counts=[1] * num,
            len_bounds=[bound + more for bound in bounds[:num]],
        )

    def _known(self, tokens: Tensor) -> Tensor:
        """Replaces tokens that only the model's padded vocabulary has."""
        return tokens.clamp(max=self._network.vocab_size - 1)

    def _fit(self, logits: Tensor) -> Tensor:
        """Fits the network's logits to the model's vocabulary, where one of the two is padded."""
        missing = self._sampling.vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self._sampling.vocab_size].contiguous() if missing else logits
