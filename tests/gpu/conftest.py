"""Tests that run side by side share one card: each gives back what torch kept for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    yield
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
