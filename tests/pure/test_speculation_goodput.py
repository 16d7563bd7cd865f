"""The drafter that weighs drafts against time: what it learns of proposers and steps, and when it verifies drafts."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from quire.engine.costs.step_costs import StepCosts
from quire.engine.speculation.audit import MAX_SHARE, MIN_INTERVAL, AuditBudget
from quire.engine.speculation.device import DeviceProposer
from quire.engine.speculation.goodput import ROWS_PER_LOOK, WAIT_TRIAL, GoodputDrafter
from quire.engine.speculation.seam import Draft
from quire.engine.speculation.survival import SurvivalRecord
from quire.types import Plan, PlanRow, Request, SamplingParams

SEED = int(os.environ.get("TEST_SEED", "7"))
FIRST = 100  # tokens of every prompt


class Guesses:
    """Implements `Proposer`: drafts of fixed length, right with one probability, that claim another.

    The right token after `n` tokens is `n`."""

    def __init__(self, rng: random.Random, *, right: float, claimed: float, name: str = "guesses"):
        self.name = name
        self._rng, self.right, self._claimed = rng, right, claimed
        self.num_calls = 0
        self.silent = False

    def propose(self, requests: Sequence[Request], budget: int) -> list[Draft]:
        self.num_calls += 1
        if self.silent:
            return [Draft() for _ in requests]
        drafts = []
        for request in requests:
            start = len(request.tokens)
            tokens = [start + i if self._rng.random() < self.right else 1 << 20 for i in range(min(budget, 6))]
            drafts.append(Draft(tokens, [self._claimed ** (i + 1) for i in range(len(tokens))], self.name))
        return drafts

    def end(self, request: Request) -> None:
        pass


def request(name: str = "a", **params: object) -> Request:
    return Request(name, list(range(FIRST)), FIRST, SamplingParams(**params), 1 << 20)  # type: ignore[arg-type]


def observe(drafter: GoodputDrafter, plan: Plan, seconds: float) -> None:
    drafter.costs.observe(plan, seconds)
    drafter.observe(plan, seconds)


def run(drafter: GoodputDrafter, requests: list[Request], seconds: Callable[[int], float], steps: int) -> float:
    """Run steps that take `seconds(tokens)`. Returns how many tokens came per second."""
    total = made = 0.0
    for number in range(steps):
        drafts = drafter.draft(requests, len(requests), 512)
        plan = Plan(number)
        for place, one in enumerate(requests):
            guess = drafts.get(one.id, [])
            if guess:
                plan.drafts[place] = guess
            plan.rows.append(PlanRow(one.id, 0, len(one.tokens) - 1, 1 + len(guess), len(guess), True))
        total += seconds(plan.num_tokens)
        observe(drafter, plan, seconds(plan.num_tokens))
        for one in requests:
            guess, start = drafts.get(one.id, []), len(one.tokens)
            accepted = next((i for i, token in enumerate(guess) if token != start + i), len(guess))
            one.tokens += range(start, start + accepted + 1)
            made += accepted + 1
            if guess:
                drafter.verified(one, len(guess), accepted)
    return made / total


def flat(num_tokens: int) -> float:
    """A device on which a draft is nearly free."""
    return 1.0 + 0.02 * (num_tokens - 1)


def steep(num_tokens: int) -> float:
    """A device on which two tokens take as long together as alone."""
    return float(num_tokens)


def drafter_of(right: float, claimed: float = 0.5) -> tuple[GoodputDrafter, Guesses]:
    guesses = Guesses(random.Random(SEED), right=right, claimed=claimed)
    return GoodputDrafter([guesses]), guesses


@pytest.mark.parametrize(("right", "least"), [(1.0, 5.0), (0.8, 2.7), (0.5, 1.6), (0.0, 0.97)])
def test_right_drafts_are_verified_where_they_cost_little(right: float, least: float) -> None:
    drafter, _ = drafter_of(right)
    rate = run(drafter, [request()], flat, 3000)
    assert rate >= least, f"{rate} tokens per step time, seed {SEED}"


@pytest.mark.parametrize("right", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("rows", [1, 16])
def test_no_draft_is_verified_where_none_can_pay(right: float, rows: int) -> None:
    drafter, _ = drafter_of(right, claimed=0.9)
    rate = run(drafter, [request(str(i)) for i in range(rows)], steep, 3000)
    assert rate >= 0.99, f"{rate} of the rate without drafts, seed {SEED}"


def test_claims_are_corrected_by_what_comes() -> None:
    """A proposer that is always sure and mostly wrong is found out, and one that is too modest is used."""
    boaster, _ = drafter_of(0.05, claimed=0.99)
    assert run(boaster, [request()], lambda n: 1.0 + 0.2 * (n - 1), 3000) >= 0.97
    modest, _ = drafter_of(0.95, claimed=0.05)
    assert run(modest, [request()], lambda n: 1.0 + 0.2 * (n - 1), 3000) >= 1.8


def test_it_notices_when_speculation_begins_to_pay() -> None:
    drafter, guesses = drafter_of(0.0)
    ask = [request()]
    run(drafter, ask, flat, 1000)
    guesses.right = 1.0
    assert run(drafter, ask, flat, 200) >= 3.0


def test_proposers_rest_while_they_are_wrong() -> None:
    drafter, guesses = drafter_of(0.0)
    run(drafter, [request()], steep, 800)
    assert guesses.num_calls < 800 / 6


def test_the_gain_is_measured() -> None:
    drafter, _ = drafter_of(1.0)
    assert drafter.stats().speedup == 1.0
    rate = run(drafter, [request()], flat, 2000)
    stats = drafter.stats()
    assert stats.speedup == pytest.approx(rate, rel=0.1)
    counts = stats.by_name("guesses")
    assert counts.verified[0] == counts.accepted[0] and counts.drafted[0] >= counts.verified[0] > 1500


@pytest.mark.parametrize(("right", "seconds"), [(1.0, flat), (0.8, flat), (0.0, flat), (0.5, steep)])
def test_audits_do_the_other_choice_for_half_a_percent_of_the_time(
    right: float, seconds: Callable[[int], float]
) -> None:
    drafter, _ = drafter_of(right)
    audited = 0
    ask = request()
    for _number in range(4000):
        run(drafter, [ask], seconds, 1)
        audited += drafter.stats().audits
    stats = drafter.stats()
    assert stats.audits >= 5, "both choices stay measured"
    assert 0 < stats.audit_share <= MAX_SHARE
    verified = sum(stats.by_name("guesses").verified)
    if right == 1.0:
        assert stats.audits <= 4000 / MIN_INTERVAL
    elif seconds is steep:
        assert verified <= 40 + stats.audits, "one draft each"


def in_flight(one: Request) -> Request:
    """The request while a step samples its next token."""
    return replace(one, pending=1)


def test_requests_with_much_to_draft_are_waited_for_where_steps_overlap() -> None:
    """Waiting for a token to draft after it costs a step, so drafts of the tokens after it must be worth more."""
    guesses = Guesses(random.Random(SEED), right=1.0, claimed=0.9)
    drafter, ask = GoodputDrafter([guesses]), request()
    run(drafter, [ask], flat, 20)
    assert all(drafter.waits(in_flight(ask)) for _ in range(100))
    guesses.silent = True
    assert not any(drafter.waits(in_flight(ask)) for _ in range(100))
    guesses.silent = False
    assert all(drafter.waits(in_flight(ask)) for _ in range(10)), "noticed at once"
    other = GoodputDrafter([Guesses(random.Random(SEED), right=1.0, claimed=0.3)])
    two = [in_flight(request("a")), in_flight(request("b"))]
    assert not any(other.waits(one) for _ in range(10) for one in two), "too doubtful"


def test_requests_whose_drafts_do_not_pay_are_seldom_waited_for() -> None:
    guesses = Guesses(random.Random(SEED), right=1.0, claimed=0.9)
    drafter, ask = GoodputDrafter([guesses]), request()
    run(drafter, [ask], steep, 20)
    waited = 0
    for _ in range(WAIT_TRIAL * 10):
        if drafter.waits(in_flight(ask)):
            waited += 1
            run(drafter, [ask], steep, 1)  # drafts after the token, which do not pay
        else:
            ask.tokens.append(len(ask.tokens))
            observe(drafter, Plan(0, [PlanRow(ask.id, 0, len(ask.tokens) - 2, 1, 0, True)]), steep(1))
    assert 5 <= waited <= 30, f"{waited}: now and then, to notice when they do"


def test_rows_wait_for_proposals_of_the_device_that_pay() -> None:
    """It proposes for rows that are in one step in flight, so where steps overlap a row would else never get any."""
    device = DeviceProposer("draft")
    drafter, rows = GoodputDrafter([], device=device), [request("a"), request("b")]
    assert not drafter.waits(in_flight(rows[0])), "nothing is known yet"
    for size in (1, 2, 8):
        drafter.costs.observe_decodes(size, size * FIRST, 0.001)
    device.timed(1, 0.0001)
    assert min(drafter.plan_proposals(rows, 2).values()) > 1
    assert all(drafter.waits(in_flight(one)) for one in rows)
    drafter._requests["a"].settle(paid=False)
    assert [drafter.waits(in_flight(rows[0])) for _ in range(2)] == [False, True], "it rests after drafts that did not"
    for _ in range(30):
        device.timed(1, 1.0)
    assert not drafter.plan_proposals(rows, 2) and not drafter.waits(in_flight(rows[1])), "too slow"


def test_many_rows_are_looked_at_in_turn() -> None:
    guesses = Guesses(random.Random(SEED), right=1.0, claimed=0.9)
    drafter, rows = GoodputDrafter([guesses]), [request(str(i)) for i in range(ROWS_PER_LOOK * 8)]
    for one in rows:
        drafter.waits(in_flight(one))
    for _ in range(9):
        before = guesses.num_calls
        for one in rows:
            drafter.waits(in_flight(one))
        assert 0 < guesses.num_calls - before <= len(rows) / 4
    assert len(rows) <= guesses.num_calls <= 3 * len(rows)


def test_fewer_guesses_are_verified_where_a_wrong_one_makes_the_row_replay() -> None:
    """With recurrent state a rejected draft makes the next step compute the accepted tokens again."""
    verified = []
    for replays in (False, True):
        guesses = Guesses(random.Random(SEED), right=0.8, claimed=0.8)
        drafter = GoodputDrafter([guesses], replays=replays)
        run(drafter, [request()], lambda n: 1.0 + 0.15 * (n - 1), 1500)
        counts = drafter.stats().by_name("guesses")
        verified.append(sum(counts.verified) / counts.verified[0])  # guesses per draft
    assert verified[1] < verified[0] - 0.5, f"{verified}, seed {SEED}"


def test_what_a_row_replays_counts_as_tokens_of_the_step() -> None:
    drafter, _ = drafter_of(0.8, claimed=0.8)
    drafter._replays = True
    ask = request()
    ask.num_replayed = 5
    assert drafter._tokens_of(ask, 0, 1.0, 0.8) == pytest.approx(1 + 6 * 0.2)
    assert drafter._tokens_of(ask, 2, 0.64, 0.5) == pytest.approx(1 + 8 * 0.14)
    drafter._replays = False
    assert drafter._tokens_of(ask, 2, 0.64, 0.5) == 1.0


def test_without_budget_no_audit_is_made() -> None:
    audits = AuditBudget()
    audits.observe(100.0)
    assert not any(audits.is_due() for _ in range(MIN_INTERVAL - 1)) and audits.is_due()
    assert not audits.take(0.6) and audits.is_due(), "it waits until its loss is within the share"
    assert audits.take(0.4) and not audits.is_due()
    assert not audits.take(0.2) and audits.share == 0.004 and audits.num_audits == 1


def test_a_proposer_that_raises_is_barred_for_that_request_alone() -> None:
    class Fragile(Guesses):
        def propose(self, requests: Sequence[Request], budget: int) -> list[Draft]:
            if any(one.id == "bad" for one in requests):
                raise RuntimeError("broken")
            return super().propose(requests, budget)

    fragile = Fragile(random.Random(SEED), right=1.0, claimed=0.9, name="fragile")
    drafter = GoodputDrafter([fragile])
    good, bad = request("good"), request("bad")
    for _ in range(50):
        run(drafter, [good, bad], flat, 1)
    assert len(good.tokens) - FIRST > 100
    assert len(bad.tokens) - FIRST == 50
    assert drafter.stats().by_name("fragile").failed == 1
    drafter.end(bad)
    assert set(drafter._requests) == {"good"}


def test_the_first_proposer_that_speaks_is_taken() -> None:
    class Silent(Guesses):
        def propose(self, requests: Sequence[Request], budget: int) -> list[Draft]:
            return [Draft() for _ in requests]

    rng = random.Random(SEED)
    drafter = GoodputDrafter([Silent(rng, right=1, claimed=1, name="silent"), Guesses(rng, right=1.0, claimed=0.9)])
    run(drafter, [request()], flat, 100)
    stats = drafter.stats()
    assert not stats.by_name("silent").drafted and stats.by_name("guesses").accepted[0] > 0


def test_no_more_is_drafted_than_can_become_output() -> None:
    drafter, _ = drafter_of(1.0)
    ask = request()
    run(drafter, [ask], flat, 50)
    ask.max_len = len(ask.tokens) + 3
    assert len(drafter.draft([ask], 1, 512)["a"]) == 2
    ask.max_len = len(ask.tokens) + 1
    assert drafter.draft([ask], 1, 512) == {}


def test_the_budget_bounds_a_step() -> None:
    drafter, _ = drafter_of(1.0)
    ask = [request(str(i)) for i in range(4)]
    run(drafter, ask, flat, 40)
    assert sum(map(len, drafter.draft(ask, 4, 7).values())) == 7


def test_nothing_is_kept_of_requests_that_ended() -> None:
    drafter, _ = drafter_of(0.5)
    ask = [request(str(i)) for i in range(8)]
    run(drafter, ask, flat, 20)
    for one in ask:
        drafter.end(one)
    assert not drafter._requests and not drafter._survival._watched


def test_certain_guesses_stay_certain() -> None:
    """A grammar forces tokens: no number of other failures makes them doubtful."""
    record, ask = SurvivalRecord(), request()
    for _ in range(50):
        record.correct(ask, Draft([7], [0.9], "x"))
        ask.tokens.append(8)
        assert record.score(ask) == ("x", 0)
    assert record.correct(ask, Draft([1, 2, 3], [1.0, 1.0, 0.5], "x"))[:2] == [1.0, 1.0]
    assert record.correct(ask, Draft([1], [0.9], "x"))[0] < 0.3


def test_step_costs_are_interpolated_and_forget_slow_steps() -> None:
    costs = StepCosts()
    assert costs.seconds(1, 100) is None
    for _ in range(100):
        costs.observe_decodes(1, 100, 1.0)
        costs.observe_decodes(5, 500, 2.0)
    assert costs.seconds(1, 100) == pytest.approx(1.0)
    assert costs.seconds(3, 300) == pytest.approx(1.5)
    assert costs.seconds(9, 900) > 2.0  # type: ignore[operator]
    costs.observe_decodes(1, 100, 50.0)
    assert costs.seconds(1, 100) == pytest.approx(1.0), "one slow step waited for something else"
    for _ in range(100):
        costs.observe_decodes(1, 100, 5.0)
    assert costs.seconds(1, 100) == pytest.approx(5.0, rel=0.1), "a machine that has become slow is believed"
    assert costs.seconds(1, 9_000_000) == costs.seconds(1, 100), "the nearest context that was timed"
