"""Drives a model by hand over a paged cache with scattered pages, the way the runtime will; for model tests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.layers.step import PagedInputs, StateInputs, Step

GARBAGE = 1.0e4  # what lies in slots nobody has written: finite, and fatal to any sum it leaks into


@dataclass
class HarnessRow:
    tokens: list[int]
    computed: int = 0
    pages: dict[str, list[int]] = field(default_factory=dict)  # by group


class PagedHarness:
    def __init__(self, model: Any, num_pages: int, seed: int, bound_slack: int = 0):
        """`bound_slack`: length bounds exceed the true lengths by up to this much."""
        self.model = model
        self.random = random.Random(seed)
        self.bound_slack = bound_slack
        self.free: dict[str, list[int]] = {}
        self.caches: dict[str, Tensor] = {}
        for spec in model.specs:
            paged = (spec.planes, num_pages, spec.page_tokens) if spec.kind == "paged" else (num_pages,)
            shape = (len(spec.layers), *paged, *spec.shape)
            self.caches[spec.group] = torch.full(shape, GARBAGE, dtype=getattr(torch, spec.dtype))
            self.free[spec.group] = self.random.sample(range(num_pages), num_pages)

    def step(self, work: list[tuple[HarnessRow, int]]) -> Tensor:
        """Compute `count` more tokens of each row in one step; the logits of all of them, [tokens, vocab]."""
        counts = [count for _, count in work]
        starts = [row.computed for row, _ in work]
        tokens = [token for row, count in work for token in row.tokens[row.computed : row.computed + count]]
        positions = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
        assert len(tokens) == len(positions)
        groups: dict[str, PagedInputs | StateInputs] = {}
        for spec in self.model.specs:
            find = self._paged_inputs if spec.kind == "paged" else self._state_inputs
            groups[spec.group] = find(spec, work)
        for row, count in work:
            row.computed += count
        lens = [row.computed for row, _ in work]
        query_starts = torch.tensor([0, *counts]).cumsum(0)
        step = Step(
            tokens=torch.tensor(tokens),
            positions=torch.tensor(positions),
            query_starts=query_starts.int(),
            seq_lens=torch.tensor(lens).int(),
            logits_index=query_starts[1:] - 1,
            groups=groups,
            counts=counts,
            len_bounds=[n + (self.random.randint(0, self.bound_slack) if n > count else 0)
                        for n, count in zip(lens, counts, strict=True)],
        )  # fmt: skip
        with torch.inference_mode():
            return self.model.logits(self.model.forward(step, self.caches))

    def _paged_inputs(self, spec: Any, work: list[tuple[HarnessRow, int]]) -> PagedInputs:
        slots = []
        for row, count in work:
            pages = row.pages.setdefault(spec.group, [])
            while len(pages) * spec.page_tokens < row.computed + count:
                pages.append(self.free[spec.group].pop())
            for position in range(row.computed, row.computed + count):
                slots.append(pages[position // spec.page_tokens] * spec.page_tokens + position % spec.page_tokens)
        table = torch.zeros(len(work), 64, dtype=torch.int32)
        for index, (row, _) in enumerate(work):
            pages = row.pages[spec.group]
            table[index, : len(pages)] = torch.tensor(pages)
        return PagedInputs(table, torch.tensor(slots))

    def _state_inputs(self, spec: Any, work: list[tuple[HarnessRow, int]]) -> StateInputs:
        """A row has one slot, as a page of its own, which begins with zeros."""
        for row, _ in work:
            if spec.group not in row.pages:
                row.pages[spec.group] = [self.free[spec.group].pop()]
                self.caches[spec.group][:, row.pages[spec.group]] = 0.0
        return StateInputs(torch.tensor([row.pages[spec.group][0] for row, _ in work]))

    def ruin_beyond_window(self, row: HarnessRow) -> None:
        """Overwrite the pages of window groups that no coming token may see, as if another request had them now."""
        for spec in self.model.specs:
            if spec.window is not None:
                first_visible = max(0, row.computed - spec.window + 1)
                gone = row.pages[spec.group][: first_visible // spec.page_tokens]
                self.caches[spec.group][:, :, gone] = -GARBAGE


def assert_equals_transformers(model: Any, reference: Any) -> None:
    """Logits of a sequence in chunks and single tokens, to 1e-4 of those of transformers' model."""
    tokens = [(7 * i * i + 3) % 256 for i in range(50)]
    row = HarnessRow(list(tokens))
    harness = PagedHarness(model, num_pages=40, seed=2)
    got = torch.cat([harness.step([(row, count)]) for count in (20, 1, 1, 7, 21)])
    with torch.inference_mode():
        want = reference(torch.tensor([tokens])).logits[0]
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
