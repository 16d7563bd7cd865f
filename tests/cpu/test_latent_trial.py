"""Which kernel a model with latents gets: the one for many heads on Hopper if it is right there, else the one for all
cards, in one line. No GPU is needed to decide that."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.kernels import trial_latent
from quire.kernels.table import REFERENCE, Ops
from quire.kernels.trial_latent import LatentTrialShape, settle_latent, try_latent
from quire.types import QuireError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
SHAPE = LatentTrialShape(128, 512, 64, 16, torch.bfloat16, torch.bfloat16)
CUDA = torch.device("cuda")


def table() -> Ops:
    """The reference, in the clothes of a table that captures."""
    return replace(
        REFERENCE, captures=True, plan_attention=lambda *args, row_index=None: REFERENCE.plan_attention(*args)
    )


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """A Hopper card with Triton 3.6; returns a way to say what a trial does there."""
    import triton

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(trial_latent, "try_latent", lambda *args: None)
    return lambda attempt: monkeypatch.setattr(trial_latent, "try_latent", attempt)


def settled(shape: LatentTrialShape = SHAPE, strict: bool = False) -> bool:
    """Whether the kernel for many heads was taken, without a word."""
    ops = table()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = settle_latent(ops, shape, CUDA, strict=strict)
    assert found is ops or found == replace(ops, latent_attention=found.latent_attention)
    return found is not ops


def test_it_is_taken_where_it_is_right(hopper: Any) -> None:
    assert settled() and settled(strict=True)
    assert settled(replace(SHAPE, num_heads=32, page_tokens=8))


@pytest.mark.parametrize("change", [{"num_heads": 31}, {"rank": 256}, {"rope_dim": 32}, {"page_tokens": 24},
                                    {"page_tokens": 4}, {"cache_dtype": torch.float8_e4m3fn},
                                    {"dtype": torch.float32, "cache_dtype": torch.float32}])  # fmt: skip
def test_other_shapes_are_left_alone(hopper: Any, change: dict[str, Any]) -> None:
    hopper(lambda *args: pytest.fail("nothing is tried"))
    assert not settled(replace(SHAPE, **change))


def test_other_cards_are_left_alone(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert not settled()
    assert settle_latent(REFERENCE, SHAPE, CUDA, strict=True) is REFERENCE


def test_a_kernel_that_fails_gives_way_in_one_line(hopper: Any) -> None:
    def attempt(*args: Any) -> None:
        raise RuntimeError("PassManager::run failed\nand a page of text")

    hopper(attempt)
    ops = table()
    with pytest.warns(UserWarning, match=r"latent kernel .*PassManager::run failed") as said:
        assert settle_latent(ops, SHAPE, CUDA, strict=False) is ops
    assert len(said) == 1 and "\n" not in str(said[0].message)
    with pytest.raises(QuireError, match="latent kernel") as refused:
        settle_latent(ops, SHAPE, CUDA, strict=True)
    assert refused.value.code == "kernel_failed"


def test_an_unknown_triton_is_not_tried(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", "3.7.1")
    hopper(lambda *args: pytest.fail("it might never come back"))
    ops = table()
    with pytest.warns(UserWarning, match=r"made for Triton 3\.6, this is 3\.7\.1"):
        assert settle_latent(ops, SHAPE, CUDA, strict=True) is ops


def test_the_trial_sees_what_is_wrong() -> None:
    shape = replace(SHAPE, num_heads=3, rank=32, rope_dim=8, dtype=torch.float32, cache_dtype=torch.float32)
    try_latent(table(), shape, torch.device("cpu"))
    off = replace(table(), latent_attention=lambda *args: REFERENCE.latent_attention(*args) * 1.1)
    with pytest.raises(ArithmeticError):
        try_latent(off, shape, torch.device("cpu"))


def test_shares_fill_the_card_and_no_more() -> None:
    from quire.kernels.triton.latent_many import MAX_SPLITS, num_splits

    assert num_splits(16, 8192, 132) == 8  # one round of 128 programs
    assert num_splits(128, 4096, 132) == num_splits(512, 1024, 132) == 1
    assert num_splits(2, 100, 132) == 1, "a row of one span is not split"
    for programs in range(1, 132):
        assert 1 <= num_splits(programs, 1 << 17, 132) <= MAX_SPLITS
