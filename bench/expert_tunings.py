"""Find the fastest tile sizes of the expert kernels on this GPU: times run_experts with the shapes of Qwen3-30B-A3B.

    python bench/expert_tunings.py [tokens ...]     # default: 8 256 8192

Enter the fastest tunings in `tune` of quire/kernels/triton/experts/experts.py.
"""

from __future__ import annotations

import itertools
import sys

import torch

from quire.bench.kernels.suite import microseconds
from quire.kernels.expert_types import ExpertWeights
from quire.kernels.triton.experts.experts import ExpertsTuning, GroupedTuning, run_experts, tune

NUM, TOP_K, WIDTH, INNER = 128, 8, 2048, 768
FEW = [
    GroupedTuning(*sizes)
    for sizes in (
        (32, 128, 4, 4),
        (64, 64, 4, 5),
        (64, 128, 4, 3),
        (64, 128, 4, 4),
        (64, 256, 4, 3),
        (128, 64, 4, 4),
        (128, 128, 8, 3),
    )
]
MANY = [
    GroupedTuning(*sizes)
    for sizes in (
        (64, 64, 4, 4),
        (128, 64, 4, 3),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (128, 128, 8, 2),
        (256, 64, 8, 3),
        (256, 64, 8, 4),
    )
]


def main() -> None:
    device, bf16 = torch.device("cuda"), torch.bfloat16
    layers = [
        ExpertWeights(
            torch.randn(NUM, 2 * INNER, WIDTH, device=device, dtype=bf16) * 0.02,
            torch.randn(NUM, WIDTH, INNER, device=device, dtype=bf16) * 0.02,
        )
        for _ in range(2)
    ]
    for tokens in [int(word) for word in sys.argv[1:]] or [8, 256, 8192]:
        x = torch.randn(tokens, WIDTH, device=device, dtype=bf16)
        chosen = torch.rand(tokens, NUM, device=device).topk(TOP_K).indices.int()
        weights = torch.rand(tokens, TOP_K, device=device)
        default = tune(chosen.numel(), NUM)
        found = [(time_tuning(layers, x, chosen, weights, default), default)]
        products = FEW if default.rows < 64 else MANY
        rows = {default.rows, max(16, default.rows // 2), min(256, default.rows * 2)}
        for count, product in itertools.product(sorted(rows), products):  # varies one product, keeps the other
            for tuning in (ExpertsTuning(count, product, default.down), ExpertsTuning(count, default.gate_up, product)):
                found.append((time_tuning(layers, x, chosen, weights, tuning), tuning))
        print(f"{tokens} tokens: {found[0][0]:.1f} µs as it is")
        for us, tuning in sorted(found, key=lambda pair: pair[0])[:8]:
            print(f"  {us:9.1f} µs  rows {tuning.rows:3}  gate-up {_sizes(tuning.gate_up)}  down {_sizes(tuning.down)}")


def time_tuning(
    layers: list[ExpertWeights], x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, tuning: ExpertsTuning
) -> float:
    try:
        return microseconds(lambda index: run_experts(x, layers[index % 2], chosen, weights, x, tuning))
    except Exception as error:  # usually too much shared memory
        print(f"  skipped {tuning}: {type(error).__name__}")
        return float("inf")


def _sizes(product: GroupedTuning) -> str:
    return f"{product.block_out}×{product.block_in}, {product.num_warps} warps, {product.num_stages} stages"


if __name__ == "__main__":
    main()
