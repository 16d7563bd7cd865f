"""The memory plan on paper: how pages and state slots share what there is."""

from __future__ import annotations

import pytest

from quire.cache.memory import GIB, MemoryPlan, plan_memory, shrink_cache, unit_bytes
from quire.config import CacheConfig
from quire.types import CacheSpec, QuireError

# Qwen3-Next-80B: 12 layers of attention with 2 heads of 256, 36 gated delta nets with 32 matrices of 128 × 128 and a
# ring of four entries of 8,192 channels.
PAGES = CacheSpec("full", "paged", tuple(range(12)), (2, 256), "bfloat16")
STATE = CacheSpec("state", "state", tuple(range(36)), (32 * 128 * 128 + 4 * 8192,), "float32")


def plan(specs: list[CacheSpec], available: int, max_rows: int = 256, max_model_len: int = 262144,
         max_batch_tokens: int = 8192, **config: object) -> MemoryPlan:  # fmt: skip
    return plan_memory(
        specs,
        CacheConfig(**config),
        device="cuda",
        available=available,
        host_available=64 * GIB,
        weights=80 * GIB,
        activations=2 * GIB,
        max_rows=max_rows,
        max_model_len=max_model_len,
        max_batch_tokens=max_batch_tokens,
    )


def test_a_large_hybrid_on_one_card() -> None:
    assert unit_bytes(STATE) == 36 * 4 * (524288 + 32768)
    made = plan([PAGES, STATE], 56 * GIB)
    num_pages, num_slots = made.num_units
    assert made.cache <= 56 * GIB * 0.9
    assert num_slots > 256 + 64, "every row has its state, and there are snapshots beside them"
    assert num_pages * 16 > 400_000, "and tokens for about as many conversations"
    conversations = (num_slots - 1) / 3
    assert num_pages * 16 / 4096 == pytest.approx(conversations, rel=0.1)


def test_fewer_slots_than_rows_are_said() -> None:
    made = plan([PAGES, STATE], 12 * GIB, max_model_len=32768)
    assert made.num_units[1] - 1 < 256
    assert any("state slots" in note for note in made.notes)


def test_a_model_of_states_alone_gets_slots_for_all_of_it() -> None:
    made = plan([STATE], 20 * GIB, max_model_len=32768)
    assert made.cache > 0.85 * (20 - 2.1) * GIB * 0.9
    assert made.capacity_tokens == 32768


def test_tiny_states_do_not_take_all_there_is() -> None:
    tiny = CacheSpec("state", "state", (0,), (100,), "float32")
    assert plan([tiny], 20 * GIB, max_rows=4, max_model_len=1024).num_units == (1 + 4 * 64,)


def test_exact_numbers_are_taken() -> None:
    assert plan([PAGES, STATE], 56 * GIB, num_pages=1000, num_slots=50).num_units == (1000, 50)
    made = plan([PAGES, STATE], 56 * GIB, num_slots=50)
    assert made.num_units[1] == 50 and made.cache > 0.85 * 56 * GIB * 0.85


def test_no_room_for_a_state_is_an_error_that_says_so() -> None:
    with pytest.raises(QuireError, match=r"recurrent state takes 76.5 MiB") as caught:
        plan([STATE], 2 * GIB + 200 * 2**20, max_rows=1, max_model_len=1024)
    assert caught.value.code == "out_of_memory"
    with pytest.raises(QuireError, match="no room"):
        plan([PAGES, STATE], 2 * GIB + 200 * 2**20, max_rows=1, max_model_len=1024)


# Gemma 3 4B: five layers that see everything, 29 that see 1,024 tokens; 4 heads of 256.
SEES_ALL = CacheSpec("full", "paged", tuple(range(5)), (4, 256), "bfloat16", page_tokens=64)
WINDOW = CacheSpec("window", "paged", tuple(range(29)), (4, 256), "bfloat16", page_tokens=64, window=1024)
LEAST = 1024 // 64 + 3


def test_a_window_has_fewer_pages_than_what_sees_everything() -> None:
    """Two windows of a conversation of 4,096 tokens: 38 of 64 pages, so memory holds half as many tokens again."""
    made = plan([SEES_ALL, WINDOW], 120 * GIB, max_model_len=131072)
    full, window = made.num_units
    assert window == -(-full * 2 * LEAST // 64)
    alike = made.cache / (unit_bytes(SEES_ALL) + unit_bytes(WINDOW))
    assert full / alike == pytest.approx(34 / (5 + 29 * 38 / 64), rel=0.01) and full / alike > 1.5
    budget = (120 * GIB - made.activations - made.rows) * 0.9
    assert made.cache <= budget < made.cache + unit_bytes(SEES_ALL) + unit_bytes(WINDOW)
    assert made.num_host_units is not None and made.num_host_units[1] < made.num_host_units[0]
    smaller = shrink_cache(made, made, 0.5)
    assert smaller.capacity_tokens == min(made.capacity_tokens, (smaller.num_units[0] - 1) * 64)


def test_a_windows_pool_is_no_smaller_than_all_rows_need() -> None:
    """And no step is cut short by it. Where memory is scarce, it is as large as the others."""
    made = plan([SEES_ALL, WINDOW], 52 * GIB, max_batch_tokens=8192)
    assert made.num_units[1] == 256 * LEAST + 3 * 8192 // 64 < made.num_units[0]
    scarce = plan([SEES_ALL, WINDOW], 20 * GIB)
    assert scarce.num_units[0] == scarce.num_units[1]
    assert plan([SEES_ALL, WINDOW], 120 * GIB, num_pages=100).num_units == (100, 100)


def test_windows_alone_have_all_there_is() -> None:
    made = plan([WINDOW], 80 * GIB)
    assert made.cache > 0.99 * 0.9 * 77 * GIB and made.capacity_tokens == 262144
