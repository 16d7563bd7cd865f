"""Speculation: guesses of a request's next tokens, which a step verifies beside the token that it computes anyway.

The parts and who calls whom:

- `seam` has the protocols. A `Proposer` guesses: it gets requests (their tokens so far are `Request.tokens`) and
  returns a `Draft` for each, with the probability that each guess survives. The `Drafter` decides: the scheduler asks
  it once per plan which drafts the step shall verify, and tells it what became of them.
- One file per proposer (`forced` by a grammar, `ngram`). A proposer keeps what it needs per request id, forgets it in
  `end`, and costs little when it has nothing to say. It may return nothing at any time.
- `stack` is the drafter: it asks the proposers in order, and takes the first answer.
- `build` makes a drafter of the setting `speculate`.

Rules. Whatever is proposed, the output is the same tokens: the device samples each position as it would without drafts,
and accepts a draft while it equals what was sampled. A drafter never returns more than `max_drafts(request)` guesses. A
proposer that raises is switched off for that request and counted. Nothing here imports torch.
"""
