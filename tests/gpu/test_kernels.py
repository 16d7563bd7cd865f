"""Every Triton kernel against its reference, on a GPU: see `kernel_checks`."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.checks import CHECKS
from tests.gpu.where import NotHere, Where, close, need_hopper, poisoned

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,), (torch.float32, torch.float16)], ids=["bf16", "fp32+fp16"])
@pytest.mark.parametrize("name", CHECKS)
def test_kernel(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    try:
        with poisoned():
            CHECKS[name](Where("cuda", True, dtypes, seed))
    except NotHere as why:
        pytest.skip(str(why))


def test_captured_decode_is_right_for_any_length() -> None:
    """One graph, captured at the bound, replayed with rows of other lengths."""
    from quire.kernels.triton.attention import paged as attention
    from tests.gpu.paged_checks import Paged

    bound, dtype = 3000, torch.bfloat16
    where = Where("cuda", True, (dtype,), 1)
    batches = [Paged.make(where, dtype, [1] * 5, lens, 32, 8, 128, 16)
               for lens in ([3000, 1, 17, 900, 64], [5, 2048, 65, 1, 1])]  # fmt: skip
    q = torch.empty_like(batches[0].q)
    positions = torch.zeros(5, dtype=torch.int64, device="cuda")
    table = torch.zeros(5, -(-bound // 16), dtype=torch.int32, device="cuda")
    k_cache, v_cache = (torch.zeros(500, 16, 8, 128, dtype=dtype, device="cuda") for _ in range(2))

    def layer() -> torch.Tensor:
        plan = attention.plan_attention(table, positions, [1] * 5, [bound] * 5, 16, None, dtype)
        attention.paged_attention(q, k_cache, v_cache, plan, 0.1)
        return attention.paged_attention(q, k_cache, v_cache, plan, 0.1)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for batch in batches * 2:
        q.copy_(batch.q)
        positions.copy_(batch.positions)
        table.zero_()[:, : batch.page_table.shape[1]].copy_(batch.page_table[:, : table.shape[1]])
        for cache, source in ((k_cache, batch.k_cache), (v_cache, batch.v_cache)):
            cache[: source.shape[0]].copy_(source)
        out.fill_(torch.nan)
        graph.replay()
        close(out, batch.expected(0.1, None, None), dtype, "captured decode attention")


@pytest.mark.parametrize("num_rows", [5, 70])
def test_captured_latents_of_many_heads_are_right_for_any_length(num_rows: int) -> None:
    """The same for latents on Hopper; 5 rows are split, 70 are not."""
    from tests.gpu.latent_checks import make_latents

    dtype = torch.bfloat16
    where = Where("cuda", True, (dtype,), 1)
    try:
        need_hopper(where)
    except NotHere as why:
        pytest.skip(str(why))
    from quire.kernels.triton.attention import paged as attention
    from quire.kernels.triton.latent import many_heads as latent_many

    bound = 3000
    batches = []
    for first in ([3000, 1, 17, 900, 64], [5, 2048, 65, 1, 1]):
        lens = first + [1 + 13 * row for row in range(num_rows - len(first))]
        batches.append(make_latents(where, dtype, [1] * num_rows, lens, 128, 16))
    q_latent, q_rope = torch.empty_like(batches[0][1]), torch.empty_like(batches[0][2])
    positions = torch.zeros(num_rows, dtype=torch.int64, device="cuda")
    table = torch.zeros(num_rows + 1, -(-bound // 16) + 1, dtype=torch.int32, device="cuda")
    rows = torch.arange(num_rows, 0, -1, device="cuda")
    cache = torch.zeros(max(len(batch.k_cache) for batch, *_ in batches), 16, 1, 576, dtype=dtype, device="cuda")

    def layer() -> torch.Tensor:
        plan = attention.plan_attention(table, positions, [1] * num_rows, [bound] * num_rows, 16, None, dtype,
                                        row_index=rows)  # fmt: skip
        latent_many.latent_attention(q_latent, q_rope, cache, plan, 0.05)
        return latent_many.latent_attention(q_latent, q_rope, cache, plan, 0.05)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for batch, latents, turned, want in batches * 2:
        q_latent.copy_(latents)
        q_rope.copy_(turned)
        positions.copy_(batch.positions)
        table.zero_()[rows, : batch.page_table.shape[1]] = batch.page_table
        cache[: len(batch.k_cache)].copy_(batch.k_cache)
        out.fill_(torch.nan)
        graph.replay()
        close(out, want, dtype, "captured latent attention")
