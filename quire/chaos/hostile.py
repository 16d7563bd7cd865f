"""Hostile requests among a gate's own: drawn by seed from every kind there is, each answer held against the right ones.

The stream loops of `gate` send one now and then. Requests are small here: what their size does to the server is what
`quire bench hostile` measures; what they do to the streams beside them, and to a server whose engine is being killed,
is counted here.
"""

from __future__ import annotations

import random
from collections import Counter

from quire.bench.hostile.attacks import Attack, Tally, make_attacks
from quire.bench.hostile.requests import SMALL, Target
from quire.bench.online.stream_client import Endpoint

HOLD_SECONDS = 1.0  # of connections that idle or drip
FLOOD_BYTES, CONNECTIONS = 4 << 20, 16


class HostileTraffic:
    def __init__(self, endpoint: Endpoint) -> None:
        self._target = Target(endpoint.host, endpoint.port, endpoint.api_key or "")
        made = make_attacks(self._target, SMALL, HOLD_SECONDS, FLOOD_BYTES, CONNECTIONS)
        self._attacks: list[tuple[str, Attack]] = [
            (kind, attack) for kind, several in made.items() for attack in dict.fromkeys(several)
        ]

    async def send_one(self, rng: random.Random, sent: Counter[str], wrong: Counter[str]) -> None:
        """One attack; `sent` counts its requests by kind, `wrong` those that were not answered as they should be."""
        kind, attack = rng.choice(self._attacks)
        tally = Tally()
        try:
            await attack.once(self._target, tally)
        except OSError as error:
            tally.count(kind, f"no connection ({error.strerror or error})", False)
        sent[kind] += sum(tally.answers.values())
        wrong.update(tally.wrong)
