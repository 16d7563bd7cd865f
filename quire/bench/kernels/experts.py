"""MoE and MLA kernels for `quire bench kernels`: one layer with the shapes of Qwen3-30B-A3B and of DeepSeek V3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from quire.bench.kernels.suite import KernelCase

if TYPE_CHECKING:
    import torch

NUM_LAYERS = 2  # alternating layers of over a gigabyte each, so that no weights stay in the L2 cache


def experts(device: torch.device) -> Iterator[KernelCase]:
    """128 experts of 2048 × 768, top-8, random routing. Bytes are the weights of all experts with a token."""
    import torch

    from quire.kernels.expert_types import ExpertWeights, Routing
    from quire.kernels.triton.experts import experts as kernels
    from quire.kernels.triton.experts import few_tokens, route

    num, top_k, width, inner = 128, 8, 2048, 768
    bf16, routing = torch.bfloat16, Routing(num, top_k)
    layers = [
        ExpertWeights(
            torch.randn(num, 2 * inner, width, device=device, dtype=bf16) * 0.02,
            torch.randn(num, width, inner, device=device, dtype=bf16) * 0.02,
        )
        for _ in range(NUM_LAYERS)
    ]
    router = torch.randn(num, width, device=device, dtype=bf16)
    norm = torch.ones(width, device=device, dtype=bf16)
    per_expert = 3 * width * inner * 2
    for tokens in (1, 2, 4, 8, 16, 64, 256, 1024, 8192):
        x = torch.randn(tokens, width, device=device, dtype=bf16)
        _, chosen, weights = route.norm_route(x, norm, 1e-6, router, None, None, routing)
        touched = len(chosen.unique())
        shape = f"{tokens} tokens, {touched} of {num} touched"

        def launch(
            index: int, x: torch.Tensor = x, chosen: torch.Tensor = chosen, weights: torch.Tensor = weights
        ) -> object:
            return kernels.run_experts(x, layers[index % len(layers)], chosen, weights, x)

        flops = tokens * top_k * 6 * width * inner
        yield KernelCase("experts", shape, launch, num_bytes=touched * per_expert, flops=flops)
        yield KernelCase(
            "experts: norm, router",
            shape,
            lambda _, x=x: route.norm_route(  # type: ignore[misc]
                x, norm, 1e-6, router, None, None, routing
            ),
        )
        if not few_tokens.is_preferred(x, layers[0], chosen):
            rows = kernels.tune(chosen.numel(), num).rows
            yield KernelCase(
                "experts: sort",
                shape,
                lambda _, chosen=chosen, rows=rows: route.sort_by_expert(  # type: ignore[misc]
                    chosen, num, rows
                ),
            )


def latent(device: torch.device) -> Iterator[KernelCase]:
    """Absorbed MLA over latents of 512 + 64. With 128 heads there are 241 operations per byte read, so the matrix units
    are the ceiling rather than memory. Each shape runs the kernel that the trials select for a model of that shape."""
    import torch

    from quire.kernels.table import select_ops
    from quire.kernels.triton.attention import paged
    from quire.kernels.validation.latent_trials import LatentTrialShape, settle_latent

    rank, rope_dim, page, bf16 = 512, 64, 64, torch.bfloat16
    shapes = [
        (256, 1024, 128, 1),
        (64, 4096, 128, 1),
        (8, 4096, 128, 1),
        (8, 8192, 128, 1),
        (1, 32768, 128, 1),
        (64, 4096, 64, 1),
        (64, 4096, 32, 1),
        (256, 1024, 16, 1),
        (64, 4096, 16, 1),
        (4, 4096, 128, 4096),
        (4, 4096, 16, 4096),
    ]
    for rows, length, heads, count in shapes:
        need = length // page
        trial = LatentTrialShape(heads, rank, rope_dim, page, bf16, bf16, length)
        attend = settle_latent(select_ops("cuda"), trial, device, strict=False).latent_attention
        cache = torch.randn(rows * need + 1, page, 1, rank + rope_dim, device=device, dtype=bf16)
        table = (torch.randperm(rows * need, dtype=torch.int32) + 1).view(rows, need).to(device)
        positions = torch.arange(length - count, length, device=device).repeat(rows)
        q_latent = torch.randn(heads, rows * count, rank, device=device, dtype=bf16)
        q_rope = torch.randn(rows * count, heads, rope_dim, device=device, dtype=bf16)
        plan = paged.plan_attention(table, positions, [count] * rows, [length] * rows, page, None, bf16)

        def launch(
            _: int,
            q_latent: torch.Tensor = q_latent,
            q_rope: torch.Tensor = q_rope,
            cache: torch.Tensor = cache,
            plan: paged.TritonPlan = plan,
            attend: Callable[..., torch.Tensor] = attend,
        ) -> object:
            return attend(q_latent, q_rope, cache, plan, 0.07)

        pairs = rows * (length if count == 1 else length * (length + 1) // 2)  # (query, visible entry)
        flops = pairs * heads * 2 * (2 * rank + rope_dim)
        size = rows * length * (rank + rope_dim) * 2 if count == 1 else 0
        name = "latent decode" if count == 1 else "latent prefill"
        yield KernelCase(name, f"{rows} × {length}, {heads} heads", launch, num_bytes=size, flops=flops)
