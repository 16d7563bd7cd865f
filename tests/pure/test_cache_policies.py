"""Policies of eviction and of admission: what they prefer, and that none starves a request or changes a token."""

from __future__ import annotations

import os
import random

import pytest

from quire.cache.eviction import CostPerByte, LeastRecentlyUsed
from quire.engine.candidates import PrefixAware
from quire.engine.policies import fcfs
from quire.engine.queue import WaitQueue
from quire.types import Request, SamplingParams
from tests.pure.shadow import MIXES, VOCAB, Rig, reference_output

SEED = int(os.environ.get("TEST_SEED", "7"))


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def request_of(name: str, arrival: float, length: int = 10) -> Request:
    return Request(name, [1] * length, length, SamplingParams(), 99, arrival=arrival)


def set_cost(rig: Rig) -> None:
    rig.cache.evict_by_cost(lambda tokens, context: tokens * (1.0 + context))


def test_late_pages_are_worth_more_and_fall_behind_when_unused() -> None:
    rng = random.Random(SEED)
    rig = Rig("full", num_pages=40, num_host=0)
    set_cost(rig)
    prompt = prompt_of(rng, 60)
    rig.add(prompt, max_tokens=1)
    rig.finish()
    policy = rig.cache.tree.eviction
    assert isinstance(policy, CostPerByte)
    nodes = sorted(rig.cache.tree.nodes(), key=lambda node: node.depth)
    values = [policy.value(node, 0) for node in nodes]
    assert values == sorted(values) and values[0] < values[-1]
    for _ in range(40):  # short prompts, one after the other: in the end even the long one's pages go
        rig.add(prompt_of(rng, 12), max_tokens=1)
        rig.finish()
    assert rig.scheduler.cache.match(_probe(rig, prompt)).length < 56


def _probe(rig: Rig, prompt: list[int]) -> Request:
    request = Request("probe", prompt, len(prompt), SamplingParams(), 999)
    request.lease = rig.cache.empty_lease(request)
    return request


def work_of(policy: str) -> int:
    """Return the tokens computed for a long prompt that comes back now and then among many short ones."""
    rng = random.Random(SEED)
    rig = Rig("full", num_pages=40, num_host=0)
    if policy == "cost":
        set_cost(rig)
    else:
        rig.cache.tree.eviction = LeastRecentlyUsed()
    long = prompt_of(rng, 80)
    for _ in range(6):
        rig.add(long, max_tokens=1)
        rig.finish()
        for _ in range(12):
            rig.add(prompt_of(rng, 9), max_tokens=1)
            rig.finish()
    return rig.device.computed_tokens


def test_eviction_by_cost_saves_work_where_long_prompts_come_back() -> None:
    unavoidable = 6 * 12 * 9  # the short prompts never come back
    assert work_of("cost") - unavoidable < 0.6 * (work_of("lru") - unavoidable)


@pytest.mark.parametrize("mix", MIXES)
def test_random_moves_under_both_policies(mix: str) -> None:
    print(f"seed {SEED}")
    rng = random.Random(f"{SEED}/{mix}")
    rig = Rig(mix, num_pages=20, num_slots=8, num_host=20, max_rows=3)
    set_cost(rig)
    rig.scheduler._candidates = PrefixAware(0.5)
    pool = [prompt_of(rng, 30) for _ in range(4)]
    expected: dict[str, list[int]] = {}
    for _ in range(400):
        if rng.random() < 0.3 and len(rig.scheduler.requests) < 10:
            prompt = [*rng.choice(pool)[: rng.randrange(1, 30)], *prompt_of(rng, rng.randrange(1, 8))]
            name = rig.add(prompt, max_tokens=rng.randrange(1, 6), priority=rng.choice([0, 0, 1]))
            expected[name] = reference_output(
                prompt, 0, rig.scheduler.requests[name].max_len - len(prompt), frozenset()
            )
        rig.now += 0.05
        rig.turn()
        rig.scheduler.check()
    rig.finish()
    assert rig.outputs == expected and rig.cache.ledger.num_unreachable() == 0


def test_cached_prefixes_go_first_and_nobody_starves() -> None:
    rng = random.Random(SEED)
    rig = Rig("full", num_pages=60, num_host=0, max_rows=1)
    rig.scheduler._candidates = PrefixAware(5.0)
    known = prompt_of(rng, 40)
    rig.add(known, max_tokens=1)
    rig.finish()
    busy = rig.add(prompt_of(rng, 5), max_tokens=6)
    rig.turn()
    cold = rig.add(prompt_of(rng, 30), max_tokens=1)
    warm = [rig.add([*known, token], max_tokens=1) for token in range(4)]
    for _ in range(200):
        rig.turn()
        if warm[1] in rig.reasons:
            break
    assert busy in rig.reasons and cold not in rig.reasons, "the cached ones overtake"
    rig.now += 6.0  # the first has waited long enough
    rig.turn()
    rig.turn()
    assert cold in rig.reasons or rig.scheduler.requests[cold].row >= 0
    rig.finish()
    assert set(rig.reasons) >= {cold, *warm}


def test_the_first_of_a_queue_are_found_without_a_scan() -> None:
    rng = random.Random(SEED)
    queue = WaitQueue(fcfs)
    requests = [request_of(str(number), rng.random()) for number in range(200)]
    for request in requests:
        queue.push(request)
    gone = set(rng.sample(range(200), 60))
    for number in gone:
        queue.remove(requests[number])
    left = sorted((one for number, one in enumerate(requests) if number not in gone), key=fcfs)
    for count in (1, 2, 16, 300):
        assert queue.first(count) == left[:count]
    assert WaitQueue(fcfs).first(16) == []
    mixed = WaitQueue(lambda request: (float(len(request.tokens) > 15), request.arrival))
    for request in (request_of("a", 1.0), request_of("b", 0.5, 20), request_of("c", 2.0)):
        mixed.push(request)
    assert [one.id for one in mixed.first(16)] == ["a", "c"], "another class does not compete"
