"""Twenty thousand random moves with drafts that are right now and then, with every invariant checked after each."""

from __future__ import annotations

import random

import pytest

from tests.pure.drafting import RandomDrafter
from tests.pure.shadow import MIXES
from tests.pure.test_engine_random import SEED, make_random_moves


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("preemption", ["auto", "recompute"])
@pytest.mark.parametrize("mix", [*MIXES, "full+window, few", "all, few"])
def test_random_moves_with_drafts(mix: str, preemption: str, depth: int) -> None:
    drafter = RandomDrafter(random.Random(f"{SEED}/{mix}/{preemption}/{depth}/drafts"), waits=0.6)
    make_random_moves(mix, preemption, depth, drafter=drafter, moves=420)
    assert drafter.num_partial > 10 and drafter.num_accepted > 50
    assert not drafter.open, "the drafter was not told that these ended"


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("mix", [*MIXES, "all, few"])
def test_random_moves_with_drafts_that_the_device_proposes(mix: str, depth: int) -> None:
    rng = random.Random(f"{SEED}/{mix}/{depth}/proposals")
    drafter = RandomDrafter(rng, waits=0.6, proposing=True)
    make_random_moves(mix, "auto", depth, drafter=drafter, moves=420)
    assert drafter.num_proposed > 100 and drafter.num_accepted > 50
    assert not drafter.proposals, "the drafter was not told that these ended"
