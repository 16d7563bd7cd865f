"""A library's attention behind the table's seam against float64, the libraries themselves on a GPU and stand-ins on a
CPU: decodes and prompts in one step, cached beginnings, windows, rows of one token behind others."""

from __future__ import annotations

from quire.kernels.libraries.seam import LibraryPlan, PrefillKernel, with_library
from quire.kernels.table import Ops
from tests.gpu.paged_checks import Paged
from tests.gpu.where import Where, close


def check_kernel(inner: Ops, kernel: PrefillKernel, where: Where, head_dims: tuple[int, ...] = (64, 128),
                 windowed: tuple[bool, ...] = (False, True)) -> None:  # fmt: skip
    ops = with_library(inner, kernel)
    heads = [(32, 8, 128), (16, 8, 128), (14, 2, 64)] if where.large else [(4, 2, 64), (3, 3, 64)]
    steps = [
        ([1, 1, 100, 33, 700], [900, 17, 100, 2000, 700]),
        ([513], [513]),
        ([64, 1, 2], [3000, 40, 257]),
    ]
    if not where.large:
        steps = [([1, 1, 7, 9], [40, 17, 7, 300]), ([18], [32]), ([6, 1, 2], [21, 40, 257])]
    for dtype in where.dtypes:
        for num_heads, num_kv_heads, head_dim in [shape for shape in heads if shape[2] in head_dims]:
            for page in (16, 64) if where.large else (16,):
                for window in [(50 if where.large else 11) if has_one else None for has_one in windowed]:
                    for counts, lens in steps:
                        batch = Paged.make(where, dtype, counts, lens, num_heads, num_kv_heads, head_dim, page)
                        plan = ops.plan_attention(batch.page_table, batch.positions, counts, lens, page, window, dtype)
                        assert isinstance(plan, LibraryPlan)
                        want = batch.expected(0.1, window, None)
                        for layer in range(2):
                            where.poison()
                            out = ops.paged_attention(batch.q, batch.k_cache, batch.v_cache, plan, 0.1)
                            what = f"{kernel.name}, {num_heads} heads of {head_dim}, pages of {page}, window {window}, "
                            close(out, want, dtype, f"{what}counts {counts}, layer {layer}")
                        assert plan.fits, f"{kernel.name} did nothing"


def check_fresh(inner: Ops, kernel: PrefillKernel, where: Where) -> None:
    """For a kernel that takes nothing but fresh prompts of one length, with decodes before them or without."""
    ops = with_library(inner, kernel)
    heads = [(32, 8, 128), (16, 16, 64), (14, 2, 64)] if where.large else [(4, 2, 64), (3, 3, 64)]
    steps = [([1, 1, 1030, 1030], [900, 17, 1030, 1030]), ([4096], [4096]), ([300] * 9, [300] * 9)]
    if not where.large:
        steps = [([1, 1, 20, 20], [40, 17, 20, 20]), ([32], [32])]
    for dtype in where.dtypes:
        for num_heads, num_kv_heads, head_dim in heads:
            for counts, lens in steps:
                batch = Paged.make(where, dtype, counts, lens, num_heads, num_kv_heads, head_dim, 16)
                plan = ops.plan_attention(batch.page_table, batch.positions, counts, lens, 16, None, dtype)
                want = batch.expected(0.1, None, None)
                for layer in range(2):
                    where.poison()
                    out = ops.paged_attention(batch.q, batch.k_cache, batch.v_cache, plan, 0.1)
                    what = f"{kernel.name}, {num_heads}/{num_kv_heads} heads of {head_dim}, "
                    close(out, want, dtype, f"{what}counts {counts}, layer {layer}")
                assert isinstance(plan, LibraryPlan) and plan.fits, f"{kernel.name} did nothing"
