"""Sessions among random requests, on a store that fails, is late or returns other bytes: nothing leaks or is wrong."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from quire.cache.tiers.blocks import layouts_of
from quire.cache.tiers.sessions import SessionFolder
from quire.cache.tiers.stored import StoredTier
from quire.types.sessions import SessionCommand, SessionReply
from tests.pure.shadow import MIXES, Rig, reference_output
from tests.pure.test_tiers_random import BadStore, ShadowMemory, make_rig, prompt_from, turn

SEED = int(os.environ.get("TEST_SEED", "7"))
EXPECTED_ERRORS = {"session_not_found", "nothing_cached"}


def attach_with_sessions(rig: Rig, store: BadStore, folder: Path) -> StoredTier:
    layouts = layouts_of(rig.cache.specs, b"weights")
    memory = ShadowMemory(rig, layouts)
    tier = StoredTier("disk", store, layouts, rig.page_tokens, memory, quota=300_000, num_threads=2)
    rig.cache.attach([tier], memory, SessionFolder(folder))
    rig.engine.sessions.adopt()
    return tier


def check_pins(rig: Rig, tier: StoredTier) -> None:
    """What is favoured is exactly what the sessions hold."""
    pins = [pin for _, pin in rig.engine.sessions._pins.values()]
    assert tier._favoured == Counter(name for pin in pins for name in pin.files)
    held = Counter(block for pin in pins if pin.index is rig.cache for block in pin.blocks)
    assert rig.cache.host.favoured == held


@pytest.mark.parametrize("mix", MIXES)
def test_sessions_among_random_requests(mix: str, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    rng = random.Random(f"{SEED}/{mix}")
    store, folder = BadStore(random.Random(SEED), 0.05), tmp_path / "c"
    folder.mkdir()
    pool: list[list[int]] = []
    done: Counter[str] = Counter()
    number = 0
    for _ in range(2):  # an engine, and the next one on the same folder
        rig = make_rig(mix, 1, rng)
        tier = attach_with_sessions(rig, store, folder)
        expected: dict[str, list[int]] = {}
        actions: dict[int, str] = {}
        replies: list[SessionReply] = []
        for _ in range(350):
            move = rng.random()
            if move < 0.15 and len(rig.scheduler.requests) < 8:
                prompt = prompt_from(rng, pool)
                name = rig.add(prompt, max_tokens=rng.randrange(1, 8))
                length = rig.scheduler.requests[name].max_len - len(prompt)
                expected[name] = reference_output(prompt, 0, length, frozenset())
            elif move < 0.25 and pool:
                number += 1
                action = rng.choice(["save", "save", "load", "get", "delete"])
                tokens = rng.choice(pool) if action == "save" else []
                actions[number] = action
                command = SessionCommand(number, action, rng.choice(["a", "b"]), rng.choice(["", "x"]), tokens)  # type: ignore[arg-type]
                rig.engine.sessions.start(command)
            else:
                rig.now += 0.01
                turn(rig)
            replies += rig.engine.sessions.poll()
        while rig.engine.has_work or rig.engine.sessions.is_open:
            turn(rig)
            rig.engine.poll_transfers()
            replies += rig.engine.sessions.poll()
        assert rig.outputs == expected and {reply.number for reply in replies} == set(actions)
        for reply in replies:
            assert not reply.code or reply.code in EXPECTED_ERRORS, reply
            done[f"{actions[reply.number]} {reply.code}"] += 1
            if reply.info is not None:
                assert 0 < reply.info.saved_tokens <= reply.info.num_tokens
        check_pins(rig, tier)
        rig.engine.save()
        rig.scheduler.check()
        assert rig.cache.ledger.num_unreachable() == 0
        rig.engine.sessions.close()
        tier.close()
    assert done["save "] > 3 and done["load "] > 0 and done["delete "] > 0, done
    left = list(SessionFolder(folder).all())
    assert all(session is not None for _, session in left)
