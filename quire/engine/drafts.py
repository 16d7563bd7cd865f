"""Drafts in the scheduler: asks the drafter, reserves units for drafts in a plan, and settles them in the commit.

It also keeps the rules by which drafts and overlapped steps agree: a row with drafts is in one step in flight only,
drafts never preempt a request or take its room, and `planned` and `computed` advance by accepted drafts only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.cache.draft_units import DraftUnits
from quire.cache.index import CacheIndex
from quire.engine.limits import SpeculationStats
from quire.engine.speculation.seam import Drafter, max_drafts
from quire.types import Plan, PlanRow, Request
from quire.types.bounds import MAX_DRAFTS

Drafts = Mapping[str, list[int]]  # by request id
NO_DRAFTS: Drafts = {}
MAX_REPLAYED = 32  # tokens; a row that replays more gets no drafts, so that its state moves on


class PlannedDrafts:
    """The drafts of one scheduler's steps. `drafter`: None without speculation."""

    def __init__(self, drafter: Drafter | None, cache: CacheIndex):
        self.drafter = drafter
        self._units = DraftUnits(cache)
        self._has_state = bool(cache.state)

    def choose(self, decodes: Sequence[Request], has_prompts: bool, budget: int) -> Drafts:
        """Return the drafts for the step being planned. If prompts wait to be computed, drafts get at most half of the
        budget that decodes leave."""
        if self.drafter is None:
            return NO_DRAFTS
        ready = [r for r in decodes if not r.inflight and max_drafts(r) > 0 and r.num_replayed <= MAX_REPLAYED]
        spare = budget - len(decodes) - (sum(r.num_replayed for r in decodes) if self._has_state else 0)
        spare = spare // 2 if has_prompts else spare
        return self.drafter.draft(ready, len(decodes), spare) if ready and spare > 0 else NO_DRAFTS

    def waits(self, request: Request) -> bool:
        """True if a request with a token in flight shall not be planned before that token is known."""
        if self.drafter is None:
            return False
        if request.num_drafts > 0 or request.num_proposals > 0:
            return True
        return request.params.speculate and self.drafter.waits(request)

    def add(self, request: Request, chosen: Drafts, end: int, budget: int, margin: int, plan: Plan) -> int:
        """Add a decode's drafts to the plan, whose next row is that of the request and ends at `end` without them.

        Returns how many have room.
        """
        drafts = chosen.get(request.id)
        if drafts is None:
            return 0
        count = min(len(drafts), budget, max_drafts(request))
        count = self._units.reserve(request, end, count, margin, plan) if count > 0 else 0
        if count:
            plan.drafts[len(plan.rows)] = drafts[:count]
            if self.drafter is not None and self.drafter.is_proposed(request):
                plan.proposed.append(len(plan.rows))
            request.num_drafts = count
            request.pending += count
        return count

    def plan_proposals(self, requests: Mapping[str, Request], margin: int, plan: Plan) -> None:
        """Add to the plan for which of its rows the device proposes drafts, and the units those need."""
        if self.drafter is None or not self.drafter.has_device:
            return
        indices = {row.request_id: index for index, row in enumerate(plan.rows) if row.wants_sample}
        asking = [r for r in (requests[name] for name in indices) if r.params.speculate and r.inflight == 1]
        lengths = self.drafter.plan_proposals(asking, plan.num_tokens) if asking else {}
        for request_id, length in lengths.items():
            request = requests[request_id]
            count = min(length, MAX_DRAFTS, request.max_len - request.planned - 2)
            count = self._units.extend(request, request.planned, count, margin, plan) if count > 0 else 0
            if count:
                plan.proposals[indices[request_id]] = request.num_proposals = count

    def write_moved(self, request: Request, plan: Plan) -> None:
        """Tell the device which slots hold the live state of a request, if rejected drafts have changed them."""
        self._units.write_moved(request, plan)

    def settle(self, request: Request, row: PlanRow, num_accepted: int, fence: int) -> None:
        """Move a request's marks back behind the accepted drafts, and release the units of the rejected ones.

        Called once the row's tokens are appended. Recurrent state returns to that before the step, so the accepted
        tokens are computed again by the request's next step.
        """
        rejected = row.num_drafts - num_accepted
        request.pending -= row.num_drafts
        request.num_drafts = 0
        if rejected:
            request.computed = row.start if self._has_state else request.computed - rejected
        request.computed = min(request.computed, len(request.tokens))  # what follows the end was dropped
        request.planned = request.computed
        if rejected and self._has_state:
            request.num_replayed = max(len(request.tokens) - 1 - request.computed, 0)
        request.num_drafted += row.num_drafts
        request.num_accepted += num_accepted
        self._units.settle(request, rejected, fence)
        if self.drafter is not None:
            self.drafter.verified(request, row.num_drafts, num_accepted)

    def take_proposals(self, request: Request, drafts: list[int], chances: Sequence[float]) -> None:
        """Hand drafts that the device has proposed to the drafter, once the step's tokens are appended."""
        request.num_proposals = 0
        if drafts and self.drafter is not None:
            self.drafter.proposed(request, drafts, chances)

    def observe(self, plan: Plan, seconds: float, proposing: float) -> None:
        """Report how long a step took, and how long the device proposed drafts after it."""
        if self.drafter is not None:
            self.drafter.observe(plan, seconds, proposing)

    def save(self) -> None:
        """Write what the drafter keeps for the next engine."""
        if self.drafter is not None:
            self.drafter.save()

    def stats(self) -> SpeculationStats | None:
        """Return the drafter's counters."""
        return None if self.drafter is None else self.drafter.stats()

    def end(self, *requests: Request) -> None:
        """Forget requests that have ended."""
        if self.drafter is not None:
            for request in requests:
                self.drafter.end(request)
