"""Tests the keys of pages: by hash, or from the tree where a page is known. Both agree, for every page size, and a
match is not used longer than what it found is there."""

from __future__ import annotations

import itertools
import random

from quire.cache.chain import LINK_TOKENS, link_key, link_keys, root_key
from quire.cache.index import CacheIndex
from quire.cache.lease import Lease
from quire.cache.pool import Pool
from quire.types import CacheSpec, Plan, Request, SamplingParams, pack_tokens

PAGE = 4


def make_index(num_pages: int = 200) -> CacheIndex:
    return CacheIndex([CacheSpec("main", "paged", (0,), (1, 8), "float32", page_tokens=PAGE)], [num_pages])


def request(name: str, tokens: list[int], salt: bytes = b"") -> Request:
    made = Request(name, list(tokens), len(tokens), SamplingParams(), len(tokens) + 1, salt=salt)
    made.lease = Lease.empty(root_key(salt=salt), PAGE, 1)
    return made


def compute(index: CacheIndex, made: Request, step: int) -> None:
    """As if a step had computed all of it and it had ended."""
    plan = Plan(step)
    assert index.admit(made, plan, 0) and index.reserve(made, len(made.tokens), plan)
    made.computed = len(made.tokens)
    index.commit(made, step)
    index.release(made, step)
    index.settle(step)
    index.check()


def test_names_from_the_tree_are_the_hashes() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    index, seen = make_index(), []
    for step in range(1, 60):
        beginning = rng.choice(seen)[: rng.randrange(40)] if seen and rng.random() < 0.7 else []
        tokens = beginning + [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        seen.append(tokens)
        salt = rng.choice([b"", b"someone"])
        made, hashed = request(f"r{step}", tokens, salt), Lease.empty(root_key(salt=salt), PAGE, 1)
        index.match(made)
        hashed.extend_keys(tokens, len(tokens) // PAGE)
        assert made.lease.keys == hashed.keys[: len(made.lease.keys)]
        compute(index, made, step)
        assert made.lease.keys == hashed.keys
        assert request("x", tokens, salt).lease.pack(tokens).tolist() == tokens


def test_a_tree_without_children_of_that_name_is_left_for_the_hash() -> None:
    index = make_index()
    compute(index, request("a", list(range(40))), 1)
    other = request("b", [*range(20), 99, *range(21, 40)])
    assert index.match(other).length == 20
    hashed = Lease.empty(root_key(), PAGE, 1)
    hashed.extend_keys(other.tokens, 9)
    assert other.lease.keys == hashed.keys
    assert index.match(request("c", list(range(40)), b"someone else")).length == 0


def test_a_match_is_looked_up_again_once_the_tree_has_changed() -> None:
    index = make_index(num_pages=12)
    early, late, plan = request("a", list(range(16))), request("b", list(range(20))), Plan(1)
    assert index.admit(early, plan, 0)
    assert index.match(late).length == 0
    early.computed = 16
    index.commit(early, 1)
    assert index.match(late).length == 16, "what was committed since is found"
    assert index.match(late) is index.match(late), "nothing happened in between"
    assert index.match(late, limit=4).length == 4
    index.release(early, 1)
    index.settle(1)
    assert index.match(late).length == 16
    taken = index.ledger.take_all(0, 11)  # all there are
    assert index.match(late).length == 0, "what was evicted since is not"
    index.ledger.drop(0, taken)
    index.check()


def test_units_are_taken_in_one_go_as_one_by_one() -> None:
    pools = [Pool(20), Pool(20)]
    for pool in pools:
        pool.drop([pool.take() for _ in range(7)])
    one_by_one = [pools[0].take() for _ in range(9)]
    assert pools[1].take_free(9) == one_by_one
    assert len(pools[1].take_free(99)) == 10 and pools[1].num_free == 0
    lone = pools[1].take_free(1) or one_by_one[:2]
    assert pools[1].share(lone) == 2 and pools[1].share(lone) == 0
    assert pools[1].drop(lone) == [] and pools[1].drop(lone) == lone and pools[1].drop(lone) == []
    assert pools[1].num_free == 2


def test_keys_are_equal_whatever_the_page_size() -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    tokens = [rng.randrange(1 << 18) for _ in range(700)]
    data, key, links = pack_tokens(tokens).tobytes(), root_key(b"v", b"a", b"s"), {0: root_key(b"v", b"a", b"s")}
    for end in range(LINK_TOKENS, len(tokens) + 1, LINK_TOKENS):
        key = links[end] = link_key(key, data[4 * (end - LINK_TOKENS) : 4 * end])
    at: dict[int, bytes] = {}
    for size in [1, 3, 4, 8, 12, 16, 17, 24, 32, 48, 64, 128, 256, rng.randrange(1, 200)]:
        lease = Lease.empty(links[0], size, 1)
        while len(lease.keys) < len(tokens) // size:  # in pieces, as a request grows
            lease.extend_keys(tokens, min(len(tokens) // size, len(lease.keys) + rng.randrange(1, 40)))
        for index, found in enumerate(lease.keys):
            end = (index + 1) * size
            assert found == at.setdefault(end, found), f"page size {size} disagrees at {end}"
            assert end not in links or found == links[end], f"page size {size} has another link at {end}"
    assert len(set(at.values())) == len(at)
    assert link_keys(links[16], data[64 : 4 * 64]) == [links[32], links[48], links[64]]


def test_a_root_tells_weights_adapter_and_salt_apart() -> None:
    roots = {root_key(*parts) for parts in itertools.product((b"", b"a", b"ab", b"b"), repeat=3)}
    assert len(roots) == 64
    index = make_index()
    tokens = list(range(24))
    for step, (weights, adapter, salt) in enumerate(itertools.product((b"1", b"2"), (None, "lora"), (b"", b"me")), 1):
        index.weights = weights
        for expected in (0, 20):
            made = Request(f"r{step}", list(tokens), 24, SamplingParams(), 25, salt=salt, adapter=adapter)
            made.lease = index.empty_lease(made)
            assert index.match(made).length == expected, "a prefix of others was shared, or the own one was not found"
            if not expected:
                compute(index, made, step)
