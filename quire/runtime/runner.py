"""Executes plans on one device: row updates and copies first, then the forward pass, then sampling.

Implements the engine's `Workers` protocol for a device in this process. It makes no decisions: every change on the
device comes from the plans, in their order, so results do not depend on how far the device lags behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.models.adapters.places import Places
from quire.models.model import Model
from quire.runtime.adapters import DeviceAdapters
from quire.runtime.graphs import DecodeGraphs
from quire.runtime.guard import enter_device
from quire.runtime.mixed_graphs import MixedGraphs
from quire.runtime.proposals import Following, Proposals, Proposed
from quire.runtime.rejection import Rejection
from quire.runtime.rows import DeviceRows
from quire.runtime.samples import StepSamples
from quire.runtime.store import CacheStore
from quire.runtime.verify_graphs import VerifyGraphs
from quire.sampling.batch import Batch, Histories
from quire.sampling.logprobs import Logprobs, prompt_logprobs, to_records
from quire.sampling.rows import SamplingRows
from quire.sampling.sampler import Sampled, TokenSampler, start_copy, to_host
from quire.types import Plan, PlanRow, QuireError, StepOutput


def warm_up_sizes(max_rows: int, max_batch_tokens: int) -> Iterator[tuple[int, int]]:
    """Yields (decode rows, prefill tokens) of warm-up steps that together use all kernel variants, since variants
    change at powers of two or less often. The first is a single request's step; the last is the largest possible, which
    warms up the allocator and the libraries."""
    few, many = 1, 3  # 1, 2, 3, 4, 6, 8, 12, ...
    while few <= max_rows:
        yield few, 32
        few, many = sorted((many, 2 * few))
    while few < max_batch_tokens:
        yield 0, few
        few, many = sorted((many, 2 * few))
    yield 0, max_batch_tokens


@dataclass(slots=True)
class Forward:
    """A launched forward pass and its outputs that sampling needs."""

    plan: Plan
    rows: Tensor | None  # [samples]; None: no samples
    logits: Tensor | None  # [samples, vocab] float32; None: no samples, or sampled by the graph
    prompt: dict[int, tuple[Logprobs, int]]  # plan index -> logprobs of its prefilled tokens, number of alternatives
    pooled: dict[int, Tensor] = field(default_factory=dict)  # plan index -> [width], for prompts completed by the step
    chosen: Sampled | None = None  # tokens sampled by the graph, being copied to the host
    following: Following | None = None  # the entries of the draft network, if there is one
    hidden: Tensor | None = None  # [tokens, width], if the draft network takes them


class Runner:
    """Runs the plans of one engine on one device."""

    def __init__(
        self,
        model: Model,
        store: CacheStore,
        rows: DeviceRows,
        sampling: SamplingRows,
        sampler: TokenSampler,
        graphs: DecodeGraphs | None = None,
        mixed: MixedGraphs | None = None,
        verify: VerifyGraphs | None = None,
        *,
        proposals: Proposals | None = None,
        rejection: Rejection | None = None,
        adapters: DeviceAdapters | None = None,
        incoming: Callable[[], Tensor | None] = lambda: None,
        max_batch_tokens: int = 0,
    ):
        """`incoming`: returns the residual stream of the next step from the pipeline stage before this one."""
        self._model = model
        self._max_batch_tokens = max_batch_tokens
        self.store = store
        self._rows = rows
        self._sampling = sampling
        self._sampler = sampler
        self._graphs = graphs
        self._mixed = mixed
        self._verify = verify
        self._proposals = proposals
        self._rejection = rejection
        self.adapters = adapters
        self._incoming = incoming
        self._prompt_top: dict[int, tuple[int, int]] = {}  # row -> (prompt length, number of alternatives)
        self._pooling: dict[int, Pooling] = {}  # row -> its hidden states pooled up to now

    def replace_model(self, model: Model | None, places: Places | None) -> None:
        """Computes later steps with another model of the same layout; None: with none, until another call. `places`:
        the new model's weights for adapters. Only while no step is in flight."""
        if self._proposals is not None:
            what = "Weights can't be replaced under a draft network."
            raise QuireError("unsupported_command", what, "Start with --speculate suffix or off.")
        self._model = model  # type: ignore[assignment]
        if self._graphs is not None:  # captured steps read the old weights
            self._graphs = self._mixed = self._verify = None
        if self.adapters is not None:
            self.adapters.leave_model()
        if model is not None:
            self.store.restore()
            if self.adapters is not None and places is not None:
                self.adapters.move_to(model, places)

    @torch.inference_mode()
    def forward(self, plan: Plan) -> Forward:
        enter_device(self._rows.device)
        self._apply(plan)
        if not plan.rows:
            return Forward(plan, None, None, {})
        following = self._proposals.begin(plan) if self._proposals is not None else None
        keeps_hidden = self._proposals is not None and self._proposals.takes_hidden
        route = None if self.adapters is None else self.adapters.route(plan)
        if self.adapters is None or route is None:
            forward = self._forward(plan, keeps_hidden)
        else:
            with self.adapters.routed(route):
                forward = self._run_step(plan, keeps_hidden)
        forward.following = following
        return forward

    def _forward(self, plan: Plan, keeps_hidden: bool) -> Forward:
        """Computes the step, as a graph if one fits. `keeps_hidden`: the hidden states of all tokens are needed
        afterwards."""
        if (
            self._graphs is not None
            and not self._pooling
            and all(row.count == 1 and row.wants_sample for row in plan.rows)
        ):
            rows = [row.row for row in plan.rows]
            decoded = self._graphs.run(rows, choose=not plan.may_mask and self._sampling.is_plain(rows))
            self.store.apply(plan.snapshots)
            return Forward(plan, decoded.rows, decoded.logits, {}, chosen=decoded.chosen, hidden=decoded.hidden)
        if self._verify is not None and not self._pooling and self._verify.fits(plan):
            verified = self._verify.run(plan)
            self.store.apply(plan.snapshots)
            return Forward(plan, verified.rows, verified.logits, {}, hidden=verified.hidden)
        samples_only = not (self._pooling or self._prompt_top or keeps_hidden)
        if self._mixed is not None and samples_only:
            sampled = [row.row for row in plan.rows if row.wants_sample]
            plain = not (plan.may_mask or plan.drafts) and self._sampling.is_plain(sampled)
            computed = self._mixed.run(plan, choose=plain)
            if computed is not None:
                self.store.apply(plan.snapshots)
                if not sampled:
                    return Forward(plan, None, None, {})
                logits = self._model.logits(computed.hidden) if computed.chosen is None else None
                return Forward(plan, computed.rows, logits, {}, chosen=computed.chosen)
        return self._run_step(plan, keeps_hidden)

    def _run_step(self, plan: Plan, keeps_hidden: bool) -> Forward:
        """Computes the step, operation by operation."""
        samples_only = not (self._pooling or self._prompt_top or keeps_hidden)
        samples = StepSamples.of(plan)
        gathered = self._rows.gather(plan, samples.bounds if samples_only else None)
        step = gathered.step
        step.adapters = None if self.adapters is None else self.adapters.active
        step.stream = self._incoming()
        hidden = self._model.forward(step, self.store.tensors)  # [tokens, width], or [samples, width]
        self.store.apply(plan.snapshots)
        scores, pooled = self._prompt_logprobs(plan, hidden), self._pool(plan, hidden)
        kept = hidden if keeps_hidden else None
        if not len(step.logits_index):
            return Forward(plan, None, None, scores, pooled, hidden=kept)
        if not samples_only:
            hidden = hidden[step.logits_index]
        return Forward(plan, gathered.sample_rows, self._model.logits(hidden), scores, pooled, hidden=kept)

    @torch.inference_mode()
    def sample(self, forward: Forward, masks: Mapping[int, bytes] | None = None) -> StepTicket:
        if forward.chosen is not None:
            assert forward.rows is not None
            lengths = self._rows.computed[forward.rows] if forward.following is not None else None
            return StepTicket(forward, forward.chosen, proposed=self._propose(forward, lengths))
        if forward.logits is None or forward.rows is None:
            return StepTicket(forward, proposed=self._propose(forward, None))
        rows, samples = forward.rows, StepSamples.of(forward.plan)
        batch = self._sampling.gather(samples.rows)
        lengths = samples.lengths(self._rows.computed[rows])
        histories = Histories(self._rows.tokens, rows, lengths, samples.bounds)
        mask = samples.masks(masks, self._model.vocab_size, self._rows.device) if masks else None
        sampled = self._sampler.sample(forward.logits, batch, histories, mask)
        if self._rejection is not None and forward.plan.drafts:
            sampled = self._rejection.apply(sampled, samples, forward.logits, batch, histories, mask)
        self._rows.append(rows, lengths, sampled.tokens)
        newest = samples.settle(self._rows, sampled.tokens, sampled.bad, lengths)
        return StepTicket(forward, sampled, batch, self._propose(forward, newest))

    def _propose(self, forward: Forward, newest: Tensor | None) -> Proposed | None:
        """Lets the draft network follow the step. newest [sampling rows] int64: the place of each one's last token."""
        if self._proposals is None or forward.following is None:
            return None
        return self._proposals.run(forward.following, forward.hidden, newest)

    def warm_ups(self) -> Iterator[None]:
        """Warm-up in small pieces, between steps: kernels of a single request first, then those of larger steps, then
        CUDA graphs."""
        if self._graphs is None:
            return
        if self._model.captures_decodes_only():
            yield from self._graphs.capture_missing()
            return
        for num_decodes, num_tokens in warm_up_sizes(self._rows.padding_row, self._max_batch_tokens):
            self.warm_up(num_decodes, num_tokens)
            yield
        yield from self._graphs.capture_missing()
        if self._verify is not None:
            yield from self._verify.capture_missing()
        if self._mixed is not None:
            yield from self._mixed.capture_missing()

    @torch.inference_mode()
    def warm_up(self, num_decodes: int, num_tokens: int) -> None:
        """Runs a warm-up step of padding rows: `num_decodes` decode rows, then prefill rows of `num_tokens` tokens in
        all. Its results are discarded."""
        padding, most = self._rows.padding_row, self._rows.max_len
        counts = [1] * num_decodes + [min(most, num_tokens - begin) for begin in range(0, num_tokens, most)]
        count = len(counts)
        plan = Plan(0, [PlanRow("", padding, 0, tokens, 0, True) for tokens in counts])
        gathered = self._rows.gather(plan, counts)
        logits = self._model.logits(self._model.forward(gathered.step, self.store.tensors))
        batch = self._sampling.gather([padding] * count)
        zeros = torch.zeros_like(gathered.sample_rows)
        self._sampler.sample(logits, batch, Histories(self._rows.tokens, gathered.sample_rows, zeros, [1] * count))
        self._rows.computed[padding].zero_()

    def close(self) -> None:
        pass

    def _apply(self, plan: Plan) -> None:
        for row in plan.freed:
            self._sampling.clear(row)
            self._prompt_top.pop(row, None)
            self._pooling.pop(row, None)
        if self.adapters is not None:
            self.adapters.apply(plan)
        for init in plan.added:
            self._sampling.set(init)
            if init.params.prompt_logprobs is not None:
                self._prompt_top[init.row] = (init.prompt_len, init.params.prompt_logprobs)
            if init.params.pooling is not None:
                self._pooling[init.row] = Pooling(init.params.pooling, init.prompt_len)
        self.store.apply(plan.copies)
        draws = self._sampling.draws([init.row for init in plan.added]) if plan.added else {}
        self._rows.apply(plan, draws)

    def _prompt_logprobs(self, plan: Plan, hidden: Tensor) -> dict[int, tuple[Logprobs, int]]:
        """Scores this chunk's prompt tokens in rows with prompt logprobs: plan index -> (scores, alternatives)."""
        found = {}
        begin = 0
        for index, row in enumerate(plan.rows):
            wanted = self._prompt_top.get(row.row)
            if wanted is not None:
                prompt_len, num_top = wanted
                count = min(row.count, prompt_len - 1 - row.start)  # the last prompt token predicts the first sample
                if count > 0:
                    targets = self._rows.tokens[row.row, row.start + 1 : row.start + 1 + count].long()
                    with self._row_routed(row.row):
                        scored = prompt_logprobs(self._model.logits, hidden[begin : begin + count], targets, num_top)
                    found[index] = (scored, num_top)
            begin += row.count
        return found

    def _row_routed(self, row: int) -> AbstractContextManager[None]:
        """Within it, all that is computed is of this row, with its adapter."""
        return nullcontext() if self.adapters is None else self.adapters.routed(self.adapters.route_of_row(row))

    def _pool(self, plan: Plan, hidden: Tensor) -> dict[int, Tensor]:
        """Adds this chunk's hidden states to pooling rows; returns the vectors of prompts that it completes."""
        found = {}
        begin = 0
        for index, row in enumerate(plan.rows if self._pooling else ()):
            pooling = self._pooling.get(row.row)
            if pooling is not None and row.start < pooling.prompt_len:
                pooling.add(hidden[begin : begin + row.count])
                if row.start + row.count >= pooling.prompt_len:
                    found[index] = pooling.result()
            begin += row.count
        return found


class Pooling:
    """Pools the hidden states of one prompt, chunk by chunk, to one float32 vector."""

    def __init__(self, kind: str, prompt_len: int):
        self._kind = kind
        self.prompt_len = prompt_len
        self._total: Tensor | None = None  # [width]

    def add(self, hidden: Tensor) -> None:
        """Adds a chunk's hidden states, [tokens, width]."""
        new = hidden[-1].float() if self._kind == "last" else hidden.float().sum(0)
        self._total = new if self._total is None or self._kind == "last" else self._total + new

    def result(self) -> Tensor:
        assert self._total is not None
        return self._total if self._kind == "last" else self._total / self.prompt_len


class StepTicket:
    """A step's results, which `wait` reads from the device; implements `Ticket`."""

    def __init__(
        self,
        forward: Forward,
        sampled: Sampled | None = None,
        batch: Batch | None = None,
        proposed: Proposed | None = None,
    ):
        self._proposed = proposed
        self._forward = forward
        self._sampled = sampled
        self._batch = batch
        self._copied: torch.cuda.Event | None = None
        if sampled is not None and forward.rows is not None and forward.rows.is_cuda:
            self._sampled = start_copy(sampled) if sampled.tokens.is_cuda else sampled
            if proposed is not None:
                self._proposed = proposed.start_copy()
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> StepOutput:
        plan = self._forward.plan
        output = StepOutput(plan.step, [[] for _ in plan.rows])
        for index, (scored, num_top) in self._forward.prompt.items():
            output.prompt_logprobs[index] = to_records(scored, num_top)
        output.pooled = {index: vector.tolist() for index, vector in self._forward.pooled.items()}
        if self._sampled is None:
            return output
        if self._copied is not None:
            self._copied.synchronize()
        host = to_host(self._sampled, self._batch.logprobs if self._batch is not None else None)
        StepSamples.of(plan).fill(output, host)
        if self._proposed is not None:
            self._proposed.fill(output)
        return output
