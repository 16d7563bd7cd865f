"""Ranks that are lost at random moments: every request ends with the tokens it has without."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

import pytest

from quire.engine.workers import RanksLost
from quire.types import Plan, StepOutput
from tests.pure.shadow import MIXES, Rig, ShadowDevice, random_prompt, reference_output

SEED = int(os.environ.get("TEST_SEED", "7"))


class LosingRanks:
    """Loses its ranks now and then. Once they are replaced, nothing of what they held is there."""

    def __init__(self, device: ShadowDevice, rng: random.Random, share: float):
        self.device, self.rng, self.share = device, rng, share
        self.num_losses = 0

    def forward(self, plan: Plan) -> Any:
        self._perhaps_lose()
        return self.device.forward(plan)

    def sample(self, forward: Any, masks: Mapping[int, bytes] | None = None) -> Any:
        self._perhaps_lose()
        return _Ticket(self, self.device.sample(forward, masks))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def _perhaps_lose(self) -> None:
        if self.rng.random() < self.share:
            raise RanksLost("Rank 1 has ended", self._replace)

    def _replace(self) -> None:
        self.num_losses += 1
        device = self.device
        for units in device.pages:
            for index, unit in enumerate(units):
                units[index] = [None] * len(unit) if isinstance(unit, list) else None
        device.host = [[None] * len(units) for units in device.host]
        device.rows.clear()
        device.queue.clear()


class _Ticket:
    def __init__(self, ranks: LosingRanks, inner: Any):
        self._ranks, self._inner = ranks, inner

    def wait(self) -> StepOutput:
        self._ranks._perhaps_lose()
        return self._inner.wait()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("mix", MIXES)
def test_lost_ranks_cost_no_token(mix: str, depth: int) -> None:
    print(f"seed {SEED}")
    rng = random.Random(f"{SEED}/{mix}/{depth}")
    rig = Rig(mix, depth=depth, late=rng.random() < 0.5)
    ranks: list[LosingRanks] = []

    def lose(workers: Any) -> Any:
        ranks.append(LosingRanks(workers, rng, 0.01))
        return ranks[0]

    rig.engine.wrap(lose)
    pool: list[list[int]] = []
    expected: dict[str, list[int]] = {}
    for _ in range(400):
        move = rng.random()
        if move < 0.2 and len(rig.engine.scheduler.requests) < 20:
            prompt, seed = random_prompt(rng, pool), rng.randrange(100)
            if len(prompt) <= 60:
                expected[rig.add(prompt, max_tokens=12, seed=seed)] = reference_output(prompt, seed, 12, frozenset())
        elif move < 0.23 and rig.engine.scheduler.requests:
            rig.engine.cancel(rng.choice(list(rig.engine.scheduler.requests)))
        else:
            rig.turn()
        rig.engine.scheduler.check()
    for _ in range(5000):
        if not rig.engine.has_work:
            break
        rig.turn()
        rig.engine.scheduler.check()
    assert not rig.engine.has_work
    assert ranks[0].num_losses > 3
    for name, tokens in rig.outputs.items():
        assert tokens == expected[name][: len(tokens)]
        assert rig.reasons[name] == "cancelled" or len(tokens) == len(expected[name])


def test_ranks_that_are_lost_at_every_step_end_the_engine() -> None:
    rig = Rig("full")
    rig.engine.wrap(lambda workers: LosingRanks(workers, random.Random(1), 1.0))  # type: ignore[arg-type]
    rig.add([1, 2, 3])
    rig.turn()
    rig.turn()
    with pytest.raises(RanksLost, match="Rank 1 has ended"):
        rig.turn()
