"""Attention that some families need, against float64: sinks, and latents. Run as `kernel_checks` are."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.kernels.angles import Angles, angle_tables
from quire.kernels.reference import latent as reference_latent
from tests.gpu.paged_checks import PAGES, Paged
from tests.gpu.where import Where, close


def check_sinks(where: Where) -> None:
    """Decodes, split and whole, and catch-ups, with and without a window."""
    from quire.kernels.triton.attention import paged as attention

    shape = (64, 8, 64) if where.large else (6, 2, 16)
    lens = [5000, 3, 700, 129] if where.large else [300, 3, 20]
    for dtype in where.dtypes:
        for counts in ([1] * len(lens), [min(n, 33) for n in lens]):
            for window in (None, 100 if where.large else 11):
                batch = Paged.make(where, dtype, counts, lens, *shape, 16)
                sinks = where.normal(shape[0], dtype=dtype) * 2
                plan = attention.plan_attention(batch.page_table, batch.positions, counts, lens, 16, window, dtype)
                where.poison()
                out = attention.paged_attention(batch.q, batch.k_cache, batch.v_cache, plan, 0.2, sinks=sinks)
                close(out, batch.expected(0.2, window, None, sinks), dtype, f"sinks, window {window}, counts {counts}")


def check_latent_write(where: Where) -> None:
    from quire.kernels.triton.latent.latent import latent_write

    heads, nope, rope_dim, rank, page = (128, 128, 64, 512, 64) if where.large else (5, 8, 12, 24, 8)
    for dtype in where.dtypes:
        for tokens in (1, 300) if where.large else (3,):
            for interleaved in (False, True):
                q = where.normal(tokens, heads, nope + rope_dim, dtype=dtype)
                entry = where.normal(tokens, 40 + rank + rope_dim, dtype=dtype)[:, 40:]
                norm = where.normal(rank, dtype=dtype) + 1
                positions = torch.randint(0, 3000, (tokens,), device=where.device)
                frequencies = torch.rand(rope_dim // 2, device=where.device)
                num_pages = tokens // page + 2
                slots = torch.randperm(num_pages * page, device=where.device)[:tokens]
                tables = angle_tables(positions, frequencies, 1.3, torch.float64)
                caches = [torch.zeros(num_pages, page, 1, rank + rope_dim, dtype=kind, device=where.device)
                          for kind in (torch.float64, dtype)]  # fmt: skip
                want = reference_latent.latent_write(
                    q.double(), entry.double(), norm.double(), 1e-6, tables, caches[0], slots, interleaved
                )
                where.settle()
                where.poison()
                angles = Angles(positions, frequencies, 1.3)
                got = latent_write(q, entry, norm, 1e-6, angles, caches[1], slots, interleaved)
                close(got, want, dtype, f"latent_write: queries, interleaved {interleaved}")
                close(caches[1], caches[0], dtype, f"latent_write: cache, interleaved {interleaved}")


def check_latent(where: Where) -> None:
    """Decodes, split and whole, catch-ups, and both in one step; heads that fill a program and heads that do not."""
    from quire.kernels.triton.attention import paged as attention
    from quire.kernels.triton.latent.latent import latent_attention

    page = where.random.choice(PAGES)
    shapes = [(128, 512, 64), (16, 512, 64), (40, 256, 32)] if where.large else [(5, 32, 8), (66, 16, 16)]
    lens = [3000, 1, 700, 129, 64] if where.large else [130, 1, 9]
    mixes = [
        [1] * len(lens),
        [min(n, 33 if where.large else 3) for n in lens],
        [1 if i % 2 else min(n, 50 if where.large else 5) for i, n in enumerate(lens)],
    ]
    for dtype in where.dtypes:
        for heads, rank, rope_dim in shapes:
            for counts in mixes if where.large or (dtype == torch.float32 and heads == 5) else mixes[2:]:
                batch = Paged.make(where, dtype, counts, lens, heads, 1, rank + rope_dim, page)
                q_latent = batch.q[..., :rank].transpose(0, 1).contiguous()
                q_rope = batch.q[..., rank:].contiguous()
                plan = attention.plan_attention(batch.page_table, batch.positions, counts, lens, page, None, dtype)
                batch.v_cache = batch.k_cache
                want = batch.expected(0.05, None, None).view(-1, heads, rank + rope_dim)[..., :rank].transpose(0, 1)
                for _ in range(2 if where.large else 1):
                    where.poison()
                    out = latent_attention(q_latent, q_rope, batch.k_cache, plan, 0.05)
                    close(out, want, dtype, f"latent attention {heads} heads of {rank} + {rope_dim}, counts {counts}")


def check_latent_fp8(where: Where) -> None:
    """An FP8 cache: written by the one kernel, read by the other, against what its rounded entries give."""
    from quire.kernels.triton.attention import paged as attention
    from quire.kernels.triton.latent.latent import latent_attention

    heads, rank, rope_dim, lens = (128, 512, 64, [900, 33]) if where.large else (5, 32, 16, [30, 9])
    dtype = where.dtypes[-1]
    for counts in ([1, 1], [5, 1]):
        batch = Paged.make(where, dtype, counts, lens, heads, 1, rank + rope_dim, 16)
        small = batch.k_cache.clamp(-400, 400).to(torch.float8_e4m3fn)
        batch.k_cache = batch.v_cache = small.to(dtype)
        plan = attention.plan_attention(batch.page_table, batch.positions, counts, lens, 16, None, dtype)
        want = batch.expected(0.05, None, None).view(-1, heads, rank + rope_dim)[..., :rank].transpose(0, 1)
        q_latent, q_rope = batch.q[..., :rank].transpose(0, 1).contiguous(), batch.q[..., rank:].contiguous()
        close(latent_attention(q_latent, q_rope, small, plan, 0.05), want, dtype, f"latent attention, FP8, {counts}")


def check_captured_work(where: Where) -> None:
    """Mixed steps of several shapes through the same lists, padded: tokens nobody attends for come out as zeros."""
    from quire.kernels.triton.attention import paged as attention
    from quire.kernels.triton.attention.captured_work import CapturedWork

    shapes = [(32, 8, 128), (8, 2, 64)] if where.large else [(4, 2, 16)]
    size, singles = (300, 6) if where.large else (20, 4)
    page = where.random.choice(PAGES)
    steps = [([100, 1, 1, 33], [3000, 700, 5, 33]), ([1, 1, 1], [4000, 1, 64]), ([250], [2100])]
    if not where.large:
        steps = [([7, 1, 1, 9], [40, 30, 1, 9]), ([1, 1, 1], [50, 1, 16]), ([18], [21])]
    for dtype in where.dtypes:
        for heads, kv_heads, head_dim in shapes:
            for window in (None, 100 if where.large else 11):
                work = CapturedWork(size, singles, 2)
                for turn, (counts, lens) in enumerate([steps[0], *steps]):  # the first only sizes the lists
                    batch = Paged.make(where, dtype, counts, lens, heads, kv_heads, head_dim, page)
                    q = where.normal(size, heads, head_dim, dtype=dtype)
                    q[: len(batch.q)] = batch.q
                    positions = torch.zeros(size, dtype=torch.int64, device=where.device)
                    positions[: len(batch.q)] = batch.positions
                    pages = torch.zeros(8, 4096 // page + 1, dtype=torch.int32, device=where.device)
                    pages[: len(lens), : batch.page_table.shape[1]] = batch.page_table
                    plan = attention.plan_attention(pages, positions, [], [], page, window, dtype, work=work)
                    if turn:
                        work.fill(counts, lens)
                    where.poison()
                    out = attention.paged_attention(q, batch.k_cache, batch.v_cache, plan, 0.2)
                    if turn:
                        what = f"fixed work, {heads} heads of {head_dim}, window {window}, counts {counts}"
                        close(out[: len(batch.q)], batch.expected(0.2, window, None), dtype, what)
                        assert not out[len(batch.q) :].any(), what


CHECKS: dict[str, Callable[[Where], None]] = {
    "sinks": check_sinks,
    "captured_work": check_captured_work,
    "latent_write": check_latent_write,
    "latent": check_latent,
    "latent_fp8": check_latent_fp8,
}
