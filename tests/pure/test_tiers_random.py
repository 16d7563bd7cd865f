"""Random moves over device, host memory and a store whose reads and writes fail, are late, or return other bytes.

The shadow device holds digests of tokens instead of keys and values, so a block that came back wrong is noticed by the
first step that reads it.
"""

from __future__ import annotations

import os
import random
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from quire.cache.explain import explain
from quire.cache.tiers.blocks import BlockLayout, BlockPart, layouts_of
from quire.cache.tiers.folder import StoredFile
from quire.cache.tiers.stored import StoredTier
from quire.engine.host.process import beat_of
from quire.types import Status
from tests.pure.shadow import MIXES, VOCAB, Rig, reference_output

SEED = int(os.environ.get("TEST_SEED", "7"))
PAGE = 16
MOVES = 1700  # for each of twelve combinations: more than twenty thousand in all


class ShadowMemory:
    """The host memory of a shadow device as bytes: a page's digests, over and over."""

    def __init__(self, rig: Rig, layouts: list[BlockLayout]):
        self._host, self._layouts, self._specs = rig.device.host, layouts, rig.cache.specs

    def read(self, group: int, unit: int, first_token: int, part: BlockPart) -> bytes:
        content, size = self._host[group][unit], self._layouts[group].num_bytes(part)
        digests = [content] if self._specs[group].kind == "state" else content[first_token : first_token + 16]
        data = struct.pack(f"<{len(digests)}Q", *digests)
        return (data * (size // len(data) + 1))[:size]

    def write(self, group: int, unit: int, first_token: int, part: BlockPart, body: memoryview) -> None:
        if self._specs[group].kind == "state":
            (self._host[group][unit],) = struct.unpack_from("<Q", body)
            return
        page = list(self._host[group][unit] or [None] * self._specs[group].page_tokens)
        page[first_token : first_token + 16] = struct.unpack_from("<16Q", body)
        self._host[group][unit] = page

    def is_intact(self, group: int, unit: int) -> bool:
        return True

    def seal(self, group: int, unit: int) -> None:
        pass

    def has_arrived(self, group: int, unit: int) -> bool:
        return True


class BadStore:
    """Files in a dictionary. Some calls fail, some are slow, some return the bytes of another file or damaged ones."""

    is_shared = False

    def __init__(self, rng: random.Random, trouble: float):
        self.files: dict[str, bytes] = {}
        self._rng, self.trouble, self._lock = rng, trouble, threading.Lock()
        self.num_troubles = 0

    def _meets_trouble(self) -> int:
        with self._lock:
            if self._rng.random() >= self.trouble:
                return 0
            self.num_troubles += 1
            return self._rng.randrange(1, 5)

    def scan(self) -> Iterator[StoredFile]:
        return (StoredFile(name, len(data), index) for index, (name, data) in enumerate(self.files.items()))

    def read(self, name: str, max_bytes: int) -> bytes | None:
        trouble, data = self._meets_trouble(), self.files.get(name)
        if trouble == 1:
            raise OSError(5, "Input/output error")
        if trouble == 2:
            time.sleep(0.002)
        if trouble == 3:
            return next(iter(self.files.values()), None)
        if trouble == 4 and data is not None:
            with self._lock:
                place = self._rng.randrange(len(data))
            return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        return data

    def write(self, name: str, data: bytes) -> None:
        if self._meets_trouble() in (1, 2):
            raise OSError(28, "No space left on device")
        self.files[name] = data

    def delete(self, name: str) -> None:
        self.files.pop(name, None)


def attach(rig: Rig, store: BadStore, quota: int | None = None) -> StoredTier:
    layouts = layouts_of(rig.cache.specs, b"weights")
    memory = ShadowMemory(rig, layouts)
    tier = StoredTier("disk", store, layouts, rig.page_tokens, memory, quota=quota, num_threads=2)
    rig.cache.attach([tier], memory)
    return tier


def turn(rig: Rig) -> None:
    if rig.engine.awaits_transfers:
        rig.engine.wait_for_transfer(0.05)
    rig.turn()
    rig.scheduler.check()


def finish(rig: Rig) -> None:
    while rig.engine.has_work:
        turn(rig)


def make_rig(mix: str, depth: int, rng: random.Random, num_host: int = 30) -> Rig:
    return Rig(mix, num_pages=14, num_slots=6, num_host=num_host, depth=depth, late=depth == 2, max_rows=4,
               max_batch_tokens=48, chunk_tokens=23, page_tokens=PAGE)  # fmt: skip


def prompt_from(rng: random.Random, pool: list[list[int]]) -> list[int]:
    base = rng.choice(pool)[: rng.randrange(1, 120)] if pool and rng.random() < 0.7 else []
    prompt = (base + [rng.randrange(VOCAB) for _ in range(rng.choice([1, 5, 40]))])[:130]
    pool.append(prompt)
    return prompt


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mix", MIXES)
def test_random_moves_over_three_tiers(mix: str, depth: int) -> None:
    print(f"seed {SEED}")
    rng = random.Random(f"{SEED}/{mix}/{depth}")
    store = BadStore(random.Random(SEED), 0.0)
    pool: list[list[int]] = []
    hits = loading = 0
    for restart in range(3):  # host memory is lost each time, the store is not
        store.trouble = 0.0 if restart == 1 else 0.1
        rig = make_rig(mix, depth, rng)
        tier = attach(rig, store, quota=rng.choice([None, 200_000]))
        expected: dict[str, list[int]] = {}
        for _ in range(MOVES // 3):
            move = rng.random()
            if move < 0.12 and len(rig.scheduler.requests) < 12:
                prompt, seed = prompt_from(rng, pool), rng.randrange(3)
                name = rig.add(prompt, max_tokens=rng.randrange(1, 12), seed=seed, salt=rng.choice([b"", b"", b"x"]),
                               priority=rng.choice([0, 0, 1]))  # fmt: skip
                expected[name] = reference_output(prompt, seed, rig.scheduler.requests[name].max_len - len(prompt),
                                                  frozenset())  # fmt: skip
            elif move < 0.14 and rig.scheduler.requests:
                rig.engine.cancel(rng.choice(list(rig.scheduler.requests)))
            else:
                rig.now += 0.01
                turn(rig)
                loading += any(r.status is Status.LOADING for r in rig.scheduler.requests.values())
        finish(rig)
        for name, tokens in rig.outputs.items():
            whole = rig.reasons[name] != "cancelled"
            assert tokens == expected[name][: len(tokens)] and (not whole or len(tokens) == len(expected[name]))
        assert set(rig.reasons) == set(expected), f"a request never ended after restart {restart}"
        rig.engine.save()
        assert rig.cache.ledger.num_unreachable() == 0 and tier.is_idle
        rig.scheduler.check()
        hits += tier.stats.hits
        tier.close()
    assert store.num_troubles > 5 and hits > 5 and loading > 2


@pytest.mark.parametrize("mix", MIXES)
def test_a_restart_computes_new_tokens_and_at_most_a_page_or_interval(mix: str) -> None:
    rng = random.Random(f"{SEED}/{mix}")
    store = BadStore(rng, 0.0)
    prompt = [rng.randrange(VOCAB) for _ in range(100)]
    rig = make_rig(mix, 1, rng)
    tier = attach(rig, store)
    name = rig.add(prompt, max_tokens=30)
    finish(rig)
    rig.engine.save()
    tier.close()
    again = make_rig(mix, 1, rng)
    tier = attach(again, store)
    turns = prompt + rig.outputs[name] + [1, 2, 3]
    second = again.add(turns, max_tokens=1)
    finish(again)
    assert again.outputs[second] == reference_output(turns, 0, 1, frozenset())
    interval = PAGE if "state" not in mix and mix != "all" else max(s.snapshot_tokens for s in again.cache.specs)
    assert again.device.computed_tokens <= 3 + interval + PAGE, "more than the new tokens and one page or interval"
    other = again.add(turns, max_tokens=1, salt=b"someone else")
    finish(again)
    assert again.cached[other] == 0 and tier.stats.corrupt == 0
    tier.close()


class FrozenStore(BadStore):
    """A mount that answers no more."""

    def __init__(self, rng: random.Random, files: dict[str, bytes]):
        super().__init__(rng, 0.0)
        self.files, self.thaw = files, threading.Event()

    def read(self, name: str, max_bytes: int) -> bytes | None:
        self.thaw.wait()
        return super().read(name, max_bytes)


def test_a_request_computes_what_a_frozen_store_does_not_return() -> None:
    rng = random.Random(SEED)
    store = BadStore(rng, 0.0)
    prompt = [rng.randrange(VOCAB) for _ in range(100)]
    rig = make_rig("full", 1, rng)
    tier = attach(rig, store)
    rig.add(prompt, max_tokens=1)
    finish(rig)
    rig.engine.save()
    tier.close()
    frozen = FrozenStore(rng, store.files)
    again = make_rig("full", 1, rng)
    tier = attach(again, frozen)
    assert again.cache.tiers is not None
    now = [0.0]
    again.cache.tiers._clock = lambda: now[0]
    name = again.add(prompt, max_tokens=4)
    again.turn()
    assert again.scheduler.requests[name].status is Status.LOADING and again.engine.awaits_transfers
    now[0] = 100.0
    finish(again)
    assert again.outputs[name] == reference_output(prompt, 0, 4, frozenset()) and again.cached[name] == 0
    frozen.thaw.set()
    again.engine.save()
    again.scheduler.check()
    assert again.cache.ledger.num_unreachable() == 0
    tier.close()


def test_a_cancelled_request_leaves_nothing_behind() -> None:
    rng = random.Random(SEED)
    store = BadStore(rng, 0.0)
    rig = make_rig("full", 1, rng)
    tier = attach(rig, store)
    prompt = [rng.randrange(VOCAB) for _ in range(100)]
    rig.add(prompt, max_tokens=1)
    finish(rig)
    rig.engine.save()
    tier.close()
    frozen = FrozenStore(rng, store.files)
    again = make_rig("full", 1, rng)
    tier = attach(again, frozen)
    name = again.add(prompt, max_tokens=4)
    again.turn()
    again.engine.cancel(name)
    finish(again)
    assert again.reasons[name] == "cancelled"
    frozen.thaw.set()
    again.engine.save()
    again.scheduler.check()
    assert again.cache.ledger.num_unreachable() == 0
    tier.close()


def test_people_see_what_each_tier_holds_and_why_one_fails() -> None:
    rng = random.Random(SEED)
    store = BadStore(rng, 0.0)
    rig = make_rig("full", 1, rng)
    tier = attach(rig, store)
    prompt = [rng.randrange(VOCAB) for _ in range(100)]
    rig.add(prompt, max_tokens=1)
    finish(rig)
    rig.engine.save()
    assert explain(rig.cache, prompt).tiers == {"device": 96, "host": 96, "disk": 96}
    usage = {one.name: one for one in beat_of(rig.engine).tiers}
    assert usage["disk"].stores == usage["disk"].num_blocks == usage["host"].num_blocks == 6
    assert usage["disk"].num_bytes == sum(map(len, store.files.values())) and usage["disk"].queued == 0
    tier.close()
    again = make_rig("full", 1, rng)
    tier = attach(again, store)
    assert explain(again.cache, prompt).tiers == {"device": 0, "host": 0, "disk": 96}
    assert explain(again.cache, prompt, b"someone else").tiers == {"device": 0, "host": 0, "disk": 0}
    for name, data in store.files.items():
        store.files[name] = data[:-1]
    again.add(prompt, max_tokens=1)
    finish(again)
    beat = beat_of(again.engine)
    assert beat.tiers[1].corrupt > 0 and beat.tiers[1].hits == 0
    (fault,) = again.cache.take_faults()
    assert "disk tier" in fault.what and again.cache.take_faults() == []
    tier.close()


def test_what_other_weights_compute_is_not_stored_under_the_old_ones() -> None:
    rng = random.Random(SEED)
    store = BadStore(rng, 0.0)
    rig = make_rig("full", 1, rng)
    tier = attach(rig, store)
    name = rig.add([rng.randrange(VOCAB) for _ in range(40)], max_tokens=60)
    while rig.cache.match(rig.scheduler.requests[name]).length < 32:
        turn(rig)
    rig.engine.poll_transfers()
    rig.scheduler.use_weights(b"new", "keep")
    known = len(store.files)
    finish(rig)
    rig.engine.save()
    assert rig.reasons[name] == "length" and len(store.files) <= known + 2, "only what was computed before"
    other = rig.add([rng.randrange(VOCAB) for _ in range(40)], max_tokens=1)
    finish(rig)
    rig.engine.save()
    assert other in rig.reasons and len(store.files) > known, "requests of the new weights are stored"
    tier.close()
