"""Permanent rows: what the device knows of each running request, from the step it joins to the step it leaves.

A row holds the request's tokens, how many of them have state, and where that state lies. Each step is gathered from
rows; the token a step samples is written to its row, where the next step finds it without asking the host. One row
more than there are requests is kept empty: the padding of steps that were captured for more rows than there are.
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
from quire.types import CacheSpec, PageWrite, Plan, RowInit


@dataclass(slots=True)
class Gathered:
    step: Step
    sample_rows: Tensor  # [samples] int64: the row of each sample


@dataclass(slots=True)
class Decode:
    """A step of one token a row, and what a plain sampler needs of each row."""

    step: Step
    lengths: Tensor  # [rows] int64: tokens before the one that will be sampled
    keys: Tensor  # [rows] int64
    scales: Tensor  # [rows] float32


class DeviceRows:
    def __init__(self, max_rows: int, max_len: int, specs: list[CacheSpec], device: torch.device):
        self.device = device
        self.specs = specs
        self.padding_row = max_rows
        self.max_len = max_len
        self._page_tokens = specs[0].page_tokens
        num_rows, max_pages = max_rows + 1, -(-max_len // self._page_tokens) + 1
        # One token more than a sequence may have: the last sample is written, though never computed.
        self.tokens = torch.zeros(num_rows, max_len + 1, dtype=torch.int32, device=device)
        self.computed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.keys = torch.zeros(num_rows, dtype=torch.int64, device=device)  # of the noise
        self.scales = torch.zeros(num_rows, dtype=torch.float32, device=device)  # inverse temperatures, 0: greedy
        self._range = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._tables = [
            torch.zeros(num_rows, max_pages if spec.kind == "paged" else 1, dtype=torch.int32, device=device)
            for spec in specs
        ]

    def apply(self, added: list[RowInit], writes: list[PageWrite], draws: Arrays) -> None:
        """Requests that take a row, and pages that rows were given, in one upload. `draws`: the keys and scales of the
        rows added, in that order."""
        parts: dict[str, Arrays] = {}
        if added:
            parts["tokens"] = _cells([(i.row, 0, i.tokens) for i in added], self.tokens.shape[1])
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

    def gather(self, plan: Plan, samples_only: bool = False) -> Gathered:
        """The step's tensors. Lengths are read from the rows: the plan only has bounds of them. `samples_only`: the
        hidden states of tokens that are not sampled are not wanted."""
        bounds = [row.start + row.count for row in plan.rows]
        sent = upload({"step": list_step(plan)}, self.device)["step"]
        samples = [row.start + row.count for row in plan.rows if row.wants_sample] if samples_only else None
        return self._gather(sent, [row.count for row in plan.rows], bounds, samples)

    def gather_fixed(self, sent: dict[str, Tensor], works: dict[str, Any]) -> Gathered:
        """The same from lists that are on the device already, padded to a fixed size: what a graph can be captured of.
        `works`: of each group, see `PagedInputs`."""
        gathered = self._gather(sent, [], [], [self.max_len] * len(sent["sample_rows"]))
        for group, work in works.items():
            inputs = gathered.step.groups[group]
            assert isinstance(inputs, PagedInputs)
            inputs.work = work
        return gathered

    def _gather(self, sent: dict[str, Tensor], counts: list[int], bounds: list[int],
                sample_bounds: list[int] | None) -> Gathered:  # fmt: skip
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
        """A step of one token for each of `rows` [rows], from the device alone: what a graph can be captured of. Rows
        below 0 are padding: nothing of them is kept."""
        num_rows = len(rows)
        inputs = ops.gather_rows(rows, self.tokens, self.computed, self.keys, self.scales)
        groups: dict[str, PagedInputs | StateInputs] = {}
        for spec, table in zip(self.specs, self._tables, strict=True):
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

    def _groups(self, rows: Tensor, token_rows: Tensor, positions: Tensor) -> dict[str, PagedInputs | StateInputs]:
        groups: dict[str, PagedInputs | StateInputs] = {}
        size = self._page_tokens
        for spec, table in zip(self.specs, self._tables, strict=True):
            if spec.kind == "state":
                groups[spec.group] = StateInputs(table[rows, 0].long())
            else:
                slots = table[token_rows, positions // size].long() * size + positions % size
                # Whole rows: kernels are compiled for one width, and copying a little more costs less.
                groups[spec.group] = PagedInputs(table.index_select(0, rows), slots)
        return groups

    def append(self, rows: Tensor, tokens: Tensor) -> None:
        """Each row's sample becomes its next token; rows that sample have caught up, so it lands at `computed`."""
        self.tokens[rows, self.computed[rows]] = tokens.to(torch.int32)


def list_step(plan: Plan) -> Arrays:
    """A plan's rows and tokens as arrays."""
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
    if counts.sum() > len(counts):  # some rows compute several tokens
        host["places"] = np.repeat(np.arange(len(counts)), counts)
        host["offsets"] = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    return host


def _cells(runs: Sequence[tuple[int, int, Sequence[int]]], width: int) -> Arrays:
    """Where (row, first column, values) lie in a table of this width, flattened."""
    if all(len(values) == 1 for _, _, values in runs):  # a page for whoever filled its last: most steps
        at = [row * width + first for row, first, _ in runs]
        return {"cells": np.array(at, np.int64), "values": np.array([values[0] for _, _, values in runs], np.int32)}
    cells = [np.arange(row * width + first, row * width + first + len(values)) for row, first, values in runs]
    values = [np.frombuffer(_packed(values), np.int32) for _, _, values in runs]
    return {"cells": np.concatenate(cells).astype(np.int64), "values": np.concatenate(values)}


def _packed(values: Sequence[int]) -> array[int]:
    """Prompts come packed; other lists take a sixth of np.array's time this way. Nothing here is negative."""
    return values if isinstance(values, array) else array("I", values)
