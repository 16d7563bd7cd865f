"""Packed KV caches on Triton against the torch reference: the bytes that are written, and attention over them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.kernels.angles import Angles, angle_tables
from quire.kernels.cache_forms import CACHE_FORMS, PackedPlane, packed_planes
from quire.kernels.reference import attention as reference_attention
from quire.kernels.reference import small_ops as reference
from tests.gpu.where import Where, close

PAGE = 8


def _cache(where: Where, name: str, pages: int, kv_heads: int, head_dim: int) -> tuple[PackedPlane, ...]:
    size = (1, 1, pages, PAGE, kv_heads, CACHE_FORMS[name].entry_bytes(head_dim))
    return packed_planes(torch.zeros(size, dtype=torch.uint8, device=where.device), name)


def check_packed(where: Where) -> None:
    """Writes prompts of two rows, then attends as prefill and as decodes, with a window, sinks and a softcap."""
    from quire.kernels.triton.attention import packed

    heads, kv_heads = 6, 2
    lens = [300, 41] if where.large else [21, 6]
    for name in CACHE_FORMS:
        for head_dim in (64, 96, 128) if where.large else (32, 96):
            pages = [-(-length // PAGE) for length in lens]
            table = torch.zeros(2, max(pages), dtype=torch.int32)
            shuffled = torch.randperm(sum(pages)).int()
            table[0, : pages[0]], table[1, : pages[1]] = shuffled[: pages[0]], shuffled[pages[0] :]
            positions = torch.cat([torch.arange(length) for length in lens])
            rows = torch.cat([torch.full((length,), row) for row, length in enumerate(lens)])
            slots = table[rows, positions // PAGE].long() * PAGE + positions % PAGE
            table, positions, slots = (x.to(where.device) for x in (table, positions, slots))
            qkv = where.normal(sum(lens), (heads + 2 * kv_heads) * head_dim)
            frequencies = torch.rand(head_dim // 2, device=where.device)
            k, v = _cache(where, name, sum(pages), kv_heads, head_dim)
            k_want, v_want = _cache(where, name, sum(pages), kv_heads, head_dim)
            tables = angle_tables(positions, frequencies, 1.0, torch.float32)
            reference.qk_norm_rope_write(qkv.clone(), None, None, 0.0, tables, k_want, v_want, slots, heads)
            angles = Angles(positions, frequencies, 1.0)
            q = packed.qk_norm_rope_write(qkv, None, None, 0.0, angles, k, v, slots, heads)
            # A last bit moves a number across a rounding edge now and then.
            assert (k.entries != k_want.entries).float().mean() < 2e-3, f"{name}, {head_dim}: the entries differ"
            skipped = packed.qk_norm_rope_write(qkv, None, None, 0.0, angles, k, v, slots * 0 - 1, heads)
            close(skipped, q, torch.float32, "slots below 0 are skipped")
            sinks = where.normal(heads)
            for window, softcap, sink in ((None, None, None), (7, None, None), (None, 20.0, sinks)):
                last = torch.tensor([lens[0] - 1, sum(lens) - 1], device=where.device)
                for counts, queries, places in ((lens, q, positions), ([1, 1], q[last], positions[last])):
                    plan = packed.plan_attention(table, places, counts, lens, PAGE, window, torch.float32)
                    slow = reference_attention.plan_attention(table, places, counts, lens, PAGE, window, torch.float32)
                    where.poison()
                    got = packed.paged_attention(queries, k_want, v_want, plan, 0.2, softcap, sink)
                    want = reference_attention.paged_attention(queries, k_want, v_want, slow, 0.2, softcap, sink)
                    close(got, want, torch.float32, f"{name}, {head_dim}, window {window}, counts {counts}")


CHECKS: dict[str, Callable[[Where], None]] = {"packed": check_packed}
