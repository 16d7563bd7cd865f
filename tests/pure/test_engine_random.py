"""Ten thousand random moves against the shadow device, with every invariant checked after each."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping

import pytest

from quire.cache.explain import pin
from quire.types import CopyKind, Plan, StepOutput
from tests.pure.drafting import RandomDrafter
from tests.pure.remote_workers import RemoteWorkers
from tests.pure.shadow import MIXES, Poisoned, Rig, random_prompt, reference_output

SEED = int(os.environ.get("TEST_SEED", "7"))
MOVES = 600  # for each of the combinations below: more than ten thousand in all


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("preemption", ["auto", "recompute"])
@pytest.mark.parametrize("mix", [*MIXES, "full+window, few", "all, few"])
def test_random_moves(mix: str, preemption: str, depth: int) -> None:
    """`few`: with so few pages for the window that it runs out, too."""
    make_random_moves(mix, preemption, depth)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("mix", MIXES)
def test_random_moves_where_only_bytes_reach_the_workers(mix: str, depth: int) -> None:
    rig = make_random_moves(mix, "auto", depth, remote=True)
    remote = rig.engine.workers
    assert isinstance(remote, RemoteWorkers) and len(remote.plan_bytes) >= rig.scheduler.stats.steps > 100


def make_random_moves(mix: str, preemption: str, depth: int, remote: bool = False, moves: int = MOVES,
                      drafter: RandomDrafter | None = None) -> Rig:  # fmt: skip
    print(f"seed {SEED}")
    rng = random.Random(f"{SEED}/{mix}/{preemption}/{depth}")
    mix, _, few = mix.partition(", ")
    rig = Rig(mix, preemption=preemption, depth=depth, late=rng.random() < 0.5, num_host=rng.choice([12, 40]),
              num_window=rng.choice([8, 12, 15]) if few else None, drafter=drafter,
              host_cache=preemption == "auto")  # fmt: skip
    if remote:
        rig.engine.wrap(RemoteWorkers)
    pool: list[list[int]] = []
    expected: dict[str, list[int]] = {}
    ended_early: set[str] = set()
    for _ in range(moves):
        move = rng.random()
        if move < 0.25 and len(rig.scheduler.requests) < 40:
            prompt, seed = random_prompt(rng, pool), rng.randrange(100)
            if len(prompt) > 60:
                continue
            max_tokens = rng.randint(1, 20)
            stop = frozenset(rng.sample(range(50), 2))
            deadline = rig.now + rng.random() if rng.random() < 0.05 else None
            for index in range(rng.choice([1, 1, 1, 3])):
                name = rig.add(prompt, max_tokens=max_tokens, seed=seed + index, stop=stop, deadline=deadline,
                               priority=rng.choice([0, 0, 1]), salt=rng.choice([b"", b"", b"x"]),
                               speculate=drafter is None or rng.random() < 0.9)  # fmt: skip
                expected[name] = reference_output(prompt, seed + index, max_tokens, stop)
        elif move < 0.29 and rig.scheduler.requests:
            name = rng.choice(list(rig.scheduler.requests))
            rig.engine.cancel(name)
            ended_early.add(name)
        elif move < 0.33 and any(r.inflight == 0 for r in rig.scheduler.running):
            idle = rng.choice([r for r in rig.scheduler.running if r.inflight == 0])
            rig.cache.rollback(idle, idle.computed, rig.scheduler.table.last_step)  # what rejected drafts will do
        elif move < 0.35 and pool:
            pin(rig.cache, rng.choice(pool), pinned=rng.random() < 0.5)
        else:
            rig.now += rng.random() * 0.01
            rig.turn()
        rig.scheduler.check()
    rig.finish()
    for name, tokens in rig.outputs.items():
        if rig.reasons[name] in ("cancelled", "deadline"):
            assert tokens == expected[name][: len(tokens)]
        else:
            assert tokens == expected[name], name
            assert name not in ended_early or rig.reasons[name] in ("stop", "length")
    assert set(rig.reasons) == set(expected), "a request never ended"
    for group in range(len(rig.cache.specs)):  # nothing is held once everyone has ended
        assert rig.cache.available(group) == rig.cache.pools[group].num_units - 1
    if preemption == "auto" and mix == "full":
        assert rig.scheduler.stats.swaps > 0
    if mix in ("full", "full+window"):
        assert rig.scheduler.stats.preemptions > 0 and rig.cache.stats.evicted_units > 0
    return rig


@pytest.mark.parametrize("depth", [1, 2])
def test_random_failures(depth: int) -> None:
    """Steps that fail take down only the request that makes them fail; the others lose nothing."""
    print(f"seed {SEED}")
    rng = random.Random(f"{SEED}/failures/{depth}")
    for mix in MIXES:
        rig = Rig(mix, depth=depth, late=depth == 2, poison={49})
        pool: list[list[int]] = []
        expected = {}
        for _ in range(30):
            prompt, seed = random_prompt(rng, pool), rng.randrange(100)
            name = rig.add(prompt, seed=seed, max_tokens=10)
            expected[name] = (prompt, reference_output(prompt, seed, 10, frozenset()))
            for _ in range(rng.randint(0, 3)):
                rig.turn()
                rig.scheduler.check()
        rig.finish()
        for name, (prompt, tokens) in expected.items():
            poisoned = 49 in prompt or 49 in tokens[:-1]  # the last token is never computed
            assert (rig.reasons[name] == "error") == poisoned, name
            assert rig.outputs[name] == tokens[: len(rig.outputs[name])]
            assert poisoned or rig.outputs[name] == tokens


class Moody:
    """A device whose steps fail now and then, through nobody's fault: before anything of them is done, or after all."""

    def __init__(self, rig: Rig, rng: random.Random):
        self._run, self._rng = rig.device._run, rng
        self.num_failed = self.num_lost_swaps = 0
        rig.device._run = self.run  # type: ignore[method-assign]

    def run(self, plan: Plan, masks: Mapping[int, bytes] | None) -> StepOutput:
        swaps = any(copy.kind is CopyKind.OUT for copy in plan.copies)
        fails = self._rng.random() < (0.5 if swaps else 0.1) and len(plan.rows) > 1  # who fails alone twice is blamed
        early = swaps or self._rng.random() < 0.5
        output = None if fails and early else self._run(plan, masks)
        self.num_failed += fails
        self.num_lost_swaps += fails and swaps
        if fails or output is None:
            raise Poisoned
        return output


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mix", list(MIXES))
def test_steps_that_fail_cost_nobody_anything(mix: str, depth: int) -> None:
    """Not even those whose bytes were on their way to the host."""
    print(f"seed {SEED}")
    rng = random.Random(f"{SEED}/moody/{mix}/{depth}")
    rig = Rig(mix, depth=depth, late=depth == 2, prefix_cache=depth == 2)
    moody = Moody(rig, rng)
    pool: list[list[int]] = []
    expected = {}
    for _ in range(60):
        prompt, seed = random_prompt(rng, pool), rng.randrange(100)
        name = rig.add(prompt, seed=seed, max_tokens=20, priority=rng.choice([0, 0, 1]))
        expected[name] = reference_output(prompt, seed, 20, frozenset())
        for _ in range(rng.randint(0, 4)):
            rig.turn()
            rig.scheduler.check()
    rig.finish()
    assert set(rig.reasons.values()) == {"length"} and rig.outputs == expected
    assert moody.num_failed > 5
    if mix == "full" and depth == 1:
        assert moody.num_lost_swaps > 0
