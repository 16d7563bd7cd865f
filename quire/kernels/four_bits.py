"""Weights that stay in four bits on a device: integers of 0 to 15 with a scale, and with a least value or none, for
groups of columns. A loader makes them from GGUF blocks, which published 4-bit checkpoints fit into.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32  # columns of a GGUF block
GROUPS = (128, 64)  # columns that may share a scale, if their blocks' scales are the same
ZERO = 8  # the integer that stands for 0 where there is no least value
FORMATS = {"Q4_0": 18, "Q4_1": 20}  # GGUF type -> bytes of a block


@dataclass(frozen=True, slots=True)
class FourBits:
    """A matrix. The value of an integer n is (n - 8) * scale, or n * scale + least."""

    numbers: Tensor  # [rows, columns / 2] uint8: a column in the low bits, the next one in the high bits
    scales: Tensor  # [rows, groups] float16
    least: Tensor | None  # [rows, groups] float16; None: symmetric

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape[0], 2 * self.numbers.shape[1]

    @property
    def group(self) -> int:
        return self.shape[1] // self.scales.shape[1]

    def decode(self) -> Tensor:
        """Returns the matrix, [rows, columns] float32."""
        numbers = torch.stack((self.numbers & 15, self.numbers >> 4), -1).flatten(1).float()
        by_group = numbers.unflatten(1, (self.scales.shape[1], -1))
        scales = self.scales.float().unsqueeze(-1)
        if self.least is None:
            return ((by_group - ZERO) * scales).flatten(1)
        return (by_group * scales + self.least.float().unsqueeze(-1)).flatten(1)


def read_blocks(kind: str, blocks: Tensor, rows: int) -> FourBits:
    """Takes blocks of Q4_0 or Q4_1, [bytes] uint8, apart."""
    fields = blocks.view(rows, -1, FORMATS[kind])
    halves = 1 if kind == "Q4_0" else 2
    scales = fields[..., : 2 * halves].contiguous().view(torch.float16)  # [rows, blocks, halves]
    packed = fields[..., 2 * halves :]
    columns = torch.cat((packed & 15, packed >> 4), -1).flatten(1)  # low bits hold a block's first half
    numbers = columns[:, ::2] | columns[:, 1::2] << 4
    return FourBits(
        numbers.contiguous(), scales[..., 0].contiguous(), scales[..., 1].contiguous() if halves > 1 else None
    )


def join_rows(parts: list[FourBits]) -> FourBits:
    """Returns matrices below each other as one, with one scale for as many columns as share it everywhere."""
    with_least = any(part.least is not None for part in parts)

    def least(part: FourBits) -> Tensor:
        return -ZERO * part.scales if part.least is None else part.least

    scales = torch.cat([part.scales for part in parts])
    values = torch.cat([least(part) for part in parts]) if with_least else None
    for group in GROUPS:
        step = group // BLOCK
        if all(t is None or _is_repeated(t, step) for t in (scales, values)):
            scales, values = scales[:, ::step].contiguous(), None if values is None else values[:, ::step].contiguous()
            break
    return FourBits(torch.cat([part.numbers for part in parts]), scales, values)


def _is_repeated(numbers: Tensor, step: int) -> bool:
    if numbers.shape[1] % step:
        return False
    runs = numbers.unflatten(1, (-1, step))
    return bool((runs == runs[..., :1]).all())


def four_bit_linear(x: Tensor, weight: FourBits, bias: Tensor | None) -> Tensor:
    """Returns x [rows, columns] times the matrix, plus `bias`, in the dtype of x."""
    return torch.nn.functional.linear(x, weight.decode().to(x.dtype), bias)
