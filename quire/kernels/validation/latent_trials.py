"""Trials of latent attention (MLA) on a model's own shape, and of Hopper's kernel for many heads, which enters the ops
table of models that gain from it; see `trials` and `hopper_trial`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quire.kernels.table import REFERENCE, Ops
from quire.kernels.validation.hopper_trial import runs_on_hopper, settle_row
from quire.kernels.validation.trial_results import Findings
from quire.kernels.validation.trials import (
    FEW_TOKENS,
    NUM_TOKENS,
    KernelTrial,
    compare,
    contiguous,
    finish_writes,
    is_fp8,
    normal,
    reference_for,
    rope_frequencies,
)

NAME = "latent kernel for many heads"


@dataclass(frozen=True, slots=True)
class LatentTrialShape:
    """The properties of a model that decide whether a kernel supports it and how it is compiled."""

    num_heads: int
    rank: int
    rope_dim: int
    page_tokens: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    max_len: int = 2048
    nope_dim: int = 128
    q_rank: int | None = None  # rank of the query projection; None: queries and entries come from one projection
    interleaved: bool = True
    value_dim: int = 128


@dataclass(frozen=True, slots=True)
class RowLengths:
    """The rows of a trial step."""

    counts: tuple[int, ...]  # tokens computed per row
    lens: tuple[int, ...]  # length per row, with these tokens


LENS = (1, 64, 65, 300)
# A large decode step and a mixed step.
MANY: Sequence[RowLengths] = (
    RowLengths((1,) * 32, LENS * 8),
    RowLengths((1, 20, 9, 1), LENS),
)
ONE_REQUEST: Sequence[RowLengths] = (
    RowLengths((NUM_TOKENS,), (NUM_TOKENS,)),
    RowLengths((1,), (NUM_TOKENS,)),
)  # the steps of a first request: prefill, then decode


def settle_latent(
    ops: Ops, shape: LatentTrialShape, device: torch.device, *, strict: bool, findings: Findings | None = None
) -> Ops:
    """Returns the table with the kernel, or unchanged if the kernel does not fit or fails; see
    `hopper_trial.settle_row`."""
    if not runs_on_hopper(ops, device):
        return ops
    from quire.kernels.triton.latent.work_list import prefers_hopper

    if not prefers_hopper(
        shape.num_heads, shape.rank, shape.rope_dim, shape.page_tokens, shape.dtype, shape.cache_dtype
    ):
        return ops

    def exchange() -> Ops:
        from quire.kernels.triton.latent import many_heads

        return replace(ops, latent_attention=many_heads.latent_attention)

    return settle_row(
        ops, NAME, exchange, lambda faster: try_latent(faster, shape, device), strict=strict, findings=findings
    )


def list_latent_trials(shape: LatentTrialShape, device: torch.device) -> list[KernelTrial]:
    """Returns the trials of a latent attention layer: cache write, attention, and the per-head projections."""
    fp8 = is_fp8(shape.cache_dtype)
    write = reference_for("plan_angles", latent_write=contiguous(REFERENCE.latent_write))
    attend = reference_for("plan_attention", "paged_attention", "latent_attention")
    products = reference_for("head_product", captured=True)
    return [
        KernelTrial("latent write", lambda ops: try_write(ops, shape, device), None if fp8 else write),
        KernelTrial(
            "latent attention", lambda ops: try_latent(ops, shape, device, ONE_REQUEST), None if fp8 else attend
        ),
        KernelTrial("products by head", lambda ops: try_products(ops, shape, device), products),
    ]


def try_write(ops: Ops, shape: LatentTrialShape, device: torch.device) -> None:
    """Compares the cache write of a few tokens across a page boundary with the reference; raises if they disagree."""
    rank, entry_width = shape.rank, shape.rank + shape.rope_dim
    head_dim = shape.nope_dim + shape.rope_dim
    width = shape.num_heads * head_dim
    first = shape.q_rank or width
    down = normal(device, shape.dtype, FEW_TOKENS, first + entry_width)
    q, entry = down.split_with_sizes((first, entry_width), 1)
    if shape.q_rank is not None:
        q = normal(device, shape.dtype, FEW_TOKENS, width)
    q = q.reshape(FEW_TOKENS, shape.num_heads, head_dim)
    norm = normal(device, shape.dtype, rank)
    positions = torch.arange(FEW_TOKENS, device=device) + NUM_TOKENS
    boundary = (1 + FEW_TOKENS // shape.page_tokens) * shape.page_tokens
    slots = boundary - FEW_TOKENS // 2 + torch.arange(FEW_TOKENS, device=device)
    size = (2 + -(-NUM_TOKENS // shape.page_tokens), shape.page_tokens, 1, entry_width)
    frequencies = rope_frequencies(shape.rope_dim, device)

    def run(table: Ops, cache_dtype: torch.dtype) -> tuple[Tensor, ...]:
        cache = torch.zeros(size, dtype=cache_dtype, device=device)
        finish_writes(device)
        angles = table.plan_angles(positions, frequencies, 1.0, shape.dtype)
        return table.latent_write(q, entry, norm, 1e-6, angles, cache, slots, shape.interleaved), cache

    compare(run(ops, shape.cache_dtype), lambda: run(REFERENCE, shape.dtype), shape.dtype)


def try_products(ops: Ops, shape: LatentTrialShape, device: torch.device) -> None:
    """Compares the projections of queries into the latent space and of results out of it with the reference, for one
    token and for a few; raises if they disagree."""
    heads, rank = shape.num_heads, shape.rank
    key_up = normal(device, shape.dtype, heads, shape.nope_dim, rank) * shape.nope_dim**-0.5
    value_up = normal(device, shape.dtype, heads, shape.value_dim, rank) * rank**-0.5
    for num_tokens in (1, 5):
        for weight in (key_up, value_up.transpose(1, 2)):
            x = normal(device, shape.dtype, num_tokens, heads, weight.shape[1]).transpose(0, 1)
            finish_writes(device)
            compare(ops.head_product(x, weight), partial(torch.bmm, x, weight), shape.dtype)


def try_latent(ops: Ops, shape: LatentTrialShape, device: torch.device, steps: Sequence[RowLengths] = MANY) -> None:
    """Compares attention over these steps with the reference; decode steps use a permanent page table, as captured
    steps do. Raises if they disagree."""
    for rows in steps:
        step = _LatentStep.make(shape, device, rows)
        compare(step.run(ops, decode=ops.captures and max(rows.counts) == 1), step.run_reference, shape.dtype)


@dataclass(frozen=True, slots=True)
class _LatentStep:
    shape: LatentTrialShape
    rows: RowLengths
    q_latent: Tensor  # [heads, tokens, rank]
    q_rope: Tensor  # [tokens, heads, rope_dim]
    cache: Tensor  # [pages, page_tokens, 1, rank + rope_dim]
    table: Tensor  # [rows, pages of max_len]
    positions: Tensor

    @classmethod
    def make(cls, shape: LatentTrialShape, device: torch.device, rows: RowLengths) -> _LatentStep:
        page = shape.page_tokens
        need = [-(-length // page) for length in rows.lens]
        table = torch.zeros(len(rows.lens), max(max(need), -(-shape.max_len // page) + 1), dtype=torch.int32)
        pages = torch.randperm(sum(need), dtype=torch.int32) + 1
        for row, (num, own) in enumerate(zip(need, pages.split(need), strict=True)):
            table[row, :num] = own
        spans = zip(rows.lens, rows.counts, strict=True)
        positions = [length - count + i for length, count in spans for i in range(count)]
        num_tokens = sum(rows.counts)
        return cls(
            shape,
            rows,
            normal(device, shape.dtype, num_tokens, shape.num_heads, shape.rank).transpose(0, 1),  # as projected
            normal(device, shape.dtype, num_tokens, shape.num_heads, shape.rope_dim),
            normal(device, shape.dtype, sum(need) + 1, page, 1, shape.rank + shape.rope_dim).to(shape.cache_dtype),
            table.to(device),
            torch.tensor(positions, device=device),
        )

    def run(self, ops: Ops, decode: bool) -> Tensor:
        """Runs the ops on this step. `decode`: pass row numbers, with which the kernel indexes the page table."""
        by_number = {"row_index": torch.arange(len(self.rows.lens), device=self.table.device)} if decode else {}
        return self._run(ops, self.cache, **by_number)

    def run_reference(self) -> Tensor:
        return self._run(REFERENCE, self.cache.to(self.shape.dtype))

    def _run(self, ops: Ops, cache: Tensor, **how: Tensor) -> Tensor:
        shape, rows = self.shape, self.rows
        plan = ops.plan_attention(
            self.table, self.positions, list(rows.counts), list(rows.lens), shape.page_tokens, None, cache.dtype, **how
        )
        return ops.latent_attention(self.q_latent, self.q_rope, cache, plan, shape.rank**-0.5)
