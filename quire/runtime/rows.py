"""Permanent rows: the device's state of each running request, from its admission to its end.

A row holds the request's tokens, the number of computed tokens and its page tables. Each step's inputs are gathered
from rows; a sampled token is written to its row, where the next step reads it without the host. One extra row stays
empty: it pads captured steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.table import RowOps
from quire.kernels.upload import Arrays, upload
from quire.layers.step import PagedInputs, Samples, StateInputs, Step
from quire.types import CacheSpec, Plan


@dataclass(slots=True)
class Gathered:
    """A step's inputs, with the rows that are sampled."""

    step: Step
    sample_rows: Tensor  # [samples] int64: row of each sample


@dataclass(slots=True)
class Decode:
    """Inputs of a decode step, and each row's parameters for greedy and temperature sampling."""

    step: Step
    lengths: Tensor  # [rows] int64: number of tokens before the sampled one
    keys: Tensor  # [rows] int64: noise keys
    scales: Tensor  # [rows] float32: inverse temperatures, 0: greedy


class DeviceRows:
    """The state of all rows, as tensors on the device."""

    def __init__(
        self,
        max_rows: int,
        max_len: int,
        specs: list[CacheSpec],
        device: torch.device,
        draft_specs: Sequence[CacheSpec] = (),
    ):
        """`draft_specs`: cache groups of the draft network, which follow the model's `specs` in a plan's groups."""
        self.device = device
        self.specs = specs
        self._draft_specs = draft_specs
        self.has_state = any(spec.kind == "state" for spec in specs)
        self.padding_row = max_rows
        self.max_len = max_len
        self._page_tokens = specs[0].page_tokens
        num_rows, max_pages = max_rows + 1, -(-max_len // self._page_tokens) + 1
        # One token more than a sequence may have, because the last sample is written although it is never computed.
        self.tokens = torch.zeros(num_rows, max_len + 1, dtype=torch.int32, device=device)
        self.computed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.keys = torch.zeros(num_rows, dtype=torch.int64, device=device)  # noise keys
        self.scales = torch.zeros(num_rows, dtype=torch.float32, device=device)  # inverse temperatures, 0: greedy
        self._range = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._tables = [
            torch.zeros(num_rows, max_pages if spec.kind == "paged" else 1, dtype=torch.int32, device=device)
            for spec in (*specs, *draft_specs)
        ]

    def apply(self, plan: Plan, draws: Arrays) -> None:
        """Writes the plan's added requests, drafts and page-table entries to the rows in one upload. `draws`: keys and
        scales of the added rows, in their order."""
        added, writes = plan.added, plan.page_writes
        parts: dict[str, Arrays] = {}
        runs: list[tuple[int, int, Sequence[int]]] = [(i.row, 0, i.tokens) for i in added]
        for index, drafts in plan.drafts.items():  # a row with drafts is in one step only, so its start is certain
            row = plan.rows[index]
            runs.append((row.row, row.start + row.count - len(drafts), drafts))
        if runs:
            parts["tokens"] = _cells(runs, self.tokens.shape[1])
        if added:
            rows = np.array([i.row for i in added], np.int64)
            values = {"computed": np.array([i.computed for i in added], np.int64), **draws}
            parts |= {name: {"cells": rows, "values": value} for name, value in values.items()}
        for group, table in enumerate(self._tables):
            mine = [(w.row, w.first, w.pages) for w in writes if w.group == group]
            if mine:
                parts[f"table {group}"] = _cells(mine, table.shape[1])
        if not parts:
            return
        sent = upload(parts, self.device)
        targets = {"tokens": self.tokens, "computed": self.computed, "keys": self.keys, "scales": self.scales}
        targets |= {f"table {group}": table for group, table in enumerate(self._tables)}
        for name, part in sent.items():
            targets[name].view(-1).index_copy_(0, part["cells"], part["values"])

    def gather(self, plan: Plan, sample_bounds: list[int] | None = None) -> Gathered:
        """Gathers the step's inputs. True lengths are read from the rows, because the plan has only bounds of them.
        `sample_bounds`: upper bounds of the samples' lengths, if only their hidden states are needed."""
        bounds = [row.start + row.count for row in plan.rows]
        sent = upload({"step": list_step(plan)}, self.device)["step"]
        return self._gather(sent, [row.count for row in plan.rows], bounds, sample_bounds)

    def gather_fixed(self, sent: dict[str, Tensor], works: dict[str, Any]) -> Gathered:
        """Gathers a step's inputs from arrays on the device that are padded to a fixed size, as CUDA graphs need.
        `works`: each cache group's work lists, see `PagedInputs`."""
        gathered = self._gather(sent, [], [], [self.max_len] * len(sent["sample_rows"]))
        for group, work in works.items():
            inputs = gathered.step.groups[group]
            assert isinstance(inputs, PagedInputs)
            inputs.work = work
        return gathered

    def _gather(
        self, sent: dict[str, Tensor], counts: list[int], bounds: list[int], sample_bounds: list[int] | None
    ) -> Gathered:
        rows = sent["rows"]
        starts = self.computed[rows]  # [rows]
        token_rows, positions = rows, starts
        if "places" in sent:
            token_rows, positions = rows[sent["places"]], starts[sent["places"]] + sent["offsets"]
        seq_lens = starts + sent["counts"]
        step = Step(
            tokens=self.tokens[token_rows, positions].long(),
            positions=positions,
            query_starts=sent["query_starts"],
            seq_lens=seq_lens.to(torch.int32),
            logits_index=sent["logits_index"],
            groups=self._groups(rows, token_rows, positions),
            counts=counts,
            len_bounds=bounds,
            samples=None if sample_bounds is None else Samples(sent["sample_places"], sample_bounds),
        )
        self.computed[rows] = seq_lens
        return Gathered(step, sent["sample_rows"])

    def gather_decode(self, rows: Tensor, ops: RowOps) -> Decode:
        """Gathers a decode step of `rows` [rows] from device memory only, as CUDA graphs need. Rows below 0 are
        padding, whose results are discarded."""
        num_rows = len(rows)
        inputs = ops.gather_rows(rows, self.tokens, self.computed, self.keys, self.scales)
        groups: dict[str, PagedInputs | StateInputs] = {}
        for spec, table in zip(self.specs, self._tables, strict=False):
            if spec.kind == "state":
                groups[spec.group] = StateInputs(table[torch.where(rows < 0, self.padding_row, rows), 0].long())
            else:
                slots = ops.gather_slots(rows, inputs.positions, table, self._page_tokens)
                groups[spec.group] = PagedInputs(table, slots, row_index=rows)
        step = Step(
            tokens=inputs.tokens,
            positions=inputs.positions,
            query_starts=self._range[: num_rows + 1],
            seq_lens=inputs.seq_lens,
            logits_index=self._range[:num_rows],
            groups=groups,
            counts=[1] * num_rows,
            len_bounds=[self.max_len] * num_rows,
        )
        return Decode(step, inputs.lengths, inputs.keys, inputs.scales)

    def gather_verify(self, sent: dict[str, Tensor]) -> Step:
        """Gathers a step whose every token is a row of a decode step, from arrays on the device, as CUDA graphs need.

        `sent`, each [tokens] int64: `rows`, with the padding row behind the step's own, `offsets`: tokens of the same
        row before each, `counts`: tokens of the same row in all, 0 for padding.
        """
        rows, num_tokens = sent["rows"], len(sent["rows"])
        before = self.computed[rows]
        positions = before + sent["offsets"]
        groups: dict[str, PagedInputs | StateInputs] = {}
        for spec, table in zip(self.specs, self._tables, strict=False):
            assert spec.kind == "paged", "recurrent state takes a row's tokens in turn"
            groups[spec.group] = PagedInputs(table, self._slots(table, rows, positions), row_index=rows)
        starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=self.device)
        step = Step(
            tokens=self.tokens[rows, positions].long(),
            positions=positions,
            query_starts=starts,
            seq_lens=(positions + 1).to(torch.int32),
            logits_index=starts[:num_tokens],
            groups=groups,
            counts=[1] * num_tokens,
            len_bounds=[self.max_len] * num_tokens,
        )
        self.computed[rows] = before + sent["counts"]
        return step

    def _groups(self, rows: Tensor, token_rows: Tensor, positions: Tensor) -> dict[str, PagedInputs | StateInputs]:
        groups: dict[str, PagedInputs | StateInputs] = {}
        for spec, table in zip(self.specs, self._tables, strict=False):
            if spec.kind == "state":
                groups[spec.group] = StateInputs(table[rows, 0].long())
            else:
                groups[spec.group] = self._pages(table, rows, token_rows, positions)
        return groups

    def draft_groups(self, rows: Tensor, token_rows: Tensor, positions: Tensor) -> dict[str, PagedInputs | StateInputs]:
        """Returns the inputs of the draft network's groups for entries at `positions` [tokens] of `token_rows`
        [tokens], which belong to `rows` [rows]."""
        tables = self._tables[len(self.specs) :]
        pairs = zip(self._draft_specs, tables, strict=True)
        return {spec.group: self._pages(table, rows, token_rows, positions) for spec, table in pairs}

    def _pages(self, table: Tensor, rows: Tensor, token_rows: Tensor, positions: Tensor) -> PagedInputs:
        slots = self._slots(table, token_rows, positions)
        # Page tables are copied at full width: kernels are compiled for one width, and the copy is cheaper.
        return PagedInputs(table.index_select(0, rows), slots)

    def _slots(self, table: Tensor, token_rows: Tensor, positions: Tensor) -> Tensor:
        size = self._page_tokens
        return table[token_rows, positions // size].long() * size + positions % size

    def append(self, rows: Tensor, lengths: Tensor, tokens: Tensor) -> None:
        """Writes each sample behind the tokens it follows. What follows a rejected draft is overwritten later."""
        self.tokens[rows, lengths] = tokens.to(torch.int32)


def list_step(plan: Plan) -> Arrays:
    """Returns a plan's rows, and the indices of their tokens and samples, as arrays."""
    counts = np.array([row.count for row in plan.rows], np.int64)
    ends = np.cumsum(counts)
    rows = np.array([row.row for row in plan.rows], np.int64)
    sampled = np.flatnonzero(np.array([row.wants_sample for row in plan.rows], bool))
    host: Arrays = {
        "rows": rows,
        "counts": counts,
        "query_starts": np.concatenate(([0], ends)).astype(np.int32),
        "logits_index": ends[sampled] - 1,
        "sample_places": sampled,
        "sample_rows": rows[sampled],
    }
    if plan.drafts:
        each = 1 + np.array([plan.rows[place].num_drafts for place in sampled], np.int64)
        behind = np.repeat(np.cumsum(each), each) - np.arange(1, each.sum() + 1)  # the row's samples after each sample
        places = np.repeat(sampled, each)
        host |= {"logits_index": ends[places] - 1 - behind, "sample_places": places, "sample_rows": rows[places]}
    if counts.sum() > len(counts):  # some rows compute several tokens
        host["places"] = np.repeat(np.arange(len(counts)), counts)
        host["offsets"] = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    return host


def _cells(runs: Sequence[tuple[int, int, Sequence[int]]], width: int) -> Arrays:
    """Flattens runs of (row, first column, values) to cell indices of a table of this width, and values."""
    if all(len(values) == 1 for _, _, values in runs):  # most steps: one new page for each row that filled its last
        at = [row * width + first for row, first, _ in runs]
        return {"cells": np.array(at, np.int64), "values": np.array([values[0] for _, _, values in runs], np.int32)}
    cells = [np.arange(row * width + first, row * width + first + len(values)) for row, first, values in runs]
    values = [np.frombuffer(_packed(values), np.int32) for _, _, values in runs]
    return {"cells": np.concatenate(cells).astype(np.int64), "values": np.concatenate(values)}


def _packed(values: Sequence[int]) -> array[int]:
    """Returns the values as an array. Prompts are arrays already; for other lists this takes a sixth of the time of
    np.array. No value is negative."""
    return values if isinstance(values, array) else array("I", values)
