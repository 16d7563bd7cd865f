"""The sampler's oracle: the distribution of one row's next token, in plain float64 numpy, one step after the other.

Slow and obvious on purpose; shares no code with `quire.sampling`.
"""

from __future__ import annotations

import numpy as np

from quire.types import SamplingParams


def edited_logits(
    logits: np.ndarray, params: SamplingParams, prompt_ids: list[int], output_ids: list[int], stop_ids: tuple[int, ...]
) -> np.ndarray:
    """Logits after bias, penalties, DRY, min_tokens and bad words."""
    x = np.array(logits, np.float64)
    history = prompt_ids + output_ids
    for token, value in params.logit_bias:
        x[token] += value
    for token in set(history):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output_ids):
        x[token] -= params.presence_penalty + params.frequency_penalty * output_ids.count(token)
    for token, penalty in dry_penalties(history, params).items():
        x[token] -= penalty
    if len(output_ids) < params.min_tokens:
        x[list(stop_ids)] = -np.inf
    for word in params.bad_token_ids:
        prefix = list(word[:-1])
        if not prefix or history[-len(prefix) :] == prefix:
            x[word[-1]] = -np.inf
    return x


def dry_penalties(history: list[int], params: SamplingParams) -> dict[int, float]:
    if params.dry_multiplier == 0:
        return {}
    tokens = history[-params.dry_range :] if params.dry_range else history
    breakers = set(params.dry_breaker_ids)
    longest: dict[int, int] = {}
    for end in range(len(tokens) - 1):  # a repetition that ends here
        match_len = 0
        while match_len <= end:
            token = tokens[-1 - match_len]
            if token in breakers or tokens[end - match_len] != token:
                break
            match_len += 1
        following = tokens[end + 1]
        if following not in breakers:
            longest[following] = max(longest.get(following, 0), match_len)
    return {
        token: params.dry_multiplier * params.dry_base ** float(match_len - params.dry_allowed_len)
        for token, match_len in longest.items()
        if match_len >= params.dry_allowed_len
    }


def distribution(
    logits: np.ndarray,
    params: SamplingParams,
    prompt_ids: list[int],
    output_ids: list[int],
    stop_ids: tuple[int, ...] = (),
    allowed: np.ndarray | None = None,
) -> np.ndarray:
    """Probabilities [vocab] of the next token."""
    x = edited_logits(logits, params, prompt_ids, output_ids, stop_ids)
    if allowed is not None:
        x[~allowed] = -np.inf
    if params.temperature == 0 or params.top_k == 1 or params.top_p == 0:
        greedy = np.zeros_like(x)
        greedy[x.argmax()] = 1
        return greedy
    keep = np.isfinite(x)
    scaled = x / params.temperature
    if params.top_k:
        keep &= scaled >= np.sort(scaled)[::-1][min(params.top_k, len(x)) - 1]
    if params.top_n_sigma:
        keep &= x >= x.max() - params.top_n_sigma * x[np.isfinite(x)].std()
    if params.top_p < 1:
        keep &= scaled >= top_p_cut(scaled, softmax(np.where(keep, scaled, -np.inf)), params.top_p)
    if params.min_p:
        keep &= softmax(scaled) >= params.min_p * softmax(scaled).max()
    return softmax(np.where(keep, scaled, -np.inf))


def top_p_cut(scores: np.ndarray, probabilities: np.ndarray, top_p: float) -> float:
    """Score of the last token of the smallest set of most likely ones that reaches top_p."""
    order = np.argsort(-probabilities, kind="stable")
    reached = 0.0
    for token in order:
        reached += probabilities[token]
        if reached >= top_p:
            return float(scores[token])
    return -np.inf


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()
