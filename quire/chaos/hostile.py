"""Hostile requests within the gate's traffic: drawn by seed from all kinds of attacks, each answer checked.

The stream loops of `gate.py` send them between their own requests. They are small: `quire bench hostile` measures the
effect of large ones. The gate counts their effect on concurrent streams and on a server whose engine is lost.
"""

from __future__ import annotations

import random
from collections import Counter

from quire.bench.hostile.attacks import Attack, Tally, make_attacks
from quire.bench.hostile.requests import SMALL, Target
from quire.bench.online.stream_client import Endpoint

HOLD_SECONDS = 1.0  # for connections that idle or send slowly
FLOOD_BYTES, CONNECTIONS = 4 << 20, 16


class HostileTraffic:
    def __init__(self, endpoint: Endpoint) -> None:
        self._target = Target(endpoint.host, endpoint.port, endpoint.api_key or "")
        made = make_attacks(self._target, SMALL, HOLD_SECONDS, FLOOD_BYTES, CONNECTIONS)
        self._attacks: list[tuple[str, Attack]] = [
            (kind, attack) for kind, several in made.items() for attack in dict.fromkeys(several)
        ]

    async def send_one(self, rng: random.Random, sent: Counter[str], wrong: Counter[str]) -> None:
        """Send one attack. `sent` counts its requests by kind, `wrong` those with a wrong answer."""
        kind, attack = rng.choice(self._attacks)
        tally = Tally()
        try:
            await attack.once(self._target, tally)
        except OSError as error:
            tally.count(kind, f"no connection ({error.strerror or error})", False)
        sent[kind] += sum(tally.answers.values())
        wrong.update(tally.wrong)
