"""The reference ops against formulas written out the slow and obvious way."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from quire.kernels.activations import CURVES, Curve
from quire.kernels.angles import angle_tables
from quire.kernels.reference import small_ops as reference
from quire.kernels.reference.attention import paged_attention, plan_attention
from quire.kernels.table import REFERENCE, select_ops

PAGE = 4


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


def test_rms_norm() -> None:
    x, weight = torch.randn(5, 16), torch.randn(16)
    want = x / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), want.float())


def test_gate_mul() -> None:
    gate, up = torch.randn(4, 6), torch.randn(4, 6)
    cubic = 0.7978845608 * (gate + 0.044715 * gate**3)
    curves: dict[Curve, torch.Tensor] = {
        "silu": gate / (1 + (-gate).exp()),
        "gelu": gate * (1 + torch.erf(gate / 2**0.5)) / 2,
        "gelu_tanh": gate * (1 + torch.tanh(cubic)) / 2,
        "relu": gate.clamp(min=0),
        "relu2": gate.clamp(min=0) ** 2,
    }
    assert set(curves) == set(CURVES)
    for curve, want in curves.items():
        torch.testing.assert_close(reference.gate_mul(torch.cat((gate, up), dim=1), curve), want * up)


def test_rope_turns_each_pair_by_its_angle() -> None:
    x, angles = torch.randn(3, 2, 8), torch.randn(3, 1, 4)
    both = torch.cat((-angles, angles), dim=-1)
    got = reference.rope(x, both.cos(), both.sin())
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(got, torch.cat((pairs.real, pairs.imag), dim=-1))


def test_write_kv_touches_only_its_slots() -> None:
    k_cache, v_cache = torch.zeros(3, PAGE, 2, 8), torch.zeros(3, PAGE, 2, 8)
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    slots = torch.tensor([5, 0, 11])
    reference.write_kv(k, v, k_cache, v_cache, slots)
    for cache, new in ((k_cache, k), (v_cache, v)):
        flat = cache.view(-1, 2, 8)
        torch.testing.assert_close(flat[slots], new)
        assert flat.abs().sum() == pytest.approx(new.abs().sum().item())


@pytest.mark.parametrize("norm", [False, True])
def test_qk_norm_rope_write(norm: bool) -> None:
    heads, kv_heads, dim, tokens = 4, 2, 8, 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    q_weight, k_weight = (torch.randn(dim), torch.randn(dim)) if norm else (None, None)
    positions, frequencies = torch.tensor([0, 3, 4, 9, 17]), torch.rand(dim // 2)
    angles = angle_tables(positions, frequencies, 1.5, torch.float32)
    caches = torch.zeros(2, 4, PAGE, kv_heads, dim)
    slots = torch.tensor([1, 7, 2, 15, 8])
    got = reference.qk_norm_rope_write(qkv.clone(), q_weight, k_weight, 1e-6, angles, *caches, slots, heads)
    q, k, v = (part.view(tokens, -1, dim) for part in qkv.split((heads * dim, kv_heads * dim, kv_heads * dim), dim=1))
    if q_weight is not None and k_weight is not None:
        q, k = reference.rms_norm(q, q_weight, 1e-6), reference.rms_norm(k, k_weight, 1e-6)

    def turn(x: Tensor) -> Tensor:
        turned = torch.polar(torch.tensor(1.5), positions[:, None] * frequencies)[:, None]
        pairs = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * turned
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    torch.testing.assert_close(got, turn(q))
    torch.testing.assert_close(caches[0].view(-1, kv_heads, dim)[slots], turn(k))
    torch.testing.assert_close(caches[1].view(-1, kv_heads, dim)[slots], v)


def attend_slowly(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, window: int | None,
                  softcap: float | None) -> Tensor:  # fmt: skip
    """One row: q [count, heads, dim], k and v [len, kv_heads, dim]; token by token, head by head, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for index in range(q.shape[0]):
        stop = start + index + 1
        first = 0 if window is None else max(0, stop - window)
        for head in range(q.shape[1]):
            scores = k[first:stop, head // group].double() @ q[index, head].double() * scale
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            out[index, head] = scores.softmax(0) @ v[first:stop, head // group].double()
    return out.flatten(1).float()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 3, 9, 100])
@pytest.mark.parametrize("work", [
    [(0, 1)], [(0, 5)], [(6, 5)], [(12, 1), (3, 1), (29, 1)], [(12, 1), (0, 8), (7, 3), (29, 1), (0, 1)],
    [(900, 1), (3, 1), (5, 1), (4, 1), (800, 1)], [(900, 1), (3, 7), (5, 1), (4, 1)],
], ids=str)  # fmt: skip
def test_paged_attention(work: list[tuple[int, int]], window: int | None, softcap: float | None) -> None:
    """Rows are (start, count); page ids are scattered, bounds too high, and free slots full of large numbers."""
    rng = random.Random(1)
    heads, kv_heads, dim = 6, 2, 8
    lens = [start + count for start, count in work]
    num_pages = sum(-(-size // PAGE) for size in lens) + 3
    free = rng.sample(range(num_pages), num_pages)
    table = torch.zeros(len(work), max(lens) // PAGE + 4, dtype=torch.int32)
    k_cache, v_cache = (torch.full((num_pages, PAGE, kv_heads, dim), 1e4) for _ in range(2))
    q = torch.randn(sum(count for _, count in work), heads, dim)
    positions, want, bounds, first = [], [], [], 0
    for row, (start, count) in enumerate(work):
        size = start + count
        k, v = torch.randn(size, kv_heads, dim), torch.randn(size, kv_heads, dim)
        pages = torch.tensor([free.pop() for _ in range(-(-size // PAGE))])
        table[row, : len(pages)] = pages
        slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:size]
        reference.write_kv(k, v, k_cache, v_cache, slots)
        positions.append(torch.arange(start, size))
        bounds.append(size + (rng.randint(0, 6) if start else 0))
        want.append(attend_slowly(q[first : first + count], k, v, start, 0.3, window, softcap))
        first += count
    plan = plan_attention(
        table, torch.cat(positions), [count for _, count in work], bounds, PAGE, window, torch.float32
    )
    got = paged_attention(q, k_cache, v_cache, plan, 0.3, softcap)
    assert got.shape == (len(q), heads * dim)
    torch.testing.assert_close(got, torch.cat(want), rtol=1e-4, atol=1e-5)


def test_one_long_row_does_not_pad_the_others() -> None:
    table = torch.zeros(9, 500, dtype=torch.int32)
    lens = [1900] + [10] * 8
    plan = plan_attention(table, torch.tensor(lens) - 1, [1] * 9, lens, PAGE, None, torch.float32)
    assert [rows.num_rows for rows in plan.decodes] == [1, 8]
    assert plan.decodes[1].mask.shape[-1] < 16


def test_a_window_bounds_the_pages_read() -> None:
    table = torch.zeros(1, 500, dtype=torch.int32)
    plan = plan_attention(table, torch.tensor([1899]), [1], [1900], PAGE, 9, torch.float32)
    assert math.prod(plan.decodes[0].pages.shape) <= 4


def test_every_device_gets_ops() -> None:
    assert select_ops("cpu", "torch") is REFERENCE
    try:
        import triton  # noqa: F401
    except ImportError:
        with pytest.warns(UserWarning, match="Triton can't be used"):
            assert select_ops("cuda") is REFERENCE
