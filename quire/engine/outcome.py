"""Effects of a step's tokens on one request: tokens appended, the finish reason, and the final delta.

These are functions of a request and its delta, which the scheduler calls while it commits.
"""

from __future__ import annotations

from quire.types import Delta, FinishReason, GrammarSpec, QuireError, Request, Timing, Usage


def append_tokens(request: Request, delta: Delta) -> FinishReason | None:
    """Append the new tokens up to the one that ends the request, and drop the rest. Returns the finish reason."""
    reason, used = None, 0
    for token in delta.token_ids:
        request.tokens.append(token)
        used += 1
        if token in request.stop_ids and request.num_sampled >= request.params.min_tokens:
            reason = FinishReason.STOP
            break
        if len(request.tokens) >= request.max_len:
            reason = FinishReason.LENGTH
            break
    if used < len(delta.token_ids):
        delta.token_ids = delta.token_ids[:used]
        delta.logprobs = delta.logprobs[:used] if delta.logprobs else None
    return reason


def end_delta(request: Request, reason: FinishReason, now: float) -> Delta:
    """Return the final delta of a request, with its usage and timing."""
    timing = Timing(
        queue=(request.admitted_at or now) - request.arrival,
        first_token=(request.first_token_at - request.arrival) if request.first_token_at else 0.0,
        total=now - request.arrival,
    )
    usage = Usage(
        request.prompt_len,
        request.cached_len,
        request.num_sampled,
        request.num_accepted,
        request.num_drafted - request.num_accepted,
    )
    return Delta(request.id, finish_reason=reason, usage=usage, timing=timing)


def fail_row(request: Request, delta: Delta) -> FinishReason:
    """Turn the delta of a request for which no token could be sampled into that of its error."""
    error = _no_token_error(request)
    delta.token_ids, delta.error_code, delta.error = [], error.code, str(error)
    return FinishReason.ERROR


def _no_token_error(request: Request) -> QuireError:
    """Return the error of a request without an allowed token: a failed or exhausted grammar, or bad logits."""
    grammar = request.grammar
    if grammar is None:
        what = "The model produced logits that are not finite."
        return QuireError("bad_logits", what, "Check the weights and the dtype.")
    what = "The grammar and the other sampling parameters together allow no token."
    hint = "Look at min_tokens, logit_bias and bad_words, or at the weights and the dtype."
    error = None if isinstance(grammar, GrammarSpec) else grammar.error
    return error or QuireError("no_allowed_token", what, hint)
