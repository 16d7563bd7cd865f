"""Tests the host tier: what the device evicts comes back, for the right tenant, and preempted requests go first."""

from __future__ import annotations

import os
import random

import pytest

from quire.cache.tiers.host import HostTier
from quire.cache.tiers.seam import BlockId
from quire.cache.tree import ABSENT
from quire.types import CopyKind, Plan
from tests.pure.shadow import MIXES, VOCAB, Rig, reference_output

SEED = int(os.environ.get("TEST_SEED", "7"))


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def complete(rig: Rig, prompt: list[int], salt: bytes = b"") -> int:
    """Run a request alone; return how many of its tokens came from the cache."""
    name = rig.add(prompt, max_tokens=4, salt=salt)
    rig.finish()
    assert rig.outputs[name] == reference_output(prompt, 0, 4, frozenset())
    return rig.cached[name]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mix", MIXES)
def test_evicted_prefixes_come_back_from_the_host(mix: str, depth: int) -> None:
    rng = random.Random(f"{SEED}/{mix}")
    rig = Rig(mix, num_pages=16, num_slots=5, num_host=200, depth=depth, late=depth == 2)
    prompts = [prompt_of(rng, 33) for _ in range(8)]
    assert [complete(rig, prompt) for prompt in prompts] == [0] * 8
    loaded = rig.cache.stats.loaded_tokens
    assert [complete(rig, prompt) for prompt in prompts] == [32] * 8, "every page but the last token's"
    assert rig.cache.stats.loaded_tokens > loaded and rig.cache.host.stats.hits > 0
    assert [complete(rig, prompt, b"someone else") for prompt in prompts] == [0] * 8
    assert rig.cache.ledger.num_unreachable() == 0


def test_without_the_host_tier_evicted_prefixes_are_lost() -> None:
    rng = random.Random(SEED)
    rig = Rig("full", num_pages=16, num_host=200, host_cache=False)
    prompts = [prompt_of(rng, 33) for _ in range(8)]
    assert [complete(rig, prompt) for prompt in prompts * 2] == [0] * 16
    assert rig.cache.host.num_blocks == 0


def test_preempted_requests_take_host_units_from_cached_blocks() -> None:
    rng = random.Random(SEED)
    rig = Rig("full", num_pages=14, num_host=12, max_rows=2)
    for _ in range(6):
        complete(rig, prompt_of(rng, 30))
    assert rig.cache.host.pools[0].num_free == 0, "the host is full of cached blocks"
    low = rig.add(prompt_of(rng, 24), max_tokens=20, priority=1)
    for _ in range(6):
        rig.turn()
    high = rig.add(prompt_of(rng, 40), max_tokens=4)
    rig.finish()
    assert rig.scheduler.stats.swaps > 0 and rig.cache.stats.swapped_in > 0
    assert {rig.reasons[name] for name in (low, high)} == {"length"}
    assert rig.cache.host.stats.evictions > 0


def test_a_block_is_visible_once_its_step_has_committed_and_gone_if_it_failed() -> None:
    tier, plan = HostTier([6], [64]), Plan(1)
    kept, lost = BlockId(b"a" * 20, 0), BlockId(b"b" * 20, 0)
    assert tier.store(kept, 3) and not tier.has(kept)
    plan.copies.append("later")  # type: ignore[arg-type]
    tier.take_stores(plan)
    assert plan.copies[0].kind is CopyKind.OUT and plan.copies[0].source == 3 and plan.copies[1] == "later"
    assert not tier.has(kept)
    tier.settle(1)
    assert tier.has(kept) and [done.block for done in tier.poll()] == [kept]
    assert tier.store(lost, 4)
    tier.take_stores(Plan(2))
    plan = Plan(3)
    assert tier.load(kept, 5)
    tier.take_loads(plan)
    assert [(c.kind, c.target) for c in plan.copies] == [(CopyKind.IN, 5)]
    tier.abandon()
    tier.settle(3)
    tier.check(3)
    assert not tier.has(lost) and not tier.has(kept), "what a failed step read may be damaged"
    assert tier.pools[0].num_free == 5 and [done.ok for done in tier.poll()] == [False, False]


def test_blocks_that_are_being_read_are_not_evicted() -> None:
    tier = HostTier([4], [64])
    blocks = [BlockId(bytes([i]) * 20, 0) for i in range(5)]
    for step, block in enumerate(blocks[:3], start=1):
        assert tier.store(block, 1)
        tier.take_stores(Plan(step))
        tier.settle(step)
    assert all(tier.load(block, 2) for block in blocks[:3]) and tier.num_takeable(0) == 0
    tier.take_loads(Plan(4))
    assert not tier.store(blocks[3], 1) and tier.take(0) == ABSENT and tier.stats.drops == 1
    tier.settle(4)
    assert tier.store(blocks[3], 1) and not tier.has(blocks[0]) and tier.has(blocks[1])
    assert not tier.load(blocks[4], 1), "it was never there"
    tier.check(4)
