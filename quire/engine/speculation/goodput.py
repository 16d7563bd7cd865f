"""The drafter that maximizes goodput: it verifies a guess if that raises the expected number of tokens per second.

For each plan it asks the proposers, corrects their estimates by the outcomes of earlier drafts, ranks the guesses of
all rows by their probability of acceptance, and takes the number of guesses with the highest expected tokens per
second, by the measured times of steps. If no guess pays, it still makes drafts at times and compares them with the
sampled tokens, so that it notices when speculation pays again. Some steps, called audits, take the opposite choice, so
that the gain is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from quire.engine.speculation.device import DeviceProposer
from quire.engine.speculation.forced import cut_to_grammar
from quire.engine.speculation.seam import Draft, Proposer, max_drafts
from quire.engine.speculation.survival import SurvivalRecord
from quire.engine.step_costs import StepCosts
from quire.types import Plan, Request

LENGTH = 12  # maximum guesses of one draft
PATIENCE = 8  # the search for the best number of guesses ends after this many without a better rate
AUDIT = 256  # steps per audit
EARLY_AUDITS = 16  # number of first audits that come sixteen times as often, to learn the times of steps
MAX_REST = 8  # maximum steps between two drafts of a request whose drafts do not pay
ROWS_PER_REST = 2  # if no draft pays, proposers rest for one step per this many rows
WORTH_WAITING = 1.0  # minimum accepted tokens per draft for which a request waits if steps overlap
WAIT_TRIAL = 64  # a request with fewer waits at every 64th decision, to measure them again


@dataclass(slots=True)
class _DraftInterval:
    """The interval between one request's drafts."""

    rest: int = 0  # steps until the proposers are asked again
    pause: int = 1  # steps from one draft to the next
    accepted: float = 1.0  # running mean of correct guesses per draft
    num_decisions: int = 0

    def learn(self, num_right: int) -> None:
        self.accepted += 0.2 * (num_right - self.accepted)

    def settle(self, paid: bool) -> None:
        """Double the interval after each draft that did not pay."""
        self.pause = 1 if paid else min(2 * self.pause, MAX_REST)
        self.rest = self.pause - 1


class GoodputDrafter:
    """Implements `Drafter`."""

    def __init__(
        self, proposers: Sequence[Proposer], costs: StepCosts | None = None, device: DeviceProposer | None = None
    ):
        """`proposers`: asked in order, the device's last; the first draft of a request is taken."""
        self.costs = costs or StepCosts()
        self._device = device
        self._proposers = [*proposers, *([device] if device is not None else [])]
        self._survival = SurvivalRecord()
        self._intervals: dict[str, _DraftInterval] = {}
        self._barred: dict[str, set[str]] = {}  # request id -> proposers that have raised an error for it
        self._sources: dict[str, str] = {}  # request id -> the proposer of the drafts in flight
        self._counts: Counter[tuple[str, str]] = Counter()  # (proposer, what) -> count
        self._num_choices = 0
        self._num_audits = 0
        self._rest = 0  # steps until anything is proposed again
        self._seconds = 0.0  # total time of steps with drafts
        self._seconds_without = 0.0  # expected time of the same tokens in steps without drafts
        self._seconds_per_token = 0.0  # expected time per token of the last step with drafts, if it had none

    # -- Drafter --------------------------------------------------------------------------------------------------

    def draft(self, requests: Sequence[Request], num_tokens: int, budget: int) -> dict[str, list[int]]:
        if self._rest > 0:
            self._rest -= 1
            return {}
        candidates: list[tuple[float, int, str]] = []  # minus the survival, place, request id
        drafts: dict[str, Draft] = {}
        for request, draft in self._propose(requests):
            drafts[request.id] = draft
            for place, survival in enumerate(self._survival.correct(request, draft)[: max_drafts(request)]):
                candidates.append((-survival, place, request.id))
        if not candidates:
            return {}
        candidates.sort()
        num_keys = sum(len(request.tokens) for request in requests)
        count = self._best(candidates, num_tokens, num_keys, budget)
        if not count:
            self._rest = len(requests) // ROWS_PER_REST
        paying = {request_id for _, _, request_id in candidates[:count]}
        for request_id in drafts:
            self._intervals[request_id].settle(request_id in paying)
        count = self._audited(count, len(candidates), budget)
        lengths = Counter(request_id for _, _, request_id in candidates[:count])
        for request_id, length in lengths.items():
            source = drafts[request_id].source
            self._sources[request_id] = source
            self._counts[source, "drafted"] += length
        return {request_id: drafts[request_id].tokens[:length] for request_id, length in lengths.items()}

    def waits(self, request: Request) -> bool:
        interval = self._intervals.get(request.id)
        if interval is None:
            return True  # until its first draft has an outcome
        interval.num_decisions += 1
        return interval.accepted >= WORTH_WAITING or interval.num_decisions % WAIT_TRIAL == 0

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        source = self._sources.pop(request.id, "")
        self._counts[source, "verified"] += num_drafts
        self._counts[source, "accepted"] += num_accepted
        self._seconds_without += num_accepted * self._seconds_per_token

    def plan_proposals(self, requests: Sequence[Request], num_tokens: int) -> dict[str, int]:
        if self._device is None or self._rest > 0:
            return {}
        asking = []
        for request in requests:
            self._device.score(request)
            interval = self._intervals.get(request.id)
            # Where another proposer has found something, it usually finds more.
            if (interval is None or not interval.rest) and self._sources.get(request.id) in (None, self._device.name):
                asking.append(request)
        if not asking:
            return {}
        num_keys = sum(len(request.tokens) for request in asking)
        length = self._device.length(len(asking), num_keys, self.costs)
        return {request.id: length for request in asking} if length else {}

    def proposed(self, request: Request, drafts: list[int], chances: Sequence[float]) -> None:
        if self._device is not None:
            self._device.take(request, drafts, chances)

    def observe(self, plan: Plan, seconds: float, proposing: float = 0.0) -> None:
        if plan.proposals and proposing and self._device is not None:
            self._device.timed(max(plan.proposals.values()), proposing)
        num_tokens = num_keys = num_drafts = 0
        for row in plan.rows:
            if not row.wants_sample or row.count != 1 + row.num_drafts:
                return  # a step with prefill, from which the policy that sizes chunks learns
            num_tokens += row.count
            num_drafts += row.num_drafts
            num_keys += row.count * row.start
        if not num_tokens:
            return
        self.costs.observe(num_tokens, num_keys, seconds)
        num_rows = len(plan.rows)
        without = self.costs.seconds(num_rows, num_keys * num_rows // num_tokens)
        if num_drafts and without is not None:
            self._seconds_per_token = without / num_rows
            self._seconds += seconds
            self._seconds_without += without

    def end(self, request: Request) -> None:
        for proposer in self._proposers:
            proposer.end(request)
        self._survival.end(request)
        for table in (self._intervals, self._barred, self._sources):
            table.pop(request.id, None)

    def stats(self) -> dict[str, object]:
        names = [proposer.name for proposer in self._proposers]
        kinds = ("drafted", "verified", "accepted", "failed")
        report: dict[str, object] = {name: {kind: self._counts[name, kind] for kind in kinds} for name in names}
        right, tried = self._survival.right, self._survival.tried
        report["by_position"] = {
            name: [round(r / t, 4) for r, t in zip(right.get(name, []), tried.get(name, []), strict=True)]
            for name in names
        }
        report["audits"] = self._num_audits
        report["speedup"] = round(self.speedup, 3)
        return report

    @property
    def speedup(self) -> float:
        """Expected time without drafts over the time with drafts, for the same tokens."""
        return self._seconds_without / self._seconds if self._seconds else 1.0

    # -- choosing -------------------------------------------------------------------------------------------------

    def _best(self, candidates: list[tuple[float, int, str]], num_tokens: int, num_keys: int, budget: int) -> int:
        """Return how many of the ranked guesses make the most expected tokens per second."""
        base = self.costs.seconds(num_tokens, num_keys)
        if base is None:
            return 0  # no step was timed yet: the first one has no drafts
        keys_per_token = num_keys // max(num_tokens, 1)
        best, best_rate, tokens = 0, num_tokens / base, float(num_tokens)
        for count, (negative, _, _) in enumerate(candidates[:budget], start=1):
            tokens -= negative
            size = num_tokens + count
            seconds = self.costs.seconds(size, size * keys_per_token)
            assert seconds is not None
            if tokens / seconds > best_rate:
                best, best_rate = count, tokens / seconds
            elif count - best >= PATIENCE:
                break
        return best

    def _audited(self, count: int, num_candidates: int, budget: int) -> int:
        """Return the opposite choice in an audit: no drafts if some pay, one draft if none does."""
        self._num_choices += 1
        every = AUDIT // 16 if self._num_audits < EARLY_AUDITS else AUDIT
        if self._num_choices % every:
            return count
        self._num_audits += 1
        return 0 if count else min(1, num_candidates, budget)

    # -- proposing ------------------------------------------------------------------------------------------------

    def _propose(self, requests: Sequence[Request]) -> list[tuple[Request, Draft]]:
        """Score the open drafts, and return new ones of the requests whose proposers are not resting."""
        silent: list[Request] = []
        for request in requests:
            interval = self._intervals.setdefault(request.id, _DraftInterval())
            num_right = self._survival.score(request)
            if num_right is not None:
                interval.learn(num_right)
            if interval.rest > 0:
                interval.rest -= 1
            else:
                silent.append(request)
        found: list[tuple[Request, Draft]] = []
        for proposer in self._proposers:
            if not silent:
                break
            drafts = self._ask(proposer, silent)
            for request, draft in zip(silent, drafts, strict=True):
                if draft.tokens:
                    draft.tokens = cut_to_grammar(request, draft.tokens)
            found += [(r, draft) for r, draft in zip(silent, drafts, strict=True) if draft.tokens]
            silent = [r for r, draft in zip(silent, drafts, strict=True) if not draft.tokens]
        return found

    def _ask(self, proposer: Proposer, requests: Sequence[Request]) -> list[Draft]:
        """Return the proposer's drafts. After an error it is asked for one request at a time, and is barred from the
        requests for which it raises an error again."""
        asked = [r for r in requests if proposer.name not in self._barred.get(r.id, ())]
        drafts: dict[str, Draft] = {}
        try:
            if asked:
                drafts = dict(zip((r.id for r in asked), proposer.propose(asked, LENGTH), strict=True))
        except Exception:
            for request in asked:
                try:
                    (drafts[request.id],) = proposer.propose([request], LENGTH)
                except Exception:
                    self._barred.setdefault(request.id, set()).add(proposer.name)
                    self._counts[proposer.name, "failed"] += 1
        return [drafts.get(request.id, Draft()) for request in requests]
