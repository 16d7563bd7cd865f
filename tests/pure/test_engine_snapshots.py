"""Snapshots of recurrent state: where they are taken, what they spare, and which go first. Counted, not timed."""

from __future__ import annotations

import random

import pytest

from tests.pure.shadow import VOCAB, Rig, reference_output

INTERVAL, PAGE = 16, 4  # of the shadow's state group
MIXES = ["state", "full+state", "all"]


def roomy(mix: str, **options: object) -> Rig:
    defaults = {"num_pages": 900, "num_slots": 60, "chunk_tokens": 64, "max_batch_tokens": 256, "max_rows": 8}
    return Rig(mix=mix, **{**defaults, **options})


def words(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def run(rig: Rig, prompt: list[int], max_tokens: int = 1) -> tuple[list[int], int]:
    """What was sampled, and how many tokens were computed for it, itself included."""
    before = rig.device.computed_tokens
    name = rig.add(prompt, max_tokens=max_tokens)
    rig.finish()
    assert rig.outputs[name] == reference_output(prompt, 0, max_tokens, frozenset())
    return rig.outputs[name], rig.device.computed_tokens - before


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mix", MIXES)
def test_every_turn_costs_its_new_tokens_and_at_most_an_interval(mix: str, depth: int) -> None:
    rig = roomy(mix, depth=depth, late=depth == 2)
    conversation: list[int] = []
    for turn in range(6):
        new = words(11 + 7 * turn, seed=turn)
        conversation += new
        answer, computed = run(rig, conversation, max_tokens=40)
        if turn:
            assert computed <= len(new) + len(answer) + INTERVAL + PAGE
        conversation += answer


@pytest.mark.parametrize("mix", MIXES)
def test_the_third_with_the_same_beginning_starts_where_the_second_left_it(mix: str) -> None:
    rig = roomy(mix)
    common = words(42, seed=1)
    run(rig, common + words(30, seed=2))
    _, second = run(rig, common + words(5, seed=3))
    assert second >= 47 - 32, "it starts at the last multiple of the interval before the fork"
    _, third = run(rig, common + words(6, seed=4))
    assert third <= 48 - 40, "the second left a snapshot at the last page they share"


@pytest.mark.parametrize("mix", MIXES)
def test_the_last_slot_to_be_had_may_be_the_snapshot_that_is_wanted(mix: str) -> None:
    """It becomes the request's own state, as it is: nothing else could be evicted for it."""
    rig = roomy(mix, num_slots=3, max_rows=2)  # the scratch slot and two more
    first = words(18, seed=1)
    run(rig, first)
    rig.add(words(3, seed=2), max_tokens=30)  # too short for a snapshot of its own
    rig.turn()
    assert rig.cache.available(rig.cache.state[0]) == 1, "the snapshot's alone"
    before = rig.device.computed_tokens
    prompt = first[:16] + words(3, seed=3)
    name = rig.add(prompt, max_tokens=5)
    rig.finish()
    assert rig.outputs[name] == reference_output(prompt, 0, 5, frozenset())
    assert rig.cached[name] == 16 and rig.device.computed_tokens - before <= 30 + 3 + 5


@pytest.mark.parametrize("mix", MIXES)
def test_a_long_prompt_does_not_push_out_the_last_snapshots_of_others(mix: str) -> None:
    """Eleven slots: short conversations keep theirs while one of thirty intervals comes by."""
    rig = roomy(mix, num_slots=12, max_rows=2)
    conversations = [words(21 + i, seed=10 + i) for i in range(6)]
    for conversation in conversations:
        run(rig, conversation)
    long = words(30 * INTERVAL + 3, seed=99)
    run(rig, long)
    for conversation in conversations:
        _, computed = run(rig, conversation + words(5, seed=7))
        assert computed <= 5 + 1 + PAGE, "it went on from its last snapshot"
    _, computed = run(rig, long + words(5, seed=8))
    assert computed <= 5 + 3 + PAGE, "and so did the long one"


def test_a_beginning_that_is_shared_outlives_snapshots_that_were_passed() -> None:
    rig = roomy("full+state", num_slots=8, max_rows=1)
    system = words(2 * INTERVAL, seed=1)
    run(rig, system + words(9, seed=2))
    run(rig, system + words(9, seed=3))  # forks after the system prompt: its snapshot is no longer on one path only
    run(rig, words(9 * INTERVAL, seed=4))  # more snapshots than there are slots
    _, computed = run(rig, system + words(9, seed=5))
    assert computed == 9


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_pushed_out_requests_come_back_to_the_right_state(preemption: str) -> None:
    """The shadow checks every state that is read; here that few slots make them run out all the time."""
    rig = Rig(mix="full+state", num_pages=60, num_slots=4, max_rows=6, preemption=preemption, depth=2, late=True)
    prompts = [words(20 + 9 * i, seed=i) for i in range(6)]
    names = [rig.add(prompt, max_tokens=30) for prompt in prompts]
    rig.finish()
    for name, prompt in zip(names, prompts, strict=True):
        assert rig.outputs[name] == reference_output(prompt, 0, 30, frozenset())
