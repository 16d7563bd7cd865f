"""Sampling kernels for `quire bench kernels`: one row and a full batch with a large vocabulary.

Two kinds of logits: peaked as those of a trained model, where few tokens have most of the probability, and flat as
those of random weights, where top-p keeps thousands of tokens and the kernel verifies a drawn token instead of listing
the kept ones. Bytes are those of one pass over the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.bench.kernels.suite import KernelCase

if TYPE_CHECKING:
    import torch

VOCAB = 151936
PEAKED, FLAT = 4.0, 1.0  # standard deviations of the logits
FILTERS = {  # top-k, top-p, min-p, top-n-sigma
    "top-k 20": (20, 1.0, 0.0, 0.0),
    "top-p 0.95": (0, 0.95, 0.0, 0.0),
    "k 20 p 0.95": (20, 0.95, 0.0, 0.0),
    "min-p 0.05": (0, 1.0, 0.05, 0.0),
    "1 sigma": (0, 1.0, 0.0, 1.0),
    "k 4000 p 0.9": (4000, 0.9, 0.0, 0.0),  # the slowest: the threshold of a wide top-k is searched bit by bit
}


def sampling(device: torch.device) -> Iterator[KernelCase]:
    import torch

    from quire.kernels.triton.sampling import edits, filters, logprobs, sample

    for rows in (1, 256):
        normal = torch.randn(rows, VOCAB, device=device)
        key = torch.arange(rows, device=device)
        size = rows * VOCAB * 2
        peaked, flat = ((normal * spread).to(torch.bfloat16) for spread in (PEAKED, FLAT))
        for name, scale in (("greedy", 0.0), ("temperature", 1.6)):
            scales = torch.full((rows,), scale, device=device)
            yield _case("sample_rows", rows, name, size, sample.sample_rows, flat, key, key, scales)
        scales = torch.full((rows,), 1 / 0.7, device=device)
        for kind, logits in (("peaked", peaked), ("flat", flat)):
            for name, (top_k, top_p, min_p, sigma) in FILTERS.items():
                values = [torch.full((rows,), value, device=device) for value in (top_k, top_p, min_p, sigma)]
                values[1] = values[1].double()
                yield _case(
                    "sample_filtered",
                    rows,
                    f"{name}, {kind}",
                    size,
                    filters.sample_filtered,
                    logits,
                    key,
                    key,
                    scales,
                    *values,
                )
        copies = torch.empty(rows, VOCAB, device=device)
        yield _case("copy_samples", rows, "", 3 * size, edits.copy_samples, flat, key)
        history = torch.randint(0, VOCAB, (rows, 4096), device=device, dtype=torch.int32)
        penalties = [torch.full((rows,), value, device=device) for value in (1.1, 0.1, 0.1)]
        for length in (512, 4096):
            lengths = torch.full((rows,), length, device=device)
            yield _case(
                "apply_penalties",
                rows,
                f"{length} tokens",
                0,
                edits.apply_penalties,
                copies,
                key.to(torch.int32),
                key,
                lengths // 2,
                *penalties,
                history,
                lengths,
                key,
            )
        for num_top in (0, 20):
            yield _case("score_rows", rows, f"top {num_top}", size, logprobs.score_rows, peaked, None, key, num_top)


def _case(name: str, rows: int, what: str, num_bytes: int, function: object, *args: object) -> KernelCase:
    def launch(index: int) -> object:
        return function(*args)  # type: ignore[operator]

    return KernelCase(name, f"{rows} rows, {what}" if what else f"{rows} rows", launch, num_bytes=num_bytes)
