"""Unpacks and dequantizes the weight formats of published safetensors checkpoints in plain torch.

Formats: integers of a few bits with a scale and a zero point per group of columns, FP8, FP4, and tables of sixteen
values. `models.packed` reads the files; `gguf_blocks` has GGUF's own blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.formats.gguf_blocks import FP4

BLOCK = 32  # columns of a GGUF block
# GGUF types that hold the same integers if groups of columns are whole blocks: 4 bits with zero point 8, up to 4 bits
# with any zero point, 8 bits with zero point 128.
GROUPED = {"INT4": "Q4_0", "UINT4": "Q4_1", "INT8": "Q8_0"}


def unpack_bits(words: Tensor, bits: int) -> Tensor:
    """Unpacks consecutive integers of `bits` bits, lowest bits first, also across words: [..., n] int32 -> [..., 32 n /
    bits] uint8."""
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
    """Rows of a group-quantized matrix: a value is (number - zero) * scale, with its group's zero and scale."""

    numbers: Tensor  # [rows, columns] uint8
    scales: Tensor  # [rows, groups], any float dtype
    zeros: Tensor | int  # [rows, groups] uint8; or one zero point for all
    group: int | Tensor  # columns per group; or, for reordered columns (g_idx), each column's group: [columns] int64

    def floats(self) -> Tensor:
        """Returns the dequantized matrix, [rows, columns] float32."""
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
        """Returns the rows as GGUF blocks of a type in `GROUPED`, [bytes] uint8.

        Scales are rounded to float16, which most already are; so is the product of zero and scale in Q4_1."""
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
    """Dequantizes FP4, two values per byte with the low nibble first, [rows, columns / 2] uint8, with scales of equal
    groups of columns, [rows, groups] float32. Returns [rows, columns] float32."""
    halves = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    values = torch.tensor(FP4, device=data.device)[halves.int()]
    return values.unflatten(1, (scales.shape[1], -1)).mul_(scales.unsqueeze(-1)).flatten(1)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantizes MXFP4 of safetensors: `blocks` [..., n, 16] uint8, two values per byte with the low nibble first, and
    each block's exponent `scales` [..., n] uint8, biased by 127. Returns [..., 32 * n] float32."""
    values = dequantize_fp4(blocks.flatten(0, -2), power_of_two(scales).view(-1, 1))
    return values.view(*scales.shape[:-1], -1)


def power_of_two(exponents: Tensor) -> Tensor:
    """Converts exponents biased by 127 (E8M0 scales) to powers of two: uint8 -> float32."""
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - 127)


def mxfp4_as_blocks(data: Tensor, scales: Tensor) -> Tensor:
    """Converts MXFP4 of safetensors, [rows, columns / 2] and [rows, columns / 32] uint8, to GGUF blocks, [bytes] uint8,
    in which a block's second half lies in the high nibbles."""
    pairs = data.view(len(data), -1, 2, BLOCK // 4)  # [rows, blocks, 2, 8]: pairs of neighbours in each half of a block
    low, high = torch.stack((pairs & 15, pairs >> 4), -1).flatten(3).unbind(2)
    return torch.cat((scales.view(torch.uint8).unsqueeze(-1), low | high << 4), 2).view(-1)


def dequantize_table(data: Tensor, table: Tensor, scales: Tensor) -> Tensor:
    """Dequantizes indices into a table of sixteen values, two per byte with the high nibble first, [bytes] uint8, with
    a scale per equal run of elements, [runs] float32. Returns [elements] float32."""
    places = torch.stack((data >> 4, data & 15), -1).flatten()
    values = table.float()[places.int()]
    return values.view(len(scales), -1).mul_(scales.unsqueeze(-1)).view(-1)


def dequantize_fp8(rows: Tensor, scales: Tensor, first: int, *, block: tuple[int, int]) -> Tensor:
    """Dequantizes FP8 `rows` [n, columns] with one scale per `block` of rows and columns, which may be cut off at the
    matrix's edges. `first` is the index of the first row within its block. Returns [n, columns] float32."""
    num_rows, num_columns = rows.shape
    of_row = (torch.arange(num_rows, device=rows.device) + first) // block[0]
    of_column = torch.arange(num_columns, device=rows.device) // block[1]
    return rows.float().mul_(scales.float()[:, of_column][of_row])
