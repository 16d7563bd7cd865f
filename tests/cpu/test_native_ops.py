"""The native ops against their reference twins, over random shapes: odd widths, scattered pages, windows."""

from __future__ import annotations

import os
import random

import pytest
import torch

from quire.kernels.activations import CURVES
from quire.kernels.angles import angle_tables
from quire.kernels.native.library import Native
from quire.kernels.native.ops import NativeOps
from quire.kernels.reference import attention as reference_attention
from quire.kernels.reference import small_ops as reference
from quire.sampling.noise import Noise, stream_key

SEED = int(os.environ.get("TEST_SEED", "5"))
GARBAGE = 1e4  # in slots nobody wrote


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(SEED)


@pytest.fixture
def ops(native: Native) -> NativeOps:
    return NativeOps(native)


@pytest.mark.parametrize("width", [1, 5, 16, 33, 64, 576, 1001])
def test_norm_and_gate_mul(ops: NativeOps, width: int) -> None:
    x, weight = torch.randn(3, 2, width) * 3, torch.randn(width)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    gate_up = torch.randn(4, 2 * width) * 30
    for curve in CURVES:
        torch.testing.assert_close(ops.gate_mul(gate_up, curve), reference.gate_mul(gate_up, curve))


def test_what_the_kernels_do_not_take_goes_to_the_reference(ops: NativeOps) -> None:
    x, weight = torch.randn(4, 16).half(), torch.randn(16).half()
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    strided = torch.randn(4, 32)[:, ::2]
    torch.testing.assert_close(ops.rms_norm(strided, weight.float(), 1e-5),
                               reference.rms_norm(strided, weight.float(), 1e-5))  # fmt: skip
    assert torch.isnan(ops.gate_mul(torch.full((1, 4), torch.nan))).all()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 8), (9, 3, 64), (3, 1, 50), (2, 2, 128)])
def test_qk_norm_rope_write(ops: NativeOps, heads: int, kv_heads: int, dim: int, norm: bool) -> None:
    for tokens in (1, 7):
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
        weights = (torch.randn(dim), torch.randn(dim)) if norm else (None, None)
        positions, frequencies = torch.randint(0, 5000, (tokens,)), torch.rand(dim // 2)
        slots = torch.randperm(16)[:tokens]
        got_caches, want_caches = torch.zeros(2, 4, 4, kv_heads, dim), torch.zeros(2, 4, 4, kv_heads, dim)
        angles = ops.plan_angles(positions, frequencies, 1.5, torch.float32)
        got = ops.qk_norm_rope_write(qkv.clone(), *weights, 1e-6, angles, *got_caches, slots, heads)
        tables = angle_tables(positions, frequencies, 1.5, torch.float32)
        want = reference.qk_norm_rope_write(qkv.clone(), *weights, 1e-6, tables, *want_caches, slots, heads)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got_caches, want_caches, rtol=1e-4, atol=1e-5)


Work = list[tuple[int, int]]  # of each row: tokens in the cache, tokens of this step


def compare_attention(ops: NativeOps, work: Work, heads: tuple[int, int, int], page: int, window: int | None,
                      softcap: float | None, sinks: torch.Tensor | None = None) -> None:  # fmt: skip
    """Rows that decode and rows that catch up in one step, over scattered pages."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    num_heads, kv_heads, dim = heads
    lens = [start + count for start, count in work]
    num_pages = sum(-(-size // page) for size in lens) + 3
    free = rng.sample(range(num_pages), num_pages)
    table = torch.zeros(len(work), max(lens) // page + 4, dtype=torch.int32)
    caches = torch.full((2, num_pages, page, kv_heads, dim), GARBAGE)
    positions = []
    for row, (start, count) in enumerate(work):
        size = start + count
        pages = torch.tensor([free.pop() for _ in range(-(-size // page))])
        table[row, : len(pages)] = pages
        slots = (pages[:, None] * page + torch.arange(page)).flatten()[:size]
        reference.write_kv(torch.randn(size, kv_heads, dim), torch.randn(size, kv_heads, dim), *caches, slots)
        positions.append(torch.arange(start, size))
    counts = [count for _, count in work]
    q = torch.randn(sum(counts), num_heads, dim)
    arguments = (table, torch.cat(positions), counts, lens, page, window, torch.float32)
    got = ops.paged_attention(q, *caches, ops.plan_attention(*arguments), 0.3, softcap, sinks)
    plan = reference_attention.plan_attention(*arguments)
    want = reference_attention.paged_attention(q, *caches, plan, 0.3, softcap, sinks)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 3, 9, 70])
@pytest.mark.parametrize("heads", [(6, 2, 8), (9, 3, 64), (5, 1, 50), (2, 2, 128)])
def test_paged_attention(ops: NativeOps, heads: tuple[int, int, int], window: int | None,
                         softcap: float | None) -> None:  # fmt: skip
    rng = random.Random(SEED)
    for page in (4, 16):
        work = [(0, 1), (0, 5), (200, 1), (63, 1), (64, 2), (rng.randint(0, 90), rng.randint(1, 70)), (7, 17)]
        compare_attention(ops, work, heads, page, window, softcap)


@pytest.mark.parametrize("window", [None, 1100])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_long_rows_are_split_over_keys(ops: NativeOps, window: int | None, has_sinks: bool) -> None:
    """Pieces of 512 keys for one or two tokens: at their ends, past them, and one token that sees a key more than
    the other, beside rows that are not split."""
    work = [(1500, 1), (1023, 2), (511, 1), (512, 1), (1024, 3), (40, 1), (1300, 2)]
    for heads in ((6, 2, 8), (3, 1, 50)):
        sinks = torch.tensor([-2.0, 0.0, 3.0, 30.0, 1.0, -90.0])[: heads[0]] if has_sinks else None
        compare_attention(ops, work, heads, 16, window, None, sinks)


@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize(("start", "count"), [(300, 3), (1020, 8), (1530, 5)])
def test_drafts_have_the_bits_of_single_tokens(ops: NativeOps, start: int, count: int, window: int | None) -> None:
    """A row's tokens in one step, where threads share pieces of the keys, and each of them in a step of its own; past
    the end of a piece, so that the first tokens see no key of the last one."""
    caches = torch.randn(2, 100, 16, 2, 64)
    table = torch.randperm(100, dtype=torch.int32)[None]
    q = torch.randn(count, 6, 64)

    def attend(first: int, num: int) -> torch.Tensor:
        stop = start + first + num
        positions = torch.arange(start + first, stop)
        plan = ops.plan_attention(table, positions, [num], [stop], 16, window, torch.float32)
        return ops.paged_attention(q[first : first + num], *caches, plan, 0.3)

    assert torch.equal(attend(0, count), torch.cat([attend(i, 1) for i in range(count)]))


@pytest.mark.parametrize("has_cap", [False, True])
def test_attention_sinks(ops: NativeOps, has_cap: bool) -> None:
    sinks = torch.tensor([-1.0, 0.0, 2.0, 60.0])
    compare_attention(ops, [(0, 1), (30, 4), (70, 20)], (4, 2, 16), 4, 9, 3.0 if has_cap else None, sinks)


def test_attention_shows_what_is_not_finite(ops: NativeOps) -> None:
    caches = torch.randn(2, 3, 4, 1, 16)
    caches[0, 1, 2] = torch.nan
    q = torch.randn(2, 1, 16)
    plan = ops.plan_attention(torch.tensor([[1], [2]], dtype=torch.int32), torch.tensor([3, 3]), [1, 1], [4, 4], 4,
                              None, torch.float32)  # fmt: skip
    out = ops.paged_attention(q, *caches, plan, 0.3)
    assert out[0].isnan().all() and out[1].isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------
# Choosing tokens


@pytest.mark.parametrize("vocab", [1, 7, 8192, 20_011])
def test_choices_are_the_samplers(ops: NativeOps, vocab: int) -> None:
    """Greedy rows take the first of the largest, others the largest of logit and noise; near-ties excepted."""
    rows = 6
    logits = torch.randn(rows, vocab) * 3
    logits[0] = logits[0].round()  # equals
    keys = torch.tensor([stream_key(seed, 0) for seed in range(rows)])
    positions = torch.randint(0, 1000, (rows,))
    scale = torch.tensor([0.0, 0.0, 1.0, 1.6, 0.5, 100.0])
    tokens, bad = ops.choose(logits, keys, positions, scale, None)
    noise = Noise(vocab, "cpu").gumbel(keys, positions)
    scores = torch.where(scale[:, None] > 0, logits * scale[:, None] + noise, logits)
    best = scores.max(1)
    assert not bad.any()
    assert tokens[:2].tolist() == best.indices[:2].tolist()
    torch.testing.assert_close(scores.gather(1, tokens[:, None])[:, 0], best.values, rtol=1e-5, atol=1e-5)


def test_choices_keep_to_the_mask(ops: NativeOps) -> None:
    vocab = 1000
    logits = torch.randn(3, vocab)
    allowed = torch.rand(3, vocab) < 0.01
    allowed[2] = False
    padded = torch.zeros(3, 1024, dtype=torch.bool)
    padded[:, :vocab] = allowed
    bits = padded.view(3, 32, 32).long() << torch.arange(32)
    mask = bits.sum(-1).to(torch.int32)
    zeros = torch.zeros(3, dtype=torch.int64)
    tokens, bad = ops.choose(logits, zeros, zeros, torch.tensor([0.0, 1.0, 0.0]), mask)
    assert tokens[0] == logits[0].masked_fill(~allowed[0], -torch.inf).argmax() and allowed[1, tokens[1]]
    assert bad.tolist() == [False, False, True]


def test_rows_that_can_not_be_chosen_from_are_bad(ops: NativeOps) -> None:
    logits = torch.randn(5, 100)
    logits[1, 99], logits[2, 3], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4, :99] = -torch.inf
    zeros = torch.zeros(5, dtype=torch.int64)
    tokens, bad = ops.choose(logits, zeros, zeros, torch.zeros(5), None)
    assert bad.tolist() == [False, True, True, True, False]
    assert tokens[1:].tolist() == [0, 0, 0, 99]
