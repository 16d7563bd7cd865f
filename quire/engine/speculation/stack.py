"""A drafter without a cost model: asks its proposers in order, and verifies the first answer up to a fixed length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from quire.engine.speculation.forced import cut_to_grammar
from quire.engine.speculation.seam import Draft, Proposer, max_drafts
from quire.types import Plan, Request

LENGTH = 4  # drafts per row
MIN_SURVIVAL = 0.3


class ProposerStack:
    """Implements `Drafter`."""

    def __init__(self, proposers: Sequence[Proposer], length: int = LENGTH):
        self._proposers = list(proposers)
        self._length = length
        self._barred: dict[str, set[str]] = {}  # request id -> proposers that have raised for it
        self._sources: dict[str, str] = {}  # request id -> the proposer of the drafts in flight
        self._counts: Counter[tuple[str, str]] = Counter()  # (proposer, what) -> count

    def draft(self, requests: Sequence[Request], num_tokens: int, budget: int) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        silent = list(requests)
        for proposer in self._proposers:
            if not silent:
                break
            for request, draft in zip(silent, self._ask(proposer, silent), strict=True):
                tokens = draft.tokens[: min(self._useful(draft), max_drafts(request), max(budget, 0))]
                if tokens and (tokens := cut_to_grammar(request, tokens)):
                    found[request.id] = tokens
                    self._sources[request.id] = proposer.name
                    self._counts[proposer.name, "drafted"] += len(tokens)
                    budget -= len(tokens)
            silent = [request for request in silent if request.id not in found]
        return found

    def waits(self, request: Request) -> bool:
        return True

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        source = self._sources.pop(request.id, "")
        self._counts[source, "verified"] += num_drafts
        self._counts[source, "accepted"] += num_accepted

    def observe(self, plan: Plan, seconds: float) -> None:
        pass

    def end(self, request: Request) -> None:
        for proposer in self._proposers:
            proposer.end(request)
        self._barred.pop(request.id, None)
        self._sources.pop(request.id, None)

    def stats(self) -> dict[str, object]:
        names = [proposer.name for proposer in self._proposers]
        kinds = ("drafted", "verified", "accepted", "failed")
        return {name: {kind: self._counts[name, kind] for kind in kinds} for name in names}

    def _ask(self, proposer: Proposer, requests: Sequence[Request]) -> list[Draft]:
        """Return the proposer's drafts. If it raises it is asked for one request at a time, and never again for those
        with which it raises."""
        asked = [r for r in requests if proposer.name not in self._barred.get(r.id, ())]
        drafts: dict[str, Draft] = {}
        try:
            if asked:
                drafts = dict(zip((r.id for r in asked), proposer.propose(asked, self._length), strict=True))
        except Exception:
            for request in asked:
                try:
                    (drafts[request.id],) = proposer.propose([request], self._length)
                except Exception:
                    self._barred.setdefault(request.id, set()).add(proposer.name)
                    self._counts[proposer.name, "failed"] += 1
        return [drafts.get(request.id, Draft()) for request in requests]

    def _useful(self, draft: Draft) -> int:
        return sum(survival >= MIN_SURVIVAL for survival in draft.survival[: len(draft.tokens)])
