"""The attacking process, `python -m quire.bench.hostile.sender`: reads an order per line of stdin, and writes the
tallies of each to stdout.

It runs at a low priority and makes its requests beforehand, so that its CPU time adds little to the server's delay.
"""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from quire.bench.hostile.attacks import Tally, make_attacks, run_attacks
from quire.bench.hostile.requests import SMALL, Sizes, Target

NICENESS = 10


class AttackOrder(msgspec.Struct, frozen=True):
    target: Target
    kinds: tuple[str, ...]
    seconds: float
    max_rounds: int
    flood_bytes: int
    connections: int
    small: bool = False


async def run_order(order: AttackOrder) -> dict[str, Tally]:
    sizes = SMALL if order.small else Sizes()
    made = make_attacks(order.target, sizes, order.seconds, order.flood_bytes, order.connections)
    return await run_attacks(order.target, {name: made[name] for name in order.kinds}, order.seconds, order.max_rounds)


def main() -> int:
    os.nice(NICENESS)
    for line in sys.stdin.buffer:
        tallies = asyncio.run(run_order(msgspec.json.decode(line, type=AttackOrder)))
        sys.stdout.buffer.write(msgspec.json.encode(tallies) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
