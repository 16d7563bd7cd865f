"""Changes to bytes and to JSON: small ones that keep most of the form, and a few that keep none."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

INTERESTING = (
    0,
    1,
    127,
    128,
    255,
    256,
    32767,
    65535,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 1 << 31, 1 << 63, -(1 << 63), 1 << 70, 0.0, -0.0, 1e308, -1e-320, float("nan"),
    float("inf"), "", "x", "\0", "\ud800", "é" * 3, "a" * 70_000, "{{7*7}}", "../../etc/passwd", [], {}, [[]], [None],
    {"": None}, ["x"] * 300, {"a": {"b": {"c": {}}}}, "<|im_end|>",
)  # fmt: skip


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        kind = rng.randrange(8)
        place = rng.randrange(len(out) + 1)
        if kind == 0 and out:
            out[place % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 1 and out:
            out[place % len(out)] = rng.randrange(256)
        elif kind == 2:
            out[place:place] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
        elif kind == 3:
            del out[place : place + rng.randrange(1, 17)]
        elif kind == 4:
            del out[place:]
        elif kind == 5:
            value, size = rng.choice(INTERESTING), rng.choice((1, 2, 4, 8))
            out[place : place + size] = (value % (1 << 8 * size)).to_bytes(size, rng.choice(("little", "big")))
        elif kind == 6:
            start = rng.randrange(len(out) + 1)
            out[place:place] = out[start : start + rng.randrange(64)]
        elif kind == 7 and rng.random() < 0.1:
            return bytes(rng.randrange(256) for _ in range(rng.randrange(200)))
    return bytes(out)


def mutate_json(rng: random.Random, value: Any) -> Any:
    """A deep copy with some of it replaced, removed, added or nested."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 4))):
        value = _mutate_once(rng, value)
    return value


def _mutate_once(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(sorted(value))
        if rng.random() < 0.7:
            value[key] = _mutate_once(rng, value[key])
        elif rng.random() < 0.5:
            del value[key]
        else:
            value[rng.choice((key + "x", "", "seed", "n", "stop", "tools", "model"))] = deepcopy(rng.choice(STRANGE))
        return value
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        if rng.random() < 0.7:
            value[place] = _mutate_once(rng, value[place])
        elif rng.random() < 0.5:
            del value[place]
        else:
            value.insert(place, deepcopy(rng.choice(STRANGE)))
        return value
    if rng.random() < 0.05:
        for _ in range(rng.choice((5, 60, 400))):
            value = [value] if rng.random() < 0.5 else {"a": value}
        return value
    return deepcopy(rng.choice(STRANGE))
