"""Work that is done once: prefix hits, prompts in flight, copies, snapshots, swaps. All of it counted, not timed."""

from __future__ import annotations

import pytest

from quire.cache.explain import explain, pin
from quire.engine.limits import SchedulerLimits
from quire.engine.scheduler import Scheduler
from quire.types import QuireError
from tests.pure.shadow import Rig, reference_output

LONG = [(7 * i * i + 3 * i) % 50 for i in range(41)]  # ten full pages of 4, and one token


def big(**options: object) -> Rig:
    return Rig(
        **{"num_pages": 300, "num_slots": 40, "chunk_tokens": 64, "max_batch_tokens": 256, "max_rows": 16, **options}
    )


def test_a_hit_ends_at_a_page_and_leaves_a_token_to_compute() -> None:
    for length in (8, 9, 11, 12, 40, 41):
        rig = big()
        rig.add(LONG[:length], max_tokens=1)
        rig.finish()
        before = rig.device.computed_tokens
        rig.add(LONG[:length], max_tokens=1)
        rig.finish()
        assert rig.cached["r2"] == (length - 1) // 4 * 4
        assert rig.device.computed_tokens - before == length - rig.cached["r2"] > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 3, 4, 40, 41, 43])
def test_n_samples_compute_the_prompt_once(length: int, depth: int) -> None:
    prompt = (LONG + LONG)[:length]
    rig = big(depth=depth, late=depth == 2, chunk_tokens=7)
    for index in range(5):
        rig.add(prompt, max_tokens=3, seed=index, sample_index=index)
    rig.finish()
    decoded = 5 * 2  # each sample computes all but its last token
    assert rig.device.computed_tokens <= length + 4 + decoded + (5 if depth == 2 else 0)
    for index in range(5):
        assert rig.outputs[f"r{index + 1}"] == reference_output(prompt, index, 3, frozenset())


def test_equal_prompts_of_strangers_in_flight_wait_for_the_first() -> None:
    rig = big(chunk_tokens=8)
    rig.add(LONG, max_tokens=2)
    rig.turn()
    rig.add([*LONG, 1, 2, 3], max_tokens=2)  # the same, and a bit more
    rig.add([*LONG[:22], 49, 48], max_tokens=2)  # shares five pages
    rig.finish()
    assert rig.device.computed_tokens == (41 + 1) + (44 - 40 + 1) + (24 - 20 + 1)


def test_copy_on_write_leaves_the_original_alone() -> None:
    rig = big()
    rig.add(LONG[:6], max_tokens=9)
    rig.turn()
    rig.turn()
    rig.add(LONG[:6], max_tokens=9, seed=4)
    rig.finish()
    assert rig.cache.stats.copied_on_write == 1
    assert rig.outputs["r1"] == reference_output(LONG[:6], 0, 9, frozenset())
    assert rig.outputs["r2"] == reference_output(LONG[:6], 4, 9, frozenset())


def test_a_held_request_goes_on_when_its_leader_is_cancelled() -> None:
    rig = big(chunk_tokens=4)
    rig.add(LONG, max_tokens=2)
    rig.turn()
    rig.add(LONG, max_tokens=2, seed=1)
    rig.turn()
    rig.turn()
    assert rig.scheduler.requests["r2"].status.value == "held"
    rig.engine.cancel("r1")
    rig.finish()
    assert rig.outputs["r2"] == reference_output(LONG, 1, 2, frozenset())


def test_salt_keeps_tenants_apart() -> None:
    rig = big()
    rig.add(LONG, max_tokens=1, salt=b"a")
    rig.finish()
    rig.add(LONG, max_tokens=1, salt=b"b")
    rig.add(LONG, max_tokens=1, salt=b"a", seed=1)
    rig.finish()
    assert rig.cached["r2"] == 0 and rig.cached["r3"] == 40


def test_prefix_cache_can_be_switched_off() -> None:
    rig = big(prefix_cache=False)
    for _ in range(3):
        rig.add(LONG, max_tokens=1)
        rig.finish()
    assert rig.device.computed_tokens == 3 * len(LONG) and len(rig.cache.tree) == 0


def test_a_miss_can_be_explained() -> None:
    rig = big()
    assert explain(rig.cache, LONG).reason == "nothing cached begins like this"
    rig.add(LONG, max_tokens=1)
    rig.finish()
    changed = [*LONG[:22], (LONG[22] + 1) % 50, *LONG[23:]]
    why = explain(rig.cache, changed)
    assert (why.diverged_at, why.cached_len, why.reason) == (22, 20, "diverged at token 22")
    assert explain(rig.cache, LONG).reason == "cached"
    assert explain(rig.cache, [49, *LONG]).diverged_at == 0


def test_eviction_takes_leaves_of_the_least_recently_used_first() -> None:
    rig = Rig(num_pages=21, chunk_tokens=64, max_batch_tokens=64)
    old, new = LONG[:33], [t ^ 1 for t in LONG[:33]]
    for prompt in (old, new):
        rig.add(prompt, max_tokens=1)
        rig.finish()
    rig.add([3] * 30, max_tokens=1)  # needs 8 pages, 4 are free: 4 leaves of `old` must go
    rig.finish()
    assert explain(rig.cache, old).cached_len == 16
    assert explain(rig.cache, new).cached_len == 32


def test_pinned_prefixes_go_last() -> None:
    rig = Rig(num_pages=21, chunk_tokens=64, max_batch_tokens=64)
    old, new = LONG[:33], [t ^ 1 for t in LONG[:33]]
    rig.add(old, max_tokens=1)
    rig.finish()
    assert pin(rig.cache, old) == 32
    rig.add(new, max_tokens=1)
    rig.finish()
    rig.add([3] * 30, max_tokens=1)
    rig.finish()
    assert explain(rig.cache, old).cached_len == 32
    assert explain(rig.cache, new).cached_len == 16
    pin(rig.cache, old, pinned=False)
    rig.add([4] * 60, max_tokens=1)  # soft: with everything needed, pins or not, it goes
    rig.finish()
    assert explain(rig.cache, old).cached_len < 32


def test_hits_are_counted() -> None:
    rig = big()
    for _ in range(4):
        rig.add(LONG, max_tokens=1)
        rig.finish()
    assert max(node.hits for node in rig.cache.tree.nodes()) == 3
    assert rig.cache.stats.hit_tokens == 3 * 40


@pytest.mark.parametrize("mix", ["full", "state", "full+window", "all"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_resumed_from_swap_recomputes_nothing(mix: str, depth: int) -> None:
    rig = Rig(mix, num_pages=22, num_slots=20, max_rows=2, chunk_tokens=16, max_batch_tokens=32, depth=depth,
              late=depth == 2, num_host=60, prefix_cache=False)  # fmt: skip
    victim = rig.add(LONG[:20], max_tokens=30, priority=1)
    other = [t ^ 1 for t in LONG[:20]]
    for _ in range(6):
        rig.turn()
    rig.add(other, max_tokens=30, priority=0)
    rig.add(other[::-1], max_tokens=30, priority=0)
    rig.finish()
    assert rig.scheduler.stats.swaps >= 1 and rig.scheduler.stats.recomputes == 0
    assert rig.outputs[victim] == reference_output(LONG[:20], 0, 30, frozenset())
    assert rig.device.computed_tokens == 3 * (20 + 29), "every token was computed exactly once"


@pytest.mark.parametrize("mix", ["state", "full+state"])
def test_recurrent_prefix_reuse_starts_at_a_snapshot(mix: str) -> None:
    rig = big(mix=mix)
    prompt = (LONG * 3)[:100]
    rig.add(prompt, max_tokens=1)
    rig.finish()
    rig.add(prompt, max_tokens=1)
    rig.finish()
    assert rig.cached["r2"] == 96, "the prompt's last page has a snapshot of its own"
    rig.add([*prompt[:90], 1, 2, 3], max_tokens=1)
    rig.finish()
    assert rig.cached["r3"] == 80, "elsewhere it is the last multiple of snapshot_tokens"


@pytest.mark.parametrize("preemption", ["auto", "recompute"])
def test_no_preemption_storm(preemption: str) -> None:
    """Ten requests in room for about three: each is pushed out now and then, not over and over."""
    rig = Rig(num_pages=31, max_rows=10, max_batch_tokens=64, chunk_tokens=64, preemption=preemption, num_host=400)
    for index in range(10):
        rig.add([(t + index) % 50 for t in LONG[:20]], max_tokens=24)
    rig.finish()
    assert 1 <= rig.scheduler.stats.preemptions <= 12
    for index in range(10):
        prompt = [(t + index) % 50 for t in LONG[:20]]
        assert rig.outputs[f"r{index + 1}"] == reference_output(prompt, 0, 24, frozenset())


def test_lower_priority_gives_way_and_equals_do_not() -> None:
    rig = Rig(num_pages=40, max_rows=2, max_batch_tokens=64, chunk_tokens=64)
    rig.add(LONG[:10], max_tokens=20, priority=1)
    rig.add(LONG[1:11], max_tokens=20, priority=1)
    rig.turn()
    rig.turn()
    rig.add(LONG[2:12], max_tokens=2, priority=1)
    rig.turn()
    assert rig.scheduler.stats.preemptions == 0
    rig.add(LONG[3:13], max_tokens=2, priority=0)
    order: list[str] = []
    while rig.engine.has_work:
        rig.turn()
        order += [name for name in rig.reasons if name not in order]
    assert order[0] == "r4" and rig.scheduler.stats.preemptions == 1
    assert order.index("r1") < order.index("r3"), "who came first stays first among equals"


def test_who_has_ended_is_not_remembered_until_its_deadline() -> None:
    rig = big()
    rig.add([5, 6, 7], max_tokens=2, deadline=500.0)
    rig.finish()
    keeper = rig.add([1, 2], max_tokens=2, deadline=1e6)
    for index in range(2000):
        rig.scheduler.cancel(rig.add([1, 2], max_tokens=2, deadline=1000.0 + index))
    assert len(rig.scheduler._deadlines) <= 64
    assert rig.scheduler._deadlines.expired(2e6) == [keeper], "and who has not ended is ended by it"


def test_deadlines_end_requests_wherever_they_are() -> None:
    rig = Rig(num_pages=40, max_rows=1, max_batch_tokens=8, chunk_tokens=4)
    rig.add(LONG, max_tokens=20, deadline=5.0)
    rig.add(LONG[1:], max_tokens=20, deadline=6.0)
    rig.add(LONG[2:12], max_tokens=2)
    rig.turn()
    rig.turn()
    rig.now = 10.0
    rig.finish()
    assert rig.reasons == {"r1": "deadline", "r2": "deadline", "r3": "length"}
    assert rig.outputs["r3"] == reference_output(LONG[2:12], 0, 2, frozenset())


def test_cancel_works_from_every_state() -> None:
    seen = set()
    for turns in range(40):
        rig = Rig(num_pages=12, max_rows=4, max_batch_tokens=16, chunk_tokens=8, depth=2, late=True, num_host=60)
        names = [rig.add([(t + i) % 50 for t in LONG[:12]], max_tokens=16) for i in (0, 0, 1, 2)]  # two alike
        for _ in range(turns):
            rig.turn()
        seen |= {request.status.value for request in rig.scheduler.requests.values()}
        for name in reversed(names):
            rig.engine.cancel(name)
            rig.scheduler.check()
        rig.finish()
        assert rig.cache.available(0) == 11
    assert seen == {"waiting", "held", "running", "draining", "swapped"}


def test_queue_bounds_refuse_with_a_reason() -> None:
    rig = big()
    limits = SchedulerLimits(1, 64, 64, max_waiting=2, max_waiting_tokens=60)
    rig.scheduler = Scheduler(rig.cache, limits, clock=lambda: 0.0)
    rig.engine.scheduler = rig.scheduler
    rig.add(LONG, max_tokens=1)
    with pytest.raises(QuireError, match="prompt tokens already wait"):
        rig.add(LONG, max_tokens=1)
    rig.add([1, 2], max_tokens=1)
    rig.add([1, 2], max_tokens=1)  # the first will have the row, two may wait
    with pytest.raises(QuireError, match="2 requests already wait"):
        rig.add([1, 2], max_tokens=1)
    rig.scheduler.check()


def test_a_prompt_larger_than_the_cache_is_refused() -> None:
    rig = Rig(num_pages=5)
    with pytest.raises(QuireError, match="cache holds 16"):
        rig.add(LONG, max_tokens=1)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_windows_pages_are_promised_once(depth: int) -> None:
    """Prompts that catch up in small chunks take a window's pages one by one. As many are admitted as can have them, so
    nobody is pushed out; and a long prompt passes through a pool that could never hold it."""
    rig = Rig("full+window", num_pages=300, num_window=14, chunk_tokens=4, max_batch_tokens=32, max_rows=8, depth=depth,
              late=depth == 2)  # fmt: skip
    prompts = [[(7 * i * i + 3 * i + n) % 50 for i in range(40)] for n in range(8)] + [LONG * 5]
    names = [rig.add(prompt, max_tokens=8, seed=n) for n, prompt in enumerate(prompts)]
    most = 0
    while rig.scheduler.requests:
        rig.turn()
        rig.scheduler.check()
        most = max(most, len(rig.scheduler.running))
    assert most == 2 and rig.scheduler.stats.preemptions == 0
    assert [rig.outputs[name] for name in names] == [
        reference_output(prompt, n, 8, frozenset()) for n, prompt in enumerate(prompts)
    ]


def test_the_windows_one_may_set_out_from_stay_in_a_small_pool() -> None:
    """That of the prompt and that of the end: what the window has passed between them goes first. A beginning that
    others share has its window back once someone has missed it."""
    rig = Rig("full+window", num_pages=300, num_window=24, chunk_tokens=16, max_batch_tokens=32, max_rows=2,
              host_cache=False)  # fmt: skip
    rig.add(LONG, max_tokens=60)
    rig.finish()
    rig.add([9] * 40, max_tokens=1)  # takes what is left, and what was passed
    rig.finish()
    rig.add(LONG + rig.outputs["r1"] + [3, 4, 5], max_tokens=1)
    rig.add(LONG, max_tokens=1)
    rig.finish()
    assert rig.cached["r3"] == 100, "all that was computed: the last token never is"
    assert rig.cached["r4"] == 40
    for length in (30, 31, 32):
        rig.add(LONG[:24] + [length] * length, max_tokens=1)
        rig.finish()
    assert [rig.cached[f"r{n}"] for n in (5, 6, 7)] == [0, 24, 24]
