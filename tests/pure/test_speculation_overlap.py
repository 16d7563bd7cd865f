"""What keeps drafts right where steps overlap, point by point, on a device whose steps finish late."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from quire.cache.lease import lease_of
from quire.types import Plan, Request, SamplingParams
from tests.pure.drafting import RandomDrafter, shadow_oracle
from tests.pure.shadow import VOCAB, Rig, reference_output
from tests.pure.test_engine_overlap import PROMPT


class Scripted(RandomDrafter):
    """Drafts `right` true tokens and then `wrong` false ones, each time it is asked."""

    def __init__(self, right: int, wrong: int = 0, waits: bool = True):
        super().__init__(random.Random(0), waits=float(waits))
        self.plan = (right, wrong)
        self.asked = 0

    def oracle(self, request: Request, tokens: list[int]) -> int:
        return shadow_oracle(request, tokens)

    def draft(self, requests: Sequence[Request], num_tokens: int, budget: int) -> dict[str, list[int]]:
        self.asked += len(requests)
        right, wrong = self.plan
        found = {}
        for request in requests:
            self.open.add(request.id)
            tokens: list[int] = []
            for place in range(right + wrong):
                tokens.append((self.oracle(request, tokens) + (place >= right)) % VOCAB)
            found[request.id] = tokens[:budget]
        return found


def rig_of(drafter: RandomDrafter, **options: object) -> Rig:
    given = {"depth": 2, "late": True, "num_pages": 200, "chunk_tokens": 64, "max_batch_tokens": 64, **options}
    return Rig(drafter=drafter, **given)  # type: ignore[arg-type]


def plans_of(rig: Rig) -> list[Plan]:
    """Every plan that the scheduler makes from now on."""
    made: list[Plan] = []
    plan = rig.scheduler.plan

    def watched() -> Plan | None:
        found = plan()
        made.extend([found] if found is not None else [])
        return found

    rig.scheduler.plan = watched  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("depth", [1, 2])
def test_accepted_drafts_and_the_token_after_them_come_in_one_step(depth: int) -> None:
    rig = rig_of(Scripted(3), depth=depth)
    plans = plans_of(rig)
    rig.add(PROMPT, max_tokens=9)
    rig.finish()
    assert rig.outputs["r1"] == reference_output(PROMPT, 0, 9, frozenset())
    assert len(plans) == 3, "the prompt's token, and two times three drafts and one token"


def test_rejected_drafts_leave_no_hole() -> None:
    rig = rig_of(Scripted(1, 2))
    plans = plans_of(rig)
    rig.add(PROMPT, max_tokens=9)
    rig.finish()
    assert rig.outputs["r1"] == reference_output(PROMPT, 0, 9, frozenset())
    starts = [row.start for plan in plans for row in plan.rows]
    assert starts == [0, 11, 13, 15, 17], "each step starts behind what was accepted"


class Hasty(Scripted):
    """Would not wait for a request whose drafts are in flight."""

    def waits(self, request: Request) -> bool:
        return not request.num_drafts


def test_a_row_with_drafts_is_in_one_step_and_others_go_on() -> None:
    rig = rig_of(Hasty(2))
    plans = plans_of(rig)
    rig.add(PROMPT, max_tokens=12)
    rig.add(PROMPT[::-1], max_tokens=12, speculate=False)
    rig.finish()
    assert rig.outputs["r1"] == reference_output(PROMPT, 0, 12, frozenset())
    assert sum(row.num_drafts > 0 for plan in plans for row in plan.rows) > 2
    for earlier, later in pairwise(plans):
        drafted = {row.request_id for row in earlier.rows if row.num_drafts}
        assert drafted.isdisjoint(row.request_id for row in later.rows), "its tokens were not known then"
    steps = [sum(row.request_id == "r2" for row in plan.rows) for plan in plans]
    assert sum(steps) == 12 and steps[:12] == [1] * 12, "without drafts a row is in every step"


def test_a_row_in_flight_without_drafts_is_not_drafted_for() -> None:
    drafter = Scripted(2, waits=False)
    rig = rig_of(drafter)
    rig.add(PROMPT, max_tokens=12)
    rig.finish()
    assert drafter.asked == 0, "it is always in flight, as nobody waits for its tokens"
    assert rig.outputs["r1"] == reference_output(PROMPT, 0, 12, frozenset())


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6])
def test_no_draft_goes_beyond_the_last_token(max_tokens: int) -> None:
    rig = rig_of(Scripted(4))
    plans = plans_of(rig)
    rig.add(PROMPT, max_tokens=max_tokens)
    rig.finish()
    assert rig.outputs["r1"] == reference_output(PROMPT, 0, max_tokens, frozenset())
    assert max(row.start + row.count for plan in plans for row in plan.rows) <= len(PROMPT) + max_tokens - 1


@pytest.mark.parametrize("mix", ["full", "all"])
@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_a_stop_token_within_a_draft_ends_the_request_there(mix: str, place: int) -> None:
    whole = reference_output(PROMPT, 0, 30, frozenset())
    stop = frozenset({whole[place]})
    rig = rig_of(Scripted(6), mix=mix)
    rig.add(PROMPT, max_tokens=30, stop=stop)
    rig.finish()
    assert rig.outputs["r1"] == reference_output(PROMPT, 0, 30, stop) and rig.reasons["r1"] == "stop"
    again = PROMPT + rig.outputs["r1"]
    rig.add(again, max_tokens=5, seed=1)  # over the pages that the first one left in the tree
    rig.finish()
    assert rig.outputs["r2"] == reference_output(again, 1, 5, frozenset())


def test_pages_of_rejected_drafts_come_back_after_the_step() -> None:
    rig = rig_of(Scripted(0, 12), max_batch_tokens=256)
    request = PROMPT[:7]
    rig.add(request, max_tokens=30)
    free, held = [], []
    while rig.engine.has_work:
        rig.turn()
        running = rig.scheduler.requests.get("r1")
        if running is not None and running.lease is not None and not running.inflight:
            held.append(len(lease_of(running).units[0]) * 4 - len(running.tokens))
            free.append(rig.cache.available(0))
    assert max(held) < 4, "at most what is left of the page of its last token"
    assert rig.outputs["r1"] == reference_output(request, 0, 30, frozenset())


@pytest.mark.parametrize("speculate", [False, True])
def test_drafts_take_no_page_that_others_need(speculate: bool) -> None:
    """The pages are enough for what the three compute, and not for drafts of all, so that no one is preempted."""
    drafter = Scripted(2, 8)
    rig = rig_of(drafter, num_pages=18, max_rows=3, num_host=0)
    for first, max_tokens in ((PROMPT[0], 14), (20, 26), (21, 26)):
        rig.add([first, *PROMPT[1:6]][: 5 if max_tokens == 14 else 6], max_tokens=max_tokens, speculate=speculate)
    rig.finish()
    assert rig.scheduler.stats.preemptions == 0
    assert (drafter.num_accepted > 10) == speculate
    assert rig.outputs["r1"] == reference_output(PROMPT[:5], 0, 14, frozenset())


def test_recurrent_state_returns_to_that_before_the_step() -> None:
    rig = rig_of(Scripted(1, 1), mix="full+state")
    plans = plans_of(rig)
    rig.add(PROMPT, max_tokens=10)
    rig.finish()
    assert rig.outputs["r1"] == reference_output(PROMPT, 0, 10, frozenset())
    rows = [row for plan in plans for row in plan.rows]
    again = [row for row in rows if row.num_replayed]
    assert again, "after a rejection the accepted tokens are computed again"
    assert any(row.num_drafts for row in again), "with drafts of the tokens after them"
    assert {row.start for row in again} <= {row.start for row in rows if row.num_drafts}
    assert all(row.count == row.num_replayed + 1 + row.num_drafts for row in again)


def test_a_state_that_is_far_behind_moves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are never all right take the state back each time; a step without drafts brings it to the end."""
    monkeypatch.setattr("quire.engine.drafts.MAX_REPLAYED", 4)
    rig = rig_of(Scripted(3, 1), mix="full+state", max_batch_tokens=256)
    plans = plans_of(rig)
    rig.add(PROMPT, max_tokens=150)
    rig.finish()
    assert rig.outputs["r1"] == reference_output(PROMPT, 0, 150, frozenset())
    longest = max(row.num_replayed for plan in plans for row in plan.rows)
    assert longest == 8, "a row that replays four gets drafts, of which three are right"


def test_no_draft_crosses_a_due_snapshot() -> None:
    rig = rig_of(Scripted(6), mix="state", max_batch_tokens=256)
    plans = plans_of(rig)
    rig.add(PROMPT, max_tokens=60)
    rig.finish()
    crossed = [
        row for plan in plans for row in plan.rows if row.num_drafts and row.start // 16 < (row.start + row.count) // 16
    ]
    assert not crossed, "a snapshot is taken at a length that is certain"
    assert rig.outputs["r1"] == reference_output(PROMPT, 0, 60, frozenset())
    rig.add(PROMPT + rig.outputs["r1"], max_tokens=3)
    rig.finish()
    assert rig.cached["r2"] >= 48


class InTurn:
    """A grammar of three kinds of tokens in turn, so that no two positions after one another have the same mask."""

    def allowed(self, num_sampled: int) -> list[int]:
        return [token for token in range(VOCAB) if token % 3 == num_sampled % 3]

    def mask(self, sampled: list[int]) -> bytes:
        bits = bytearray(-(-VOCAB // 8))
        for token in self.allowed(len(sampled)):
            bits[token // 8] |= 1 << (token % 8)
        return bytes(bits)


class Grammatical(Scripted):
    """Knows the grammar that its requests have."""

    def oracle(self, request: Request, tokens: list[int]) -> int:
        allowed = InTurn().allowed(request.num_sampled + len(tokens))
        return allowed[shadow_oracle(request, tokens) % len(allowed)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("right", "wrong"), [(4, 0), (1, 3), (0, 4)])
def test_masks_are_filled_for_each_position(right: int, wrong: int, depth: int) -> None:
    plain = rig_of(Scripted(0), depth=depth)
    plain.add(PROMPT, max_tokens=12, grammar=InTurn(), speculate=False)
    plain.finish()
    drafter = Grammatical(right, wrong)
    rig = rig_of(drafter, depth=depth)
    rig.add(PROMPT, max_tokens=12, grammar=InTurn())
    rig.finish()
    assert rig.outputs["r1"] == plain.outputs["r1"]
    assert drafter.num_accepted >= 4 * (right > 0)


@pytest.mark.parametrize("mix", ["full", "all"])
def test_cancel_while_drafts_are_in_flight(mix: str) -> None:
    rig = rig_of(Scripted(3, 1), mix=mix)
    rig.add(PROMPT, max_tokens=40)
    while not any(r.num_drafts for r in rig.scheduler.requests.values()):
        rig.turn()
    rig.engine.cancel("r1")
    before = list(rig.outputs["r1"])
    rig.finish()
    assert rig.outputs["r1"] == before and rig.reasons["r1"] == "cancelled"
    for group in range(len(rig.cache.specs)):
        assert rig.cache.available(group) == rig.cache.pools[group].num_units - 1


def test_a_failed_step_with_drafts_leaves_no_lie() -> None:
    rig = rig_of(Scripted(2, 1), poison={49}, mix="all")
    good, bad = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 49]
    rig.add(good, max_tokens=6)
    rig.add(bad, max_tokens=6)
    rig.add(good[::-1], max_tokens=6)
    rig.finish()
    assert rig.reasons["r2"] == "error"
    assert rig.outputs["r1"] == reference_output(good, 0, 6, frozenset())
    assert rig.outputs["r3"] == reference_output(good[::-1], 0, 6, frozenset())


def test_half_of_the_budget_is_for_prompts() -> None:
    rig = rig_of(Scripted(20), max_batch_tokens=24, chunk_tokens=24, depth=1)
    plans = plans_of(rig)
    rig.add(PROMPT, max_tokens=60)
    rig.turn()
    rig.add(list(range(40)), max_tokens=2)
    rig.turn()
    rig.turn()
    mixed = [plan for plan in plans if any(row.num_drafts for row in plan.rows) and len(plan.rows) > 1]
    assert mixed and all(row.num_drafts <= 12 for plan in mixed for row in plan.rows)
    rig.finish()


def test_usage_tells_accepted_and_rejected_drafts() -> None:
    rig = rig_of(Scripted(2, 1))
    rig.add(PROMPT, max_tokens=7)
    usages = []
    while rig.engine.has_work:
        usages += [delta.usage for delta in rig.engine.turn() if delta.usage is not None]
    assert (usages[0].accepted_prediction_tokens, usages[0].rejected_prediction_tokens) == (4, 1)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("mix", ["full", "all"])
def test_a_victim_with_drafts_in_flight_waits_for_them(mix: str, preemption: str) -> None:
    """It is preempted behind what its step accepted, not in the middle of it, and goes on from there."""
    rig = rig_of(Scripted(2, 2), mix=mix, num_pages=16, max_rows=2, preemption=preemption)
    rig.add(PROMPT, max_tokens=24, priority=5)
    while not (rig.outputs["r1"] and any(r.num_drafts for r in rig.scheduler.requests.values())):
        rig.turn()
    victim = rig.scheduler.requests["r1"]
    rig.add([n % VOCAB for n in range(52)], max_tokens=3, priority=0)
    chosen, left = rig.scheduler._preempt, rig.scheduler._swap_or_drop
    drafts: list[int] = []

    def preempt(request: Request, plan: Plan) -> None:
        drafts.append(request.num_drafts)
        chosen(request, plan)

    def swap_or_drop(request: Request, plan: Plan) -> None:
        assert request is victim and request.num_drafts == request.inflight == 0
        assert request.computed == request.planned <= len(request.tokens)
        left(request, plan)

    rig.scheduler._preempt = preempt  # type: ignore[method-assign]
    rig.scheduler._swap_or_drop = swap_or_drop  # type: ignore[method-assign]
    while rig.scheduler.stats.swaps + rig.scheduler.stats.recomputes == 0:
        rig.turn()
        rig.scheduler.check()
    assert drafts and drafts[0] > 0, "it was chosen while its drafts were in flight"
    assert rig.scheduler.stats.swaps == (preemption == "swap")
    rig.finish()
    assert rig.outputs["r1"] == reference_output(PROMPT, 0, 24, frozenset())
    assert rig.outputs["r2"] == reference_output([n % VOCAB for n in range(52)], 0, 3, frozenset())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mix", ["full", "all"])
@pytest.mark.parametrize("turns", [2, 3, 4, 5])
def test_a_restart_goes_on_behind_what_was_delivered(mix: str, depth: int, turns: int) -> None:
    """An engine is lost with drafts in flight; the next one gets what was delivered, and drafts from there."""
    lost = rig_of(Scripted(2, 1), mix=mix, depth=depth)
    lost.add(PROMPT, max_tokens=24)
    for _ in range(turns):
        lost.turn()
    delivered = lost.outputs["r1"]
    drafter = Scripted(3, 1)
    rig = rig_of(drafter, mix=mix, depth=depth)
    params = SamplingParams(max_tokens=24).resolve()
    tokens = PROMPT + delivered
    rig.engine.add(Request("r1", tokens, len(PROMPT), params, len(PROMPT) + 24, resumed=True, suspect=True))
    rig.outputs["r1"] = []
    rig.finish()
    assert delivered + rig.outputs["r1"] == reference_output(PROMPT, 0, 24, frozenset())
    assert drafter.num_accepted > 0 and not drafter.open


def test_prompts_are_computed_in_chunks_beside_verification() -> None:
    rig = rig_of(Scripted(3, 1), max_batch_tokens=16, chunk_tokens=7, depth=2)
    plans = plans_of(rig)
    rig.add(PROMPT, max_tokens=40)
    while not rig.outputs["r1"]:
        rig.turn()
    rig.add(list(range(45)), max_tokens=6)
    rig.finish()
    mixed = [plan for plan in plans if plan.drafts and any(not row.wants_sample for row in plan.rows)]
    assert len(mixed) > 2, "steps with drafts of one request and a chunk of the other's prompt"
    assert rig.outputs["r1"] == reference_output(PROMPT, 0, 40, frozenset())
    assert rig.outputs["r2"] == reference_output(list(range(45)), 0, 6, frozenset())
