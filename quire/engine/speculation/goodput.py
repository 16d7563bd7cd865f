"""The drafter that maximizes goodput: it verifies a guess if that raises the expected number of tokens per second.

For each plan it asks the proposers, corrects their estimates by the outcomes of earlier drafts, ranks the guesses of
all rows by their probability of acceptance, and takes the number of guesses with the highest expected tokens per
second, by the measured times of steps. If no guess pays, it still makes drafts at times and compares them with the
sampled tokens, so that it notices when speculation pays again. Some steps, called audits, take the opposite choice, so
that the gain is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.engine.costs.step_costs import StepCosts, StepSize
from quire.engine.limits import ProposerCounts, SpeculationStats
from quire.engine.speculation.audit import AuditBudget, GainRecord
from quire.engine.speculation.device import DeviceProposer
from quire.engine.speculation.forced import cut_to_grammar
from quire.engine.speculation.seam import Draft, Proposer, max_drafts
from quire.engine.speculation.survival import SurvivalRecord
from quire.types import Plan, Request

LENGTH = 12  # maximum guesses of one draft
PATIENCE = 8  # the search for the best number of guesses ends after this many without a better rate
MAX_REST = 8  # maximum steps between two drafts of a request whose drafts do not pay
ROWS_PER_REST = 2  # if no draft pays, proposers rest for one step per this many rows
# Expected accepted drafts for which a request waits if steps overlap: beside others it misses one of their steps, alone
# it waits for the host only.
WORTH_WAITING, WORTH_WAITING_ALONE = 1.0, 0.5
WAIT_TRIAL = 64  # a request whose drafts did not pay waits at every 64th decision at most, to notice when they do
ROWS_PER_LOOK = 16  # with many rows each is looked at for drafts worth waiting for in one of several steps
# Minus its probability of acceptance, its position in the draft, request id, expected tokens that it costs the step.
Guess = tuple[float, int, str, float]


@dataclass(slots=True)
class _Drafting:
    """The state of one request."""

    rest: int = 0  # number of steps until the proposers are called again
    pause: int = 1  # steps from one draft to the next
    num_decisions: int = 0  # number of decisions whether to wait for its token in flight
    has_waited: bool = False  # it waited for its token in flight, to draft after that token
    is_in_vain: bool = False  # the drafts for which it waited last did not pay
    source: str = ""  # the proposer of the drafts in flight
    barred: set[str] = field(default_factory=set)  # proposers that have raised an error for it

    def settle(self, paid: bool) -> None:
        """Double the interval after each draft that did not pay."""
        self.is_in_vain = not paid and (self.is_in_vain or self.has_waited)
        self.has_waited = False
        self.pause = 1 if paid else min(2 * self.pause, MAX_REST)
        self.rest = self.pause - 1


class GoodputDrafter:
    """Implements `Drafter`."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        costs: StepCosts | None = None,
        device: DeviceProposer | None = None,
        *,
        replays: bool = False,
        save: Callable[[], None] = lambda: None,
    ):
        """`proposers`: asked in order, the device's last; the first draft of a request is taken. `replays`: after a
        rejected draft the step's accepted tokens are computed again, since the model has recurrent state. `save`: see
        `Drafter.save`."""
        self.save = save
        self.costs = costs or StepCosts()
        self._device = device
        self._replays = replays
        self.has_device = device is not None
        self._hosts = list(proposers)
        self._proposers = [*proposers, *([device] if device is not None else [])]
        self._survival = SurvivalRecord()
        self._requests: dict[str, _Drafting] = {}
        self._counts = {proposer.name: ProposerCounts(proposer.name) for proposer in self._proposers}
        self._audits = AuditBudget()
        self._gain = GainRecord()
        self._rest = 0  # steps until anything is proposed again

    # -- Drafter --------------------------------------------------------------------------------------------------

    def draft(self, requests: Sequence[Request], num_tokens: int, budget: int) -> dict[str, list[int]]:
        if self._rest > 0:
            return {}
        guesses: list[Guess] = []
        drafts: dict[str, Draft] = {}
        for request, draft in self._propose(requests):
            drafts[request.id] = draft
            self._counts[draft.source].add_drafted(len(draft.tokens))
            before = 1.0
            for place, survival in enumerate(self._survival.correct(request, draft)[: max_drafts(request)]):
                guesses.append((-survival, place, request.id, self._tokens_of(request, place, before, survival)))
                before = survival
        if not guesses:
            return {}
        guesses.sort()
        num_keys = sum(len(request.tokens) for request in requests)
        num_replayed = sum(request.num_replayed for request in requests) if self._replays else 0
        count, rate = self._best(guesses, num_tokens, num_tokens + num_replayed, num_keys, budget)
        if not count:
            self._rest = 1 + len(requests) // ROWS_PER_REST  # this step's end takes one off
        paying = {guess[2] for guess in guesses[:count]}
        for request_id in drafts:
            self._requests[request_id].settle(request_id in paying)
        if self._audits.is_due():
            count = self._audited(count, rate, guesses, num_tokens, num_tokens + num_replayed, num_keys, budget)
        lengths = Counter(guess[2] for guess in guesses[:count])
        for request_id in lengths:
            self._requests[request_id].source = drafts[request_id].source
        return {request_id: drafts[request_id].tokens[:length] for request_id, length in lengths.items()}

    def waits(self, request: Request) -> bool:
        num_rows = len(self._requests)
        state = self._requests.get(request.id)
        if state is None:  # rows are looked at in turn
            state = self._requests[request.id] = _Drafting(num_decisions=num_rows)
        state.num_decisions += 1
        interval = WAIT_TRIAL if state.is_in_vain else 1 + num_rows // ROWS_PER_LOOK
        if self._rest > 0 or state.num_decisions % interval:
            return False
        worth = WORTH_WAITING if num_rows > 1 else WORTH_WAITING_ALONE
        self._score(request)
        for _, draft in self._find(self._hosts, [request]):
            self._counts[draft.source].add_drafted(len(draft.tokens))
            # The first guess is that of the token in flight. Where a grammar forces several tokens, all are certain.
            state.has_waited = sum(self._survival.correct(request, draft)[request.pending :]) >= worth
            if state.has_waited:
                state.rest = 0
            return state.has_waited
        if self._device is None:
            return False
        if state.rest > 0:
            state.rest -= 1
            return False
        return self._device.expected >= worth  # the device proposes for rows that are in one step in flight

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        state = self._requests.get(request.id)
        if state is None or not state.source:
            return
        self._counts[state.source].add_verified(num_drafts, num_accepted)
        state.source = ""
        self._gain.accepted(num_accepted)

    def plan_proposals(self, requests: Sequence[Request], num_tokens: int) -> dict[str, int]:
        if self._device is None or self._rest > 0:
            return {}
        asking = []
        for request in requests:
            self._device.score(request)
            state = self._requests.get(request.id)
            # Where another proposer has found something, it usually finds more.
            if state is None or (not state.rest and state.source in ("", self._device.name)):
                asking.append(request)
        if not asking:
            return {}
        num_keys = sum(len(request.tokens) for request in asking)
        length = self._device.length(len(asking), num_keys, self.costs)
        return {request.id: length for request in asking} if length else {}

    def is_proposed(self, request: Request) -> bool:
        state = self._requests.get(request.id)
        if self._device is None or state is None or request.grammar is not None:  # a grammar has cut the drafts
            return False
        return state.source == self._device.name and self._device.by_position

    def proposed(self, request: Request, drafts: list[int], chances: Sequence[float]) -> None:
        if self._device is not None:
            self._device.take(request, drafts, chances)

    def observe(self, plan: Plan, seconds: float, proposing: float = 0.0) -> None:
        if plan.proposals and proposing and self._device is not None:
            self._device.timed(max(plan.proposals.values()), proposing)
        self._audits.observe(seconds)
        self._rest = max(self._rest - 1, 0)
        if not plan.drafts and not self._replays:
            return
        size = StepSize.of(plan)
        if size.prompt_tokens or not size.num_drafts + size.num_replayed:
            return  # the gain is that of steps without prefill
        without = self.costs.seconds(size.decodes, size.num_keys * size.decodes // size.num_tokens)
        if without is not None:
            self._gain.step(seconds, without, size.decodes)

    def end(self, request: Request) -> None:
        for proposer in self._proposers:
            proposer.end(request)
        self._survival.end(request)
        self._requests.pop(request.id, None)

    def stats(self) -> SpeculationStats:
        audits = self._audits
        return SpeculationStats(list(self._counts.values()), self._gain.ratio, audits.num_audits, audits.share)

    # -- choosing -------------------------------------------------------------------------------------------------

    def _tokens_of(self, request: Request, place: int, before: float, survival: float) -> float:
        """Return how many tokens a guess makes steps compute: itself, and what is replayed if it is the one rejected.

        `before`: the probability that the guesses before it are accepted.
        """
        if not self._replays:
            return 1.0
        return 1.0 + (request.num_replayed + place + 1) * (before - survival)

    def _best(
        self, guesses: list[Guess], num_rows: int, num_tokens: int, num_keys: int, budget: int
    ) -> tuple[int, float]:
        """Return how many of the ranked guesses make the most expected tokens per second, and that rate. The step
        computes `num_tokens` besides them."""
        base = self.costs.seconds(num_tokens, num_keys)
        if base is None:
            return 0, 0.0  # no step was timed yet: the first one has no drafts
        keys_per_token = num_keys // max(num_rows, 1)
        best, best_rate, made, size = 0, num_rows / base, float(num_rows), float(num_tokens)
        for count, (negative, _, _, computed) in enumerate(guesses[:budget], start=1):
            made -= negative
            size += computed
            seconds = self.costs.seconds(round(size), round(size) * keys_per_token)
            assert seconds is not None
            if made / seconds > best_rate:
                best, best_rate = count, made / seconds
            elif count - best >= PATIENCE:
                break
        return best, best_rate

    def _audited(
        self,
        count: int,
        rate: float,
        guesses: list[Guess],
        num_rows: int,
        num_tokens: int,
        num_keys: int,
        budget: int,
    ) -> int:
        """Return the opposite choice, if what it is expected to lose is within the budget of audits: no drafts if some
        pay, one draft if none does."""
        other = 0 if count else min(1, budget)
        size = num_tokens + (round(guesses[0][3]) if other else 0)
        seconds = self.costs.seconds(size, size * (num_keys // max(num_rows, 1)))
        if other == count or seconds is None or not rate:
            return count
        made = num_rows - (guesses[0][0] if other else 0.0)
        return other if self._audits.take(max(seconds - made / rate, 0.0)) else count

    # -- proposing ------------------------------------------------------------------------------------------------

    def _propose(self, requests: Sequence[Request]) -> list[tuple[Request, Draft]]:
        """Score the open drafts, and return new ones of the requests whose proposers are not resting."""
        silent: list[Request] = []
        for request in requests:
            state = self._requests.get(request.id)
            if state is None:
                state = self._requests[request.id] = _Drafting()
            self._score(request)
            if state.rest > 0:
                state.rest -= 1
            else:
                silent.append(request)
        return self._find(self._proposers, silent)

    def _score(self, request: Request) -> None:
        """Compare the request's open draft with the tokens that came since."""
        scored = self._survival.score(request)
        if scored is not None:
            source, num_right = scored
            self._counts[source].add_right(num_right)

    def _find(self, proposers: Sequence[Proposer], silent: list[Request]) -> list[tuple[Request, Draft]]:
        """Return the first draft that the proposers have for each of the requests, of those that have any."""
        found: list[tuple[Request, Draft]] = []
        for proposer in proposers:
            if not silent:
                break
            still_silent = []
            for request, draft in zip(silent, self._ask(proposer, silent), strict=True):
                if draft.tokens and request.grammar is not None:
                    draft.tokens = cut_to_grammar(request, draft.tokens)
                if draft.tokens:
                    found.append((request, draft))
                else:
                    still_silent.append(request)
            silent = still_silent
        return found

    def _ask(self, proposer: Proposer, requests: Sequence[Request]) -> Sequence[Draft]:
        """Return the proposer's drafts. After an error it is asked for one request at a time, and is barred from the
        requests for which it raises an error again."""
        name = proposer.name
        barred = [r for r in requests if name in self._requests[r.id].barred] if self._counts[name].failed else []
        try:
            if not barred:
                return proposer.propose(requests, LENGTH)
        except Exception:
            pass
        drafts = []
        for request in requests:
            draft = Draft()
            if request not in barred:
                try:
                    (draft,) = proposer.propose([request], LENGTH)
                except Exception:
                    self._requests[request.id].barred.add(name)
                    self._counts[name].failed += 1
            drafts.append(draft)
        return drafts
