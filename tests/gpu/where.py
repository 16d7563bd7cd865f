"""Where a kernel check runs: a GPU, or the CPU under Triton's interpreter. Shared by all files of checks."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor


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
        freed, so an element that a kernel leaves unwritten is found."""
        if self.device == "cuda":
            blocks = [torch.full((2**size,), -1, dtype=torch.int8, device="cuda") for size in range(9, 24)]
            del blocks
