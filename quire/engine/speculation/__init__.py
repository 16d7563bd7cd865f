"""Speculation: guesses of a request's next tokens, which a step verifies beside the token that it computes anyway.

The parts, in the order of the calls:

- `seam` has the protocols. A `Proposer` guesses: it gets requests (their tokens so far are `Request.tokens`) and
  returns a `Draft` for each, with the probability that each guess survives. The `Drafter` decides: once per plan the
  scheduler asks it which drafts the step shall verify, and later reports how many were accepted.
- One file per proposer: `forced` by a grammar, `prediction`, `suffix`, `ngram`, `device` (a head or a draft model). A
  proposer keeps what it needs per request id, forgets it in `end`, and costs little when it has no draft. It may return
  an empty draft at any time.
- `goodput` is the drafter: it asks the proposers in order, takes the first draft of each request, and verifies as many
  guesses as pay. `survival` corrects the proposers' estimates, `audit` keeps both choices measured.
- `build` makes a drafter of the setting `speculate`.

Rules. Drafts never change the output: the device samples each position as it would without drafts,
and accepts a draft while it equals what was sampled. A drafter never returns more than `max_drafts(request)` guesses. A
proposer that raises is switched off for that request and counted. Nothing here imports torch.
"""
