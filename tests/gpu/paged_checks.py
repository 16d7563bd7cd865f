"""Attention over paged caches against float64: decodes, catch-ups, how they are shared out, FP8 caches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.angles import Angles
from tests.gpu.where import BOUNDS, Where, close

PAGES = (1, 8, 16, 16, 24, 64, 64, 100)  # tokens a page holds: any number will do, these two are the defaults
GARBAGE = 1.0e4  # what lies in slots nobody has written: finite, as caches promise, and fatal to any sum it leaks into


@dataclass
class Paged:
    """A random batch over a cache with scattered pages."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    positions: Tensor
    counts: list[int]
    lens: list[int]
    page: int

    @classmethod
    def make(cls, where: Where, dtype: torch.dtype, counts: list[int], lens: list[int], heads: int, kv_heads: int,
             head_dim: int, page: int) -> Paged:  # fmt: skip
        device = where.device
        need = [-(-n // page) for n in lens]
        num_pages = sum(need) + 2
        shuffled = torch.randperm(num_pages - 1) + 1
        table = torch.zeros(len(lens), max(need) + 1, dtype=torch.int32)
        caches = [torch.full((num_pages, page, kv_heads, head_dim), GARBAGE, dtype=dtype, device=device)
                  for _ in range(2)]  # fmt: skip
        place = 0
        for row, (num, length) in enumerate(zip(need, lens, strict=True)):
            pages = shuffled[place : place + num]
            table[row, :num] = pages.int()
            place += num
            slots = (pages[:, None] * page + torch.arange(page)).view(-1)[:length].to(device)
            for cache in caches:
                cache.view(-1, kv_heads, head_dim)[slots] = where.normal(length, kv_heads, head_dim, dtype=dtype)
        positions = [n - count + i for n, count in zip(lens, counts, strict=True) for i in range(count)]
        q = where.normal(sum(counts), heads, head_dim, dtype=dtype)
        return cls(q, *caches, table.to(device), torch.tensor(positions, device=device), counts, lens, page)

    def expected(self, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None = None) -> Tensor:
        out, first = [], 0
        kv_heads, head_dim = self.k_cache.shape[2:]
        for row, (count, length) in enumerate(zip(self.counts, self.lens, strict=True)):
            pages = self.page_table[row, : -(-length // self.page)].long()
            k, v = (c[pages].reshape(-1, kv_heads, head_dim)[:length].double() for c in (self.k_cache, self.v_cache))
            q = self.q[first : first + count].double().view(count, kv_heads, -1, head_dim)
            scores = torch.einsum("qkgd,nkd->kgqn", q, k) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            where = self.positions[first : first + count, None]
            keys = torch.arange(length, device=k.device)
            hidden = keys > where
            if window is not None:
                hidden |= keys <= where - window
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                beside = sinks.double().view(kv_heads, -1, 1, 1).expand(-1, -1, count, -1)
                scores = torch.cat((scores, beside), -1)
            weights = scores.softmax(-1)[..., :length]
            out.append(torch.einsum("kgqn,nkd->qkgd", weights, v).reshape(count, -1))
            first += count
        return torch.cat(out)


def _run_attention(where: Where, dtype: torch.dtype, counts: list[int], lens: list[int], shape: tuple[int, int, int],
                   page: int, window: int | None, softcap: float | None, slack: int = 0) -> None:  # fmt: skip
    from quire.kernels.triton.attention import paged as attention

    batch = Paged.make(where, dtype, counts, lens, *shape, page)
    scale = shape[2] ** -0.5
    plan = attention.plan_attention(batch.page_table, batch.positions, counts, [n + slack for n in lens], page, window,
                                    dtype)  # fmt: skip
    name = f"attention {shape} page {page} window {window} softcap {softcap} counts {counts[:8]} lens {lens[:8]}"
    for _ in range(2):  # the second layer finds the workspace as the first left it
        where.poison()
        out = attention.paged_attention(batch.q, batch.k_cache, batch.v_cache, plan, scale, softcap)
        close(out, batch.expected(scale, window, softcap), dtype, name)


def _attention_shapes(where: Where, dtype: torch.dtype) -> list[tuple[int, int, int]]:
    """(heads, kv heads, head_dim): all with the type that is served, a few with the others."""
    if not where.large:
        return [(4, 2, 16), (3, 1, 32), (4, 2, 24), (2, 1, 10)]
    if dtype == torch.bfloat16:
        plain = [(16, 8, 128), (32, 8, 128), (9, 3, 64), (8, 8, 128), (16, 1, 256), (28, 4, 128)]
        return [*plain, (32, 32, 80), (8, 8, 96), (7, 7, 112), (4, 2, 160), (8, 1, 192)]  # that must be padded
    return [(16, 8, 128), (9, 3, 64), (8, 8, 80), (6, 2, 24), (4, 2, 8)]


def check_decode(where: Where) -> None:
    rng = where.random
    for dtype in where.dtypes:
        for shape in _attention_shapes(where, dtype):
            sizes = rng.sample([(1, 5), (1, 1024), (3, 5000), (40, 1500), (150, 2600)], 2) if where.large else [
                (3, 40), (1, 200)]  # fmt: skip
            for num_rows, longest in sizes:
                lens = [rng.randint(1, longest) for _ in range(num_rows - 1)] + [longest]
                window = rng.choice((None, rng.randint(1, 700 if where.large else 30)))
                softcap = rng.choice((None, 20.0))
                page = rng.choice(PAGES)
                _run_attention(where, dtype, [1] * num_rows, lens, shape, page, window, softcap, slack=17)


def check_prefill(where: Where) -> None:
    rng = where.random
    for dtype in where.dtypes:
        for shape in _attention_shapes(where, dtype):
            for num_rows, longest in [(1, 700), (6, 900)] if where.large else [(3, 50)]:
                lens = [rng.randint(2, longest) for _ in range(num_rows - 1)] + [longest]
                counts = [rng.choice((n, rng.randint(1, n), 1)) for n in lens]  # fresh, catching up, one token
                counts[-1] = rng.randint(2, longest)
                window = rng.choice((None, rng.randint(1, 300 if where.large else 20)))
                softcap = rng.choice((None, 20.0))
                page = rng.choice(PAGES)
                _run_attention(where, dtype, counts, lens, shape, page, window, softcap)


def check_share_out(where: Where) -> None:
    """Every item goes to exactly one program, and no program has much more to do than another."""
    from quire.kernels.triton.attention import prefill
    from quire.kernels.triton.attention.prefill_split import MERGE, RECORD, distribute_tiles

    rng = where.random
    for _ in range(20):
        counts = [rng.randint(1, 3000) for _ in range(rng.randint(1, 12))]
        bounds = [count + rng.choice((0, rng.randint(0, 5000))) for count in counts]
        rows = [row for row, count in enumerate(counts) if count > 1] or [0]
        tiles = prefill.list_tiles(rows, counts, bounds, 32)
        assert sum(tile[2] for tile in tiles) == sum(counts[row] for row in rows)
        window = rng.choice((None, rng.randint(1, 900)))
        num_programs = rng.randint(1, 132)
        shares = distribute_tiles(tiles, 8, window, num_programs)
        begins, numbers = shares.items[: num_programs + 1].tolist(), shares.items[num_programs + 1 :].tolist()
        items = list(zip(*[iter(numbers)] * RECORD, strict=True))
        assert begins[0] == 0 and begins[-1] == len(items)
        found: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for item in items:
            found.setdefault(item[:4], []).append(item[4:7])
        assert sorted(found) == sorted((kv_head, *tile[:3]) for tile in tiles for kv_head in range(8))
        merges = {tuple(m[2:5]): (m[0], m[1]) for m in zip(*[iter(shares.merges.tolist())] * MERGE, strict=True)}
        slots = []
        for (kv_head, _, first, size), parts in found.items():
            assert sorted(part[0] for part in parts) == list(range(len(parts))), "each share once"
            assert {part[1] for part in parts} == {len(parts)}
            if len(parts) > 1:
                slots += [part[2] for part in parts]
                slot, num_shares = merges.pop((kv_head, first, size))
                assert num_shares == len(parts) and sorted(part[2] for part in parts) == [
                    *range(slot, slot + num_shares)
                ]
        assert not merges and sorted(slots) == list(range(len(slots))) and len(slots) <= num_programs
        cost = {tile[1]: -(-tile[3] // 128) + 1 for tile in tiles}
        loads = [sum(-(-cost[item[2]] // item[5]) for item in items[a:b]) for a, b in itertools.pairwise(begins)]
        assert all(loads) or len(items) < num_programs, "a program has nothing to do, though there are items enough"
        assert window is not None or len(items) < num_programs or max(loads) - min(loads) <= max(cost.values())


def check_permanent_table(where: Where) -> None:
    """Rows found through `row_index` in a table of all rows, and a row that only pads the step."""
    from quire.kernels.triton.attention import paged as attention

    dtype = where.dtypes[0]
    lens = [37, 260, 5, 90]
    batch = Paged.make(where, dtype, [1] * 4, lens, 4, 2, 64, 16)
    order = torch.tensor([2, 0, 3, 1], device=where.device)
    table = torch.empty(9, batch.page_table.shape[1], dtype=torch.int32, device=where.device).fill_(2**30)
    places = torch.tensor([7, 2, 5, 1], device=where.device)
    table[places] = batch.page_table
    q = torch.cat((batch.q[order], batch.q[:1]))
    positions = torch.cat((batch.positions[order], torch.full((1,), -1, device=where.device)))
    rows = torch.cat((places[order], torch.full((1,), -1, device=where.device)))
    for bound in (300, 16):
        plan = attention.plan_attention(table, positions, [1] * 5, [bound] * 5, 16, None, dtype, row_index=rows)
        out = attention.paged_attention(q, batch.k_cache, batch.v_cache, plan, 0.125)
        close(out[:4], batch.expected(0.125, None, None)[order], dtype, "attention by row_index")
        assert (out[4] == 0).all()


def check_fp8_cache(where: Where) -> None:
    """Written, and read back by decode and prefill, with scales that matter; also heads that are no power of two."""
    for shape in [(32, 8, 128, 16), (8, 8, 80, 16)] if where.large else [(4, 2, 32, 8), (3, 1, 24, 8)]:
        _check_fp8_cache(where, *shape)


def _check_fp8_cache(where: Where, heads: int, kv_heads: int, head_dim: int, page: int) -> None:
    from quire.kernels.triton.attention import paged as attention
    from quire.kernels.triton.attention.rope_write import qk_norm_rope_write

    dtype = where.dtypes[-1]
    length = 300 if where.large else 30
    qkv = where.normal(length, (heads + 2 * kv_heads) * head_dim, dtype=dtype) * 3
    positions = torch.arange(length, device=where.device)
    frequencies = torch.rand(head_dim // 2, device=where.device)
    pages = -(-length // page)
    table = torch.randperm(pages, device=where.device).int()[None]
    slots = table[0, positions // page].long() * page + positions % page
    results = []
    for cache_dtype, scales in ((dtype, attention.Scales()), (torch.float8_e4m3fn, attention.Scales(0.05, 0.04))):
        caches = [torch.zeros(pages, page, kv_heads, head_dim, device=where.device).to(cache_dtype) for _ in range(2)]
        q = qk_norm_rope_write(qkv, None, None, 0.0, Angles(positions, frequencies), *caches, slots, heads, scales.k,
                               scales.v)  # fmt: skip
        plan = attention.plan_attention(table, positions, [length], [length], page, None, dtype)
        out = attention.paged_attention(q, *caches, plan, 0.1 * head_dim**-0.5, scales=scales)
        plan = attention.plan_attention(table, positions[-1:], [1], [length], page, None, dtype)
        last = attention.paged_attention(q[-1:], *caches, plan, 0.1 * head_dim**-0.5, scales=scales)
        close(last, out[-1:], dtype, "decode against prefill")
        results.append(out)
    # The interpreter cuts fp8 off where the GPU rounds, so on the CPU only the order of magnitude is checked.
    bound = BOUNDS[torch.float8_e4m3fn] if where.large else 0.2
    close(results[1], results[0], dtype, "attention over an fp8 cache", bound)


CHECKS: dict[str, Callable[[Where], None]] = {
    "decode": check_decode,
    "prefill": check_prefill,
    "distribute_tiles": check_share_out,
    "permanent_table": check_permanent_table,
    "fp8_cache": check_fp8_cache,
}
