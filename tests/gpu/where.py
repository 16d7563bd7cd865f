"""Where a kernel check runs, a GPU or the CPU under Triton's interpreter, and how near to its reference a kernel must
come. Shared by all files of checks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float8_e4m3fn: 6e-2}


@dataclass(frozen=True)
class Where:
    """On which device, how big, and with which random numbers."""

    device: str
    large: bool
    dtypes: tuple[torch.dtype, ...]
    seed: int

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)

    @property
    def random(self) -> random.Random:
        return random.Random(self.seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def settle(self) -> None:
        """Wait for the device. Kernels may read weights before the kernel launched just before them has ended: weights
        are not supposed to be new, as they are in these tests."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def poison(self) -> None:
        """Fill the memory that the next outputs will be made in with NaN: the allocator hands out again what was just
        freed, so an element that a kernel leaves unwritten is found, also where `poisoned` is not around."""
        if self.device == "cuda":
            blocks = [torch.full((2**size,), -1, dtype=torch.int8, device="cuda") for size in range(9, 24)]
            del blocks


@contextmanager
def poisoned() -> Iterator[None]:
    """Meanwhile whatever torch makes without filling it is full of NaN, of True, or of the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # one of the things that this does
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class NotHere(Exception):
    """A check of what can't run in this place: it is skipped and not passed."""


def need_hopper(where: Where) -> None:
    """For kernels in Gluon, which the interpreter does not run either."""
    if where.device != "cuda" or torch.cuda.get_device_capability()[0] != 9:
        raise NotHere("needs a Hopper GPU")


def close(out: Tensor, expected: Tensor, dtype: torch.dtype, what: str, bound: float | None = None) -> None:
    out, expected = out.double(), expected.double()
    assert out.shape == expected.shape, f"{what}: shape {tuple(out.shape)}, not {tuple(expected.shape)}"
    error = ((out - expected).norm() / expected.norm().clamp(min=1e-30)).item()
    assert error <= (bound or BOUNDS[dtype]), f"{what}: relative error {error:.2e} in {dtype}"
