"""Numbers out of the ways in which published checkpoints pack them, with plain torch: whole numbers of a few bits with
a scale and a zero for each group of columns, floats of eight and four bits, tables of sixteen values. `models.packed`
knows the files they come from; GGUF's own blocks are `dequant`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.formats.gguf_blocks import FP4

BLOCK = 32  # columns of a GGUF block
# GGUF's types that hold the same whole numbers, where groups of columns are whole blocks: four bits around 8, up to
# four with zeros, eight around 128.
GROUPED = {"INT4": "Q4_0", "UINT4": "Q4_1", "INT8": "Q8_0"}


def unpack_bits(words: Tensor, bits: int) -> Tensor:
    """Whole numbers of so many bits behind each other, lowest bits first, across words: [..., n] int32 -> [..., 32 n /
    bits] uint8"""
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
        return (data.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1).flatten(-2)
    single = (data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=data.device)).bitwise_and_(1).flatten(-2)
    whole = single.shape[-1] // bits * bits
    weights = torch.tensor([1 << bit for bit in range(bits)], dtype=torch.uint8, device=data.device)
    return single[..., :whole].unflatten(-1, (-1, bits)).mul(weights).sum(-1, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Grouped:
    """Rows of a matrix in whole numbers: each stands for (number - zero) * scale, those of its group of columns."""

    numbers: Tensor  # [rows, columns] uint8
    scales: Tensor  # [rows, groups], of any type of float
    zeros: Tensor | int  # [rows, groups] uint8; or one for all
    group: int | Tensor  # columns of a group; or, where they lie about, [columns] int64: which group each is of

    def floats(self) -> Tensor:
        """[rows, columns] float32"""
        numbers, scales = self.numbers.float(), self.scales.float()
        if isinstance(self.group, int) and numbers.shape[1] == scales.shape[1] * self.group:
            by_group = numbers.unflatten(1, (-1, self.group))
            zeros = self.zeros if isinstance(self.zeros, int) else self.zeros.unsqueeze(-1)
            return by_group.sub_(zeros).mul_(scales.unsqueeze(-1)).flatten(1)
        of_column = self.group
        if isinstance(of_column, int):  # the last group is shorter
            of_column = torch.arange(numbers.shape[1], device=numbers.device) // of_column
        zeros = self.zeros if isinstance(self.zeros, int) else self.zeros[:, of_column]
        return numbers.sub_(zeros).mul_(scales[:, of_column])

    def blocks(self, form: str) -> Tensor:
        """GGUF's blocks, of a type of `GROUPED`, [bytes] uint8. Scales are rounded to float16, which most are already,
        and so is a Q4_1's zero times its scale."""
        assert isinstance(self.group, int)
        rows, columns = self.numbers.shape
        times = self.group // BLOCK
        scales = self.scales.float().repeat_interleave(times, 1).unsqueeze(-1)  # [rows, blocks, 1]
        fields = [_bytes_of(scales)]
        if form == "Q4_1":
            zeros = self.zeros if isinstance(self.zeros, int) else self.zeros.repeat_interleave(times, 1).unsqueeze(-1)
            fields.append(_bytes_of(-scales * zeros))
        if form == "Q8_0":
            fields.append((self.numbers ^ 128).view(rows, columns // BLOCK, BLOCK))
        else:
            low, high = self.numbers.view(rows, columns // BLOCK, 2, BLOCK // 2).unbind(2)
            fields.append(low | high << 4)
        return torch.cat(fields, 2).view(-1)


def _bytes_of(numbers: Tensor) -> Tensor:
    return numbers.half().view(torch.uint8)


def dequantize_fp4(data: Tensor, scales: Tensor) -> Tensor:
    """Four-bit floats, two to a byte, the low half first, [rows, columns / 2] uint8, with scales for equal groups of
    columns, [rows, groups] float32. Returns [rows, columns] float32."""
    halves = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    values = torch.tensor(FP4, device=data.device)[halves.int()]
    return values.unflatten(1, (scales.shape[1], -1)).mul_(scales.unsqueeze(-1)).flatten(1)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """MXFP4 as safetensors keep it: `blocks` [..., n, 16] uint8, two numbers to a byte, the low half first, and the
    powers of two of each block, `scales` [..., n] uint8, off by 127. Returns [..., 32 * n] float32."""
    values = dequantize_fp4(blocks.flatten(0, -2), power_of_two(scales).view(-1, 1))
    return values.view(*scales.shape[:-1], -1)


def power_of_two(exponents: Tensor) -> Tensor:
    """Scales that are nothing but an exponent, off by 127: uint8 -> float32"""
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - 127)


def mxfp4_as_blocks(data: Tensor, scales: Tensor) -> Tensor:
    """MXFP4 as safetensors keep it, [rows, columns / 2] and [rows, columns / 32] uint8, as GGUF does, [bytes] uint8: a
    block's second half lies in the high halves of its bytes."""
    pairs = data.view(len(data), -1, 2, BLOCK // 4)  # [rows, blocks, 2, 8]: of each half, pairs of neighbours
    low, high = torch.stack((pairs & 15, pairs >> 4), -1).flatten(3).unbind(2)
    return torch.cat((scales.view(torch.uint8).unsqueeze(-1), low | high << 4), 2).view(-1)


def dequantize_table(data: Tensor, table: Tensor, scales: Tensor) -> Tensor:
    """Places in a table of sixteen, two to a byte, the high half first, [bytes] uint8, with a scale for each equal run
    of them, [runs] float32. Returns [elements] float32."""
    places = torch.stack((data >> 4, data & 15), -1).flatten()
    values = table.float()[places.int()]
    return values.view(len(scales), -1).mul_(scales.unsqueeze(-1)).view(-1)


def dequantize_fp8(rows: Tensor, scales: Tensor, first: int, *, block: tuple[int, int]) -> Tensor:
    """FP8 as safetensors keep it: `rows` [n, columns] of a matrix, and a scale for each `block` of rows and columns,
    cut off at the matrix's edges. The first of these rows is the `first` of its block. Returns [n, columns] float32."""
    num_rows, num_columns = rows.shape
    of_row = (torch.arange(num_rows, device=rows.device) + first) // block[0]
    of_column = torch.arange(num_columns, device=rows.device) // block[1]
    return rows.float().mul_(scales.float()[:, of_column][of_row])
