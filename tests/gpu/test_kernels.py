"""Every Triton kernel against its reference, on a GPU: see `kernel_checks`."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.checks import CHECKS
from tests.gpu.where import Where

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,), (torch.float32, torch.float16)], ids=["bf16", "fp32+fp16"])
@pytest.mark.parametrize("name", CHECKS)
def test_kernel(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    CHECKS[name](Where("cuda", True, dtypes, seed))


def test_captured_decode_is_right_for_any_length() -> None:
    """One graph, captured at the bound, replayed with rows of other lengths."""
    from quire.kernels.triton import attention
    from tests.gpu.paged_checks import Paged
    from tests.gpu.where import close

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
