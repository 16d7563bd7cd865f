"""Permanent rows: what the device knows of each running request, from the step it joins to the step it leaves.

A row holds the request's tokens, how many of them have state, and where that state lies. Each step is gathered from
rows; the token a step samples is written to its row, where the next step finds it without asking the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.step import PagedInputs, StateInputs, Step
from quire.types import CacheSpec, PageWrite, Plan, RowInit


class DeviceRows:
    def __init__(self, max_rows: int, max_len: int, specs: list[CacheSpec], device: torch.device):
        self.device = device
        self.specs = specs
        max_pages = -(-max_len // specs[0].page_tokens) + 1
        self.tokens = torch.zeros(max_rows, max_len + 1, dtype=torch.int32, device=device)  # one spare: the last sample
        self.computed = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._tables = [
            torch.zeros(max_rows, max_pages if spec.kind == "paged" else 1, dtype=torch.int32, device=device)
            for spec in specs
        ]

    def apply(self, added: list[RowInit], writes: list[PageWrite]) -> None:
        for init in added:
            tokens = torch.tensor(init.tokens, dtype=torch.int32)
            self.tokens[init.row, : len(init.tokens)] = tokens.to(self.device)
            self.computed[init.row] = init.computed
            for table in self._tables:
                table[init.row] = 0
        for write in writes:
            pages = torch.tensor(write.pages, dtype=torch.int32)
            self._tables[write.group][write.row, write.first : write.first + len(write.pages)] = pages.to(self.device)

    def gather(self, plan: Plan) -> tuple[Step, Tensor]:
        """The step's tensors, and the row of each of its samples ([samples])."""
        counts = [row.count for row in plan.rows]
        bounds = [row.start + row.count for row in plan.rows]
        rows = torch.tensor([row.row for row in plan.rows], device=self.device)  # [rows]
        num_tokens, num_rows = sum(counts), len(counts)
        starts = self.computed[rows]  # [rows]: the truth, where the plan only has a bound
        if num_tokens == num_rows:
            query_starts = torch.arange(num_rows + 1, dtype=torch.int32, device=self.device)
            token_rows, positions = rows, starts
            seq_lens = starts + 1
        else:
            sizes = torch.tensor(counts, device=self.device)
            query_starts = torch.zeros(num_rows + 1, dtype=torch.int32, device=self.device)
            query_starts[1:] = torch.cumsum(sizes, 0)
            places = torch.repeat_interleave(torch.arange(num_rows, device=self.device), sizes, output_size=num_tokens)
            offsets = torch.arange(num_tokens, device=self.device) - query_starts[places]
            token_rows, positions = rows[places], starts[places] + offsets
            seq_lens = starts + sizes
        ends, samples = [], []
        total = 0
        for row in plan.rows:
            total += row.count
            if row.wants_sample:
                ends.append(total - 1)
                samples.append(row.row)
        step = Step(
            tokens=self.tokens[token_rows, positions].long(),
            positions=positions,
            query_starts=query_starts,
            seq_lens=seq_lens.to(torch.int32),
            logits_index=torch.tensor(ends, dtype=torch.int64, device=self.device),
            groups=self._groups(rows, token_rows, positions, max(bounds)),
            counts=counts,
            len_bounds=bounds,
        )
        self.computed[rows] = seq_lens
        return step, torch.tensor(samples, dtype=torch.int64, device=self.device)

    def _groups(self, rows: Tensor, token_rows: Tensor, positions: Tensor,
                longest: int) -> dict[str, PagedInputs | StateInputs]:  # fmt: skip
        groups: dict[str, PagedInputs | StateInputs] = {}
        for spec, table in zip(self.specs, self._tables, strict=True):
            if spec.kind == "state":
                groups[spec.group] = StateInputs(table[rows, 0].long())
                continue
            size = spec.page_tokens
            pages = table[token_rows, positions // size].long()
            slots = pages * size + positions % size
            groups[spec.group] = PagedInputs(table[rows, : -(-longest // size)], slots)
        return groups

    def append(self, rows: Tensor, tokens: Tensor) -> None:
        """Each row's sample becomes its next token; rows that sample have caught up, so it lands at `computed`."""
        self.tokens[rows, self.computed[rows]] = tokens.to(torch.int32)
