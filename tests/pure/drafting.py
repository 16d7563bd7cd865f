"""A drafter for tests, which knows what will be sampled and is right as often as it wants."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from quire.engine.costs.step_costs import StepCosts
from quire.engine.limits import SpeculationStats
from quire.engine.speculation.seam import Draft, max_drafts
from quire.types import Plan, Request, Status
from tests.pure.shadow import VOCAB, digest_of, next_token

Oracle = Callable[[Request, list[int]], int]  # request, tokens that follow its own -> the token that comes then


def shadow_oracle(request: Request, tokens: list[int]) -> int:
    return next_token(digest_of(request.tokens + tokens), request.seed)


class RandomDrafter:
    """Implements `Drafter` and `Proposer`: drafts of random lengths, sometimes none, each token right with probability
    `right`. With `waits` below 1 some requests with a token in flight are planned without drafts."""

    name = "random"
    has_device = True

    def __init__(self, rng: random.Random, *, right: float = 0.6, silent: float = 0.3, longest: int = 6,
                 waits: float = 1.0, oracle: Oracle = shadow_oracle, vocab: int = VOCAB,
                 proposing: bool = False):  # fmt: skip
        self._rng, self._right, self._silent, self._longest, self._waits = rng, right, silent, longest, waits
        self._oracle, self._vocab = oracle, vocab
        self.proposing = proposing  # lets the device propose, and verifies what it proposed
        self.proposals: dict[str, tuple[int, list[int]]] = {}  # request id -> its length, drafts that follow
        self.num_proposed = 0
        self.costs = StepCosts()
        self.num_drafts = self.num_accepted = self.num_partial = 0
        self.open: set[str] = set()

    def draft(self, requests: Sequence[Request], num_tokens: int, budget: int) -> dict[str, list[int]]:
        found = {}
        for request, draft in zip(requests, self.propose(requests, budget), strict=True):
            tokens = draft.tokens[: max_drafts(request)]
            if tokens and len(tokens) <= budget:
                found[request.id] = tokens
                budget -= len(tokens)
        return found

    def propose(self, requests: Sequence[Request], budget: int) -> list[Draft]:
        drafts = []
        for request in requests:
            assert request.pending == request.num_drafts == 0, "its tokens are not all known"
            self.open.add(request.id)
            count = 0 if self._rng.random() < self._silent else self._rng.randint(1, self._longest)
            length, proposed = self.proposals.get(request.id, (0, []))
            if length == len(request.tokens) and count:
                drafts.append(Draft(proposed[:budget], [0.5] * len(proposed[:budget]), self.name))
                continue
            tokens: list[int] = []
            for _ in range(min(count, budget)):
                is_right = self._rng.random() < self._right
                tokens.append(self._oracle(request, tokens) if is_right else self._rng.randrange(self._vocab))
            drafts.append(Draft(tokens, [self._right**i for i in range(1, len(tokens) + 1)], self.name))
        return drafts

    def waits(self, request: Request) -> bool:
        return self._rng.random() < self._waits

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted
        self.num_partial += 0 < num_accepted < num_drafts

    def plan_proposals(self, requests: Sequence[Request], num_tokens: int) -> dict[str, int]:
        if not self.proposing:
            return {}
        return {r.id: self._rng.randint(1, self._longest) for r in requests if self._rng.random() > self._silent}

    def is_proposed(self, request: Request) -> bool:
        return self.proposals.get(request.id, (0, []))[0] == len(request.tokens)

    def proposed(self, request: Request, drafts: list[int], chances: Sequence[float]) -> None:
        assert len(drafts) == len(chances) > 0 and request.status is not Status.ENDED
        self.num_proposed += len(drafts)
        self.proposals[request.id] = (len(request.tokens), drafts)

    def observe(self, plan: Plan, seconds: float, proposing: float = 0.0) -> None:
        pass

    def end(self, request: Request) -> None:
        self.open.discard(request.id)
        self.proposals.pop(request.id, None)

    def save(self) -> None:
        pass

    def stats(self) -> SpeculationStats:
        return SpeculationStats()
