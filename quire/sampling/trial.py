"""Trial of the sampling kernel that every request uses, on a few rows of the model's vocabulary, before the engine is
built (see `kernels.validation.trials`). Kernels that only some requests need are compiled on first use by `fused`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.table import SamplingOps
from quire.kernels.validation.failures import reason, report_unusable
from quire.kernels.validation.trial_results import Findings
from quire.kernels.validation.trials import EXACT, compare, finish_writes, normal
from quire.sampling.noise import Noise, stream_key

SCALES = (0.0, 1.0, 1 / 0.7)  # inverse temperatures of the rows; 0: greedy
CLOSE = 1e-4  # relative tolerance of scores, above the error of hardware logarithms


def settle_sampling(
    ops: SamplingOps,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    strict: bool,
    findings: Findings | None = None,
) -> SamplingOps | None:
    """Returns the kernels if their trial succeeds; otherwise warns and returns None, or raises if `strict`."""
    error = (findings or Findings()).error_of(lambda: _try_sampling(ops, vocab_size, dtype, device))
    if error is None:
        return ops
    instead = "plain torch samples and steps run without CUDA graphs, more slowly"
    hint = "Leave strict_kernels and deterministic out, or see `quire doctor`."
    report_unusable("sampling", reason(error), refuse=strict, instead=instead, hint=hint)
    return None


def _try_sampling(ops: SamplingOps, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = normal(device, dtype, len(SCALES), vocab_size)
    keys = torch.tensor([stream_key(seed, 0) for seed in range(len(SCALES))], device=device)
    positions = torch.arange(len(SCALES), device=device) + 7
    scales = torch.tensor(SCALES, dtype=torch.float32, device=device)
    finish_writes(device)
    tokens, bad = ops.sample_rows(logits, keys, positions, scales)
    compare_choice(tokens, bad, logits, keys, positions, scales)


def compare_choice(
    tokens: Tensor, bad: Tensor, logits: Tensor, keys: Tensor, positions: Tensor, scales: Tensor
) -> None:
    """Raises unless greedy rows took the argmax and the others a token with the best score up to near-ties."""
    compare(bad, torch.zeros_like(bad), torch.float32, EXACT)
    there = tokens.clamp(0, logits.shape[1] - 1)
    compare(tokens, there, torch.float32, EXACT)
    wide, greedy = logits.float(), scales == 0
    compare(tokens.where(greedy, 0), wide.max(1).indices.where(greedy, 0), torch.float32, EXACT)
    scores = wide * scales[:, None] + Noise(logits.shape[1], logits.device).gumbel(keys, positions)
    scores = scores.masked_fill(greedy[:, None], 0.0)
    compare(scores.gather(1, there[:, None])[:, 0], scores.amax(1), torch.float32, CLOSE)
