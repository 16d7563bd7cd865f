"""Log-probabilities, ranks and top alternatives of the model's own distribution: log_softmax of the logits before bias,
penalties, masks or temperature.

The sampler scores sampled tokens, the runtime scores prompts, and `to_records` converts scores to `TokenLogprobs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.sampling.rowwise import above, row_sums
from quire.types import TokenLogprobs

_SLICE_LEN = 64  # prompt positions whose logits are in memory at a time


@dataclass(slots=True)
class Logprobs:
    """Scores of some tokens with their alternatives, on the device."""

    token_ids: Tensor  # [n] int64: scored tokens
    logprob: Tensor  # [n] float32
    rank: Tensor  # [n] int64: 1 + number of strictly more likely tokens
    top_ids: Tensor  # [n, num_top] int64, best first
    top_logprobs: Tensor  # [n, num_top] float32

    def parts(self) -> tuple[Tensor, ...]:
        return (self.token_ids, self.logprob, self.rank, self.top_ids, self.top_logprobs)


def score(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Scores one token for each row of raw logits [n, vocab]."""
    log_total = logits.logsumexp(1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None])
    rank = row_sums(above(logits, chosen)).to(torch.int64).squeeze(1) + 1
    best = logits.topk(min(num_top, logits.shape[1]))
    return Logprobs(token_ids, (chosen - log_total).squeeze(1), rank, best.indices, best.values - log_total)


def prompt_logprobs(
    hidden_to_logits: Callable[[Tensor], Tensor], hidden: Tensor, next_tokens: Tensor, num_top: int
) -> Logprobs:
    """Scores each prompt token from the hidden state [n, width] of the token before it, a few positions at a time,
    because the logits of a whole prompt would exceed memory."""
    if not len(hidden):
        nothing = torch.empty(0, num_top, device=hidden.device)
        empty_ids = next_tokens.to(torch.int64)
        return Logprobs(empty_ids, nothing.sum(1), empty_ids.clone(), nothing.to(torch.int64), nothing)
    slices = [
        score(hidden_to_logits(part).to(torch.float32), tokens.to(torch.int64), num_top).parts()
        for part, tokens in zip(hidden.split(_SLICE_LEN), next_tokens.split(_SLICE_LEN), strict=True)
    ]
    return Logprobs(*(torch.cat(parts) for parts in zip(*slices, strict=True)))


def to_records(scored: Logprobs, num_top: list[int] | int) -> list[TokenLogprobs]:
    """Converts scores to plain records; the only function here that waits for the device. `num_top`: alternatives to
    keep, per token or for all."""
    lists = [part.tolist() for part in scored.parts()]
    wanted = [num_top] * len(lists[0]) if isinstance(num_top, int) else num_top
    return [
        TokenLogprobs(token_id, logprob, rank, top_ids[:keep], top_logprobs[:keep])
        for token_id, logprob, rank, top_ids, top_logprobs, keep in zip(*lists, wanted, strict=True)
    ]
