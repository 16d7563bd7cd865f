"""Attention that some families need, against float64: sinks, and latents. Run as `kernel_checks` are."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.gpu.kernel_checks import Paged, Where, close


def check_sinks(where: Where) -> None:
    """Decodes, split and whole, and catch-ups, with and without a window."""
    from quire.kernels.triton import attention

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


CHECKS: dict[str, Callable[[Where], None]] = {"sinks": check_sinks}
