"""Products by head, and latent attention with many heads on Hopper (`latent_many`), against float64. Most of it is
Gluon, which the interpreter does not run: elsewhere those checks do nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from tests.gpu.paged_checks import Paged
from tests.gpu.where import Where, close, need_hopper

RANK, ROPE = 512, 64


def make_latents(where: Where, dtype: torch.dtype, counts: list[int], lens: list[int], heads: int,
                 page: int) -> tuple[Paged, Tensor, Tensor, Tensor]:  # fmt: skip
    """A batch, its queries in their two parts, and what must come out: [heads, tokens, rank]."""
    batch = Paged.make(where, dtype, counts, lens, heads, 1, RANK + ROPE, page)
    batch.v_cache = batch.k_cache
    want = batch.expected(0.05, None, None).view(-1, heads, RANK + ROPE)[..., :RANK].transpose(0, 1)
    return batch, batch.q[..., :RANK].transpose(0, 1).contiguous(), batch.q[..., RANK:].contiguous(), want


@contextmanager
def forced_splits(splits: int | None) -> Iterator[None]:
    """Any number is right; only some are chosen."""
    from quire.kernels.triton.latent import many_heads as latent_many

    chosen = latent_many.num_splits
    if splits is not None:
        latent_many.num_splits = lambda *_: splits
    try:
        yield
    finally:
        latent_many.num_splits = chosen


def check_latent_many(where: Where) -> None:
    """Heads that fill programs and that do not, pages of several sizes; decodes whole and in shares, catch-ups."""
    from quire.kernels.triton.attention import paged as attention
    from quire.kernels.triton.latent import many_heads as latent_many

    need_hopper(where)
    rng = where.random
    for dtype in where.dtypes:
        if dtype == torch.float32:
            continue  # not for this kernel
        for heads, page in ((40, 16), (64, 8), (80, 64), (128, 16), (128, 128)):
            lens = [1, 64, 65, 128, 129, rng.randint(2, 700), rng.randint(700, 5000)]
            rng.shuffle(lens)
            mixes = [[1] * len(lens), [min(n, rng.randint(1, 40)) for n in lens]]
            for counts in mixes:
                batch, q_latent, q_rope, want = make_latents(where, dtype, counts, lens, heads, page)
                assert latent_many.supports(q_latent, q_rope, batch.k_cache)
                for splits in (None, 1, 2, rng.randint(3, 64)):
                    plan = attention.plan_attention(batch.page_table, batch.positions, counts, lens, page, None, dtype)
                    name = f"latents, {heads} heads, page {page}, splits {splits}, counts {counts}, lens {lens}"
                    for _ in range(2):  # the second layer finds the workspace as the first left it
                        where.poison()
                        with forced_splits(splits):
                            out = latent_many.latent_attention(q_latent, q_rope, batch.k_cache, plan, 0.05)
                        for row, (got, expected) in enumerate(zip(*(x.transpose(0, 1) for x in (out, want)),
                                                                  strict=True)):  # fmt: skip
                            close(got, expected, dtype, f"token {row} of {name}")


def check_latent_shares(where: Where) -> None:
    """The kernel that puts shares together, by itself: rows of one share, which it must leave alone, of two, of many,
    and one that only pads the step; tokens in order and by number; heads that are not there."""
    from quire.kernels.triton.attention.paged import TritonPlan
    from quire.kernels.triton.latent import many_heads as latent_many
    from quire.kernels.triton.latent.work_list import MIN_SPAN, LatentWork

    lens = torch.tensor([0, 60, 700, 64 * 9 + 1, 130, 257])
    for heads, splits, numbers in ((5, 9, None), (70, 3, torch.int32), (2, 2, torch.int64)):
        blocks = (len(lens) * -(-heads // 64), splits, 64)
        partial, best, total = where.normal(*blocks, 512), where.normal(*blocks) * 9, where.normal(*blocks).abs() + 0.1
        order = torch.arange(len(lens)) if numbers is None else torch.randperm(len(lens))
        positions = torch.empty_like(lens)
        positions[order] = lens - 1
        index = None if numbers is None else order.to(where.device, numbers)
        out = torch.full((heads, len(lens), 512), 7.0, device=where.device)
        table = torch.zeros(1, 1, dtype=torch.int32, device=where.device)
        plan = SimpleNamespace(positions=positions.to(where.device), page_table=table)
        work = LatentWork(len(lens), splits, index, partial=partial, best=best, total=total)
        where.settle()
        latent_many._merge(out, cast(TritonPlan, plan), work)
        for tile, length in enumerate(lens.tolist()):
            whole = max(1, -(-length // 64))
            shares = -(-whole // max(-(-whole // splits), MIN_SPAN // 64))
            for head in range(heads):
                cells = tile * -(-heads // 64) + head // 64, slice(shares), head % 64
                factor = (best[cells] - best[cells].max()).double().exp2()
                want = (partial[cells].double() * factor[:, None]).sum(0) / (total[cells].double() * factor).sum()
                want = want if shares > 1 else torch.full_like(want, 7.0)
                close(out[head, order[tile]], want, torch.float32, f"{heads} heads, {length} entries, {splits} splits")


def check_latent_many_rows(where: Where) -> None:
    """Rows found by number in a table of all rows, and rows that only pad the step."""
    from quire.kernels.triton.attention import paged as attention
    from quire.kernels.triton.latent import many_heads as latent_many

    need_hopper(where)
    dtype, lens = where.dtypes[-1], [37, 2600, 5, 90]
    batch, q_latent, q_rope, want = make_latents(where, dtype, [1] * 4, lens, 128, 16)
    table = torch.empty(9, batch.page_table.shape[1], dtype=torch.int32, device=where.device).fill_(2**30)
    places = torch.tensor([7, 2, 5, 1], device=where.device)
    table[places] = batch.page_table
    nobody = torch.full((2,), -1, device=where.device)
    positions, rows = torch.cat((batch.positions, nobody)), torch.cat((places, nobody))
    q_latent, q_rope = torch.cat((q_latent, q_latent[:, :2]), 1), torch.cat((q_rope, q_rope[:2]))
    for splits in (None, 1):
        plan = attention.plan_attention(table, positions, [1] * 6, [3000] * 6, 16, None, dtype, row_index=rows)
        where.poison()
        with forced_splits(splits):
            out = latent_many.latent_attention(q_latent, q_rope, batch.k_cache, plan, 0.05)
        close(out[:, :4], want, dtype, "latents by row_index")
        assert (out[:, 4:] == 0).all()


def check_head_products(where: Where) -> None:
    """Both ways, from queries beside others and to heads beside each other; the last is more than the kernel's."""
    from quire.kernels.triton.latent.per_head import head_product

    sizes = [(16, 128, 512, 128), (128, 128, 512, 128), (5, 72, 96, 40)] if where.large else [(3, 24, 40, 16)]
    for dtype in where.dtypes:
        for heads, nope, rank, value in sizes:
            up = where.normal(heads, nope + value, rank, dtype=dtype) * rank**-0.5
            where.settle()
            for tokens in (1, 2, 7, 16, 17):
                x = where.normal(tokens, heads, nope + 8, dtype=dtype)[..., :nope].transpose(0, 1)
                seen = where.normal(heads, tokens, rank, dtype=dtype)
                for factor, weight in ((x, up[:, :nope]), (seen, up[:, nope:].transpose(1, 2))):
                    where.poison()
                    name = f"{tokens} tokens of {heads} heads, {tuple(weight.shape[1:])}"
                    close(head_product(factor, weight), factor.double() @ weight.double(), dtype, name)


CHECKS: dict[str, Callable[[Where], None]] = {
    "head_products": check_head_products,
    "latent_many": check_latent_many,
    "latent shares": check_latent_shares,
    "latent_many_rows": check_latent_many_rows,
}
