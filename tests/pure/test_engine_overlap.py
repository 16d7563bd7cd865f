"""What makes overlap right, point by point, on a device whose steps finish late."""

from __future__ import annotations

import pytest

from quire.engine.loop import EngineBroken
from quire.engine.recovery import affected_by
from quire.types import Delta, Plan, PlanRow, Request, RowInit, SamplingParams, Status
from tests.pure.shadow import VOCAB, Rig, reference_output

PROMPT = [5, 9, 2, 7, 7, 1, 3, 8, 4, 6, 11]


def late(**options: object) -> Rig:
    return Rig(**{"depth": 2, "late": True, "num_pages": 200, "chunk_tokens": 64, "max_batch_tokens": 64, **options})


def test_step_is_submitted_before_the_tokens_of_the_last_one_exist() -> None:
    rig = late()
    rig.add(PROMPT, max_tokens=5)
    rig.finish()
    log = rig.device.log
    for step in range(2, 6):
        assert log.index(("forward", step)) < log.index(("wait", step - 1)), log
    assert rig.outputs["r1"] == reference_output(PROMPT, 0, 5, frozenset())


def test_depth_one_waits_for_each_step() -> None:
    rig = late(depth=1)
    rig.add(PROMPT, max_tokens=3)
    rig.finish()
    assert rig.device.log == [(what, step) for step in (1, 2, 3) for what in ("forward", "wait")]


def test_no_step_is_planned_for_a_token_that_can_not_come() -> None:
    rig = late()
    rig.add(PROMPT, max_tokens=4)
    rig.finish()
    assert [step for what, step in rig.device.log if what == "forward"] == [1, 2, 3, 4]


def test_end_of_sequence_discards_the_token_in_flight() -> None:
    expected = reference_output(PROMPT, 0, 20, frozenset())
    stop = frozenset({expected[3]})
    rig = late()
    rig.add(PROMPT, max_tokens=20, stop=stop)
    rig.finish()
    assert rig.outputs["r1"] == reference_output(PROMPT, 0, 20, stop)
    assert rig.reasons["r1"] == "stop"
    computed = max(step for what, step in rig.device.log if what == "forward")
    assert computed == len(rig.outputs["r1"]) + 1, "one more step was under way, and its token was dropped"


def test_cancel_discards_the_token_in_flight_and_frees_only_after_it() -> None:
    rig = late()
    rig.add(PROMPT, max_tokens=20)
    rig.turn()  # step 1 in flight
    rig.turn()  # step 2 in flight, step 1 committed
    free = rig.cache.available(0)
    rig.engine.cancel("r1")
    assert rig.cache.available(0) == free, "its pages are still being written by step 2"
    assert rig.scheduler.table.rows.num_free == rig.max_rows - 1, "and so is its row"
    before = list(rig.outputs["r1"])
    rig.finish()
    assert rig.outputs["r1"] == before and rig.reasons["r1"] == "cancelled"
    assert rig.cache.available(0) == rig.num_pages - 1
    assert rig.scheduler.table.rows.num_free == rig.max_rows


def test_pages_enter_the_tree_in_commit_only() -> None:
    rig = late()
    rig.add(PROMPT, max_tokens=2)
    rig.turn()
    assert len(rig.cache.tree) == 0, "planned, submitted, but not known to have run"
    rig.turn()
    assert len(rig.cache.tree) == len(PROMPT) // 4


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_deltas_go_out_before_the_deferred_commit_which_runs_within_the_turn(max_tokens: int) -> None:
    rig = late()
    rig.add(PROMPT, max_tokens=max_tokens)
    rig.turn()
    seen: list[tuple[int, int, int]] = []

    def deliver(deltas: list[Delta]) -> None:
        (delta,) = deltas
        seen.append((len(delta.token_ids), len(rig.cache.tree), len(rig.scheduler.running)))
        assert (delta.usage is not None) == (max_tokens == 1), "a final delta has its usage before the deferred commit"
        with pytest.raises(AssertionError, match="deferred part of a commit did not run"):
            rig.scheduler.check()

    rig.engine.turn(deliver)
    assert seen == [(1, 0, 1)], "the token came before its prompt's pages were in the tree and its row was given back"
    assert len(rig.cache.tree) == len(PROMPT) // 4
    assert len(rig.scheduler.running) == (max_tokens > 1)
    rig.scheduler.check()
    if max_tokens == 1:
        assert rig.cache.available(0) == rig.num_pages - 1 and rig.scheduler.table.rows.num_free == rig.max_rows


def test_the_deferred_commit_runs_although_delivery_fails() -> None:
    rig = late()
    rig.add(PROMPT, max_tokens=4)
    rig.turn()

    def deliver(deltas: list[Delta]) -> None:
        raise ConnectionError("nobody is there")

    with pytest.raises(ConnectionError):
        rig.engine.turn(deliver)
    rig.scheduler.check()
    assert len(rig.cache.tree) == len(PROMPT) // 4


def test_a_deferred_commit_that_fails_ends_the_engine() -> None:
    rig = late()
    rig.add(PROMPT, max_tokens=4)
    rig.turn()
    rig.cache.tree.ensure = None  # type: ignore[method-assign,assignment]
    deltas: list[Delta] = []
    with pytest.raises(EngineBroken, match="deferred part of a commit failed"):
        rig.engine.turn(deltas.extend)
    assert [delta.token_ids for delta in deltas] == [reference_output(PROMPT, 0, 1, frozenset())], (
        "what is sent is true"
    )


def test_swap_out_waits_for_the_steps_in_flight() -> None:
    rig = late(num_pages=8, chunk_tokens=8, max_batch_tokens=16)
    rig.add(PROMPT, max_tokens=17, priority=0)
    rig.add([20, *PROMPT[1:]], max_tokens=17, priority=1)
    draining = 0
    plan = rig.scheduler.plan

    def watched_plan() -> object:
        nonlocal draining
        made = plan()
        for request in rig.scheduler.running:
            if request.status.value == "draining":
                draining += request.inflight > 0
                assert request.row >= 0 and request.lease.units[0], "a step in flight may still write there"
        return made

    rig.scheduler.plan = watched_plan  # type: ignore[method-assign,assignment]
    rig.finish()
    assert draining and rig.scheduler.stats.swaps
    assert rig.outputs["r1"] == reference_output(PROMPT, 0, 17, frozenset())
    assert rig.outputs["r2"] == reference_output([20, *PROMPT[1:]], 0, 17, frozenset())


def test_beyond_depth_two_a_row_awaits_its_sample_in_one_step_only() -> None:
    rig = late(depth=3)
    rig.add(PROMPT, max_tokens=6)
    rig.add(PROMPT[::-1], max_tokens=6)
    while rig.engine.has_work:
        rig.turn()
        assert all(request.pending <= 1 for request in rig.scheduler.requests.values())
    assert rig.outputs["r1"] == reference_output(PROMPT, 0, 6, frozenset())


class OnlyEven:
    """A grammar that depends on what came before: even tokens, and never the same one twice in a row."""

    def mask(self, sampled: list[int]) -> bytes:
        bits = bytearray(-(-VOCAB // 8))
        for token in range(0, VOCAB, 2):
            if not sampled or token != sampled[-1]:
                bits[token // 8] |= 1 << (token % 8)
        return bytes(bits)


def test_masks_are_filled_from_the_tokens_just_committed() -> None:
    outputs = []
    for depth in (1, 2):
        rig = late(depth=depth)
        rig.add(PROMPT, max_tokens=12, grammar=OnlyEven())
        rig.add(PROMPT[::-1], max_tokens=12)
        rig.finish()
        assert all(t % 2 == 0 for t in rig.outputs["r1"])
        assert all(a != b for a, b in zip(rig.outputs["r1"], rig.outputs["r1"][1:], strict=False))
        assert rig.outputs["r2"] == reference_output(PROMPT[::-1], 0, 12, frozenset())
        outputs.append(rig.outputs["r1"])
        log = rig.device.log
        assert depth == 1 or log.index(("forward", 2)) < log.index(("wait", 1)), "the forward does not wait for a mask"
    assert outputs[0] == outputs[1]


def test_a_failed_step_leaves_no_lie() -> None:
    rig = late(poison={49})
    good, bad = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 49]
    rig.add(good, max_tokens=4)
    rig.add(bad, max_tokens=4)
    rig.add(good[::-1], max_tokens=4)
    rig.finish()
    assert rig.reasons == {"r1": "length", "r2": "error", "r3": "length"}
    assert rig.outputs["r1"] == reference_output(good, 0, 4, frozenset())
    assert rig.outputs["r3"] == reference_output(good[::-1], 0, 4, frozenset())


def test_who_only_got_its_row_in_a_failed_step_starts_over_too() -> None:
    """There was a row for it, and no page yet for a token of its own: the device never heard of it."""
    params = SamplingParams().resolve()
    seated, running, idle = (Request(name, [1, 2], 2, params, 9) for name in ("seated", "running", "idle"))
    for row, request in enumerate((seated, running, idle)):
        request.row, request.status = row, Status.RUNNING
    plan = Plan(1, [PlanRow("running", 1, 0, 2, 0, True)], [RowInit("seated", 0, [1, 2], 2, 0, params, (), 0, 0)])
    assert affected_by([plan], [seated, running, idle]) == [seated, running]


def test_committed_tokens_survive_a_later_failure() -> None:
    """A request whose own output becomes poisonous keeps what it got; others do not notice."""
    tokens = reference_output(PROMPT, 3, 30, frozenset())
    poison = next(token for token in tokens[5:] if token not in PROMPT and token not in tokens[:5])
    first = tokens.index(poison)
    rig = late(poison={poison})
    rig.add(PROMPT, max_tokens=30, seed=3)
    other = [t for t in range(20) if t != poison]
    rig.add(other, max_tokens=1)
    rig.finish()
    assert rig.outputs["r1"] == tokens[: first + 1] and rig.reasons["r1"] == "error"
    assert rig.outputs["r2"] == reference_output(other, 0, 1, frozenset())


def test_ids_can_be_reused_while_their_last_step_is_in_flight() -> None:
    rig = late()
    rig.add(PROMPT, max_tokens=20)
    rig.turn()
    rig.turn()
    rig.engine.cancel("r1")
    rig.outputs.clear()
    rig.count = 0
    rig.add(PROMPT[::-1], max_tokens=5, seed=1)
    ends = []
    while rig.engine.has_work:
        for delta in rig.engine.turn():
            ends += [delta.finish_reason.value] if delta.finish_reason else []
            rig.outputs["r1"] += delta.token_ids
        rig.scheduler.check()
    assert ends == ["cancelled", "length"]
    assert rig.outputs["r1"] == reference_output(PROMPT[::-1], 1, 5, frozenset())


def test_steps_are_counted_as_they_were_made_up() -> None:
    rig = Rig(num_pages=64, chunk_tokens=8, max_batch_tokens=10)
    rig.add(list(range(1, 13)), max_tokens=3)  # a prompt of 12 in chunks of 8 and 4
    rig.turn()
    rig.add([7, 7, 7], max_tokens=2)
    rig.finish()
    stats = rig.scheduler.stats
    shapes = [tuple(step)[1:] for step in stats.recent]
    assert shapes == [(1, 1, 8, 8), (2, 2, 7, 7), (2, 0, 2, 0), (1, 0, 1, 0)]
    assert [step.step for step in stats.recent] == list(range(1, stats.steps + 1))
    assert (stats.rows, stats.prompt_rows) == (sum(s[0] for s in shapes), sum(s[1] for s in shapes))
    assert (stats.computed_tokens, stats.prompt_tokens) == (sum(s[2] for s in shapes), 12 + 3)
