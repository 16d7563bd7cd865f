"""The acceptance of drafts, on the device and on the host: both count the same."""

from __future__ import annotations

import os
import random

import torch

from quire.sampling.verify import NO_DRAFT, accepted_tokens, count_accepted

SEED = int(os.environ.get("TEST_SEED", "7"))


def accept(tokens: list[int], bad: list[int], rows: list[list[int]]) -> list[list[int]]:
    """Return the tokens that each row gains, and check that device and host agree. `rows`: the drafts of each."""
    firsts, place = [], 0
    for drafts in rows:
        firsts.append(place)
        place += len(drafts) + 1
    longest = max(map(len, rows))
    padded = torch.tensor([drafts + [NO_DRAFT] * (longest - len(drafts)) for drafts in rows], dtype=torch.int64)
    flags = torch.zeros(len(tokens), dtype=torch.bool)
    flags[bad] = True
    counts = count_accepted(torch.tensor(tokens), flags, torch.tensor(firsts), padded.view(len(rows), longest))
    gained = [accepted_tokens(tokens, drafts, set(bad), first) for drafts, first in zip(rows, firsts, strict=True)]
    assert [len(one) - 1 for one in gained] == counts.tolist()
    return gained


def test_drafts_are_accepted_up_to_the_first_difference() -> None:
    assert accept([5, 6, 7, 8], [], [[5, 6, 7]]) == [[5, 6, 7, 8]]
    assert accept([5, 9, 7, 8, 3], [], [[5, 6, 7], []]) == [[5, 9], [3]]


def test_a_draft_before_a_bad_sample_is_rejected() -> None:
    """Nothing can be sampled after it, which must fail the request's next step and not this one."""
    assert accept([5, 6, 0, 8], [2], [[5, 6, 7]]) == [[5, 6]]
    assert accept([0, 6, 7], [0], [[5, 6]]) == [[0]], "where the first is bad, no draft is accepted"


def test_device_and_host_agree_on_random_steps() -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for _ in range(300):
        rows = [[rng.randrange(3) for _ in range(rng.randrange(5))] for _ in range(rng.randint(1, 6))]
        count = sum(len(drafts) + 1 for drafts in rows)
        tokens = [rng.randrange(3) for _ in range(count)]
        accept(tokens, [place for place in range(count) if rng.random() < 0.1], rows)
