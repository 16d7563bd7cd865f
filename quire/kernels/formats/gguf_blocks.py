"""Dequantizes GGUF's block formats to float32 in plain torch. The loader calls `dequantize` tensor by tensor.

A block is a fixed number of bytes that holds a fixed number of consecutive elements as small integers with their
scales. Decoders take blocks as [blocks, bytes] and return [blocks, elements].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.formats import gguf_grids


@dataclass(frozen=True, slots=True)
class BlockFormat:
    elements: int
    num_bytes: int
    decode: Callable[[Tensor], Tensor]  # [blocks, num_bytes] uint8 -> [blocks, elements] float32


def dequantize(data: Tensor, type_name: str) -> Tensor:
    """Decodes whole blocks, [bytes] uint8, to [elements] float32. `FORMATS` lists the supported types."""
    form = FORMATS[type_name]
    return form.decode(data.view(-1, form.num_bytes)).view(-1)


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


# Values of IQ4's sixteen codes, finer around 0.
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


# ---------------------------------------------------------------------------------------------------------------------
# Shared pieces


def _cut(blocks: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Splits the bytes of every block into fields of these sizes."""
    return blocks.split(sizes, dim=1)


def _half(field: Tensor) -> Tensor:
    """Reads float16 values of two bytes each and returns them in float32."""
    return field.contiguous().view(torch.float16).float()


def _shifted(field: Tensor, shifts: list[int], mask: int) -> Tensor:
    """Shifts every byte by each of `shifts` and masks it: [blocks, shifts, bytes] uint8."""
    amounts = torch.tensor(shifts, dtype=torch.uint8, device=field.device).view(1, -1, 1)
    return (field.unsqueeze(1) >> amounts).bitwise_and_(mask)


def _nibbles(field: Tensor) -> Tensor:
    """Returns all low nibbles of the bytes, then all high nibbles: [blocks, 2 * bytes]."""
    return _shifted(field, [0, 4], 0x0F).flatten(1)


def _bits(field: Tensor) -> Tensor:
    """Returns the bits of a little-endian number, lowest first: [blocks, 8 * bytes]."""
    return _shifted(field, list(range(8)), 1).transpose(1, 2).flatten(1)


# ---------------------------------------------------------------------------------------------------------------------
# Plain floats


def _f32(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float32)


def _f16(blocks: Tensor) -> Tensor:
    return _half(blocks)


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


# ---------------------------------------------------------------------------------------------------------------------
# Blocks of 32: one scale, with or without an offset


def _q8_0(blocks: Tensor) -> Tensor:
    scale, values = _cut(blocks, 2, 32)
    return values.view(torch.int8).float().mul_(_half(scale))


def _q4_0(blocks: Tensor) -> Tensor:
    scale, values = _cut(blocks, 2, 16)
    return _nibbles(values).float().sub_(8).mul_(_half(scale))


def _q4_1(blocks: Tensor) -> Tensor:
    scale, offset, values = _cut(blocks, 2, 2, 16)
    return _nibbles(values).float().mul_(_half(scale)).add_(_half(offset))


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """Joins each nibble with a fifth bit from `high`, four bytes per block."""
    return _nibbles(low).bitwise_or_(_bits(high) << 4).float()


def _q5_0(blocks: Tensor) -> Tensor:
    scale, high, low = _cut(blocks, 2, 4, 16)
    return _five_bits(high, low).sub_(16).mul_(_half(scale))


def _q5_1(blocks: Tensor) -> Tensor:
    scale, offset, high, low = _cut(blocks, 2, 2, 4, 16)
    return _five_bits(high, low).mul_(_half(scale)).add_(_half(offset))


def _mxfp4(blocks: Tensor) -> Tensor:
    """Decodes MXFP4, whose second half of a block lies in the high nibbles, unlike in safetensors."""
    scale, values = _cut(blocks, 1, 16)
    numbers = torch.tensor(FP4, device=blocks.device)[_nibbles(values).int()]
    return torch.ldexp(numbers, scale.int() - 127)


def _iq4_nl(blocks: Tensor) -> Tensor:
    scale, places = _cut(blocks, 2, 16)
    return _uneven(places).mul_(_half(scale))


def _uneven(places: Tensor) -> Tensor:
    """Looks up IQ4 codes: [blocks, 16] uint8 -> [blocks, 32] float32."""
    return torch.tensor(UNEVEN, dtype=torch.float32, device=places.device)[_nibbles(places).int()]


# ---------------------------------------------------------------------------------------------------------------------
# Ternary blocks of 256: values -1, 0 and 1


def _tq1_0(blocks: Tensor) -> Tensor:
    """Decodes TQ1_0: five values per byte as digits of a base-3 fraction, most significant first; four per byte at the
    end."""
    many, few, last, scale = _cut(blocks, 32, 16, 4, 2)
    digits = [_ternary(many, 5), _ternary(few, 5), _ternary(last, 4)]
    return torch.cat(digits, 1).mul_(_half(scale))


def _ternary(field: Tensor, count: int) -> Tensor:
    """Extracts `count` base-3 digits of all bytes, digit by digit: [blocks, count * bytes] float32."""
    powers = torch.tensor([3**digit for digit in range(count)], dtype=torch.uint8, device=field.device).view(1, -1, 1)
    digits = (field.unsqueeze(1) * powers).int().mul_(3) >> 8  # uint8 overflow drops the digits before
    return digits.flatten(1).float().sub_(1)


def _tq2_0(blocks: Tensor) -> Tensor:
    values, scale = _cut(blocks, 64, 2)
    return _two_bits(values).float().sub_(1).mul_(_half(scale))


# ---------------------------------------------------------------------------------------------------------------------
# K blocks of 256: sub-blocks of 16 or 32 with small integer scales of their own


def _scaled(values: Tensor, scales: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Multiplies values [blocks, 256] by scales [blocks, sub-blocks] and subtracts offsets of the same shape."""
    by_sub = values.float().view(*scales.shape, -1)
    by_sub.mul_(scales.unsqueeze(-1))
    if offsets is not None:
        by_sub.sub_(offsets.unsqueeze(-1))
    return by_sub.flatten(1)


def _two_bits(field: Tensor) -> Tensor:
    """Unpacks 64 bytes of four values each to [blocks, 256]: 32 bytes hold 128 elements, lowest bits first."""
    return _shifted(field.reshape(-1, 32), [0, 2, 4, 6], 3).view(-1, 256)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, values, scale, offset = _cut(blocks, 16, 64, 2, 2)
    return _scaled(_two_bits(values), (scales & 0x0F) * _half(scale), (scales >> 4) * _half(offset))


def _q3_k(blocks: Tensor) -> Tensor:
    high, low, packed, scale = _cut(blocks, 32, 64, 12, 2)
    # Sixteen 6-bit scales: the low four bits are nibbles of eight bytes, the high two are pairs of the last four.
    scales = _nibbles(packed[:, :8]) | (_shifted(packed[:, 8:], [0, 2, 4, 6], 3).flatten(1) << 4)
    has_bit = _shifted(high, list(range(8)), 1).flatten(1)  # bit i of byte j belongs to element 32 * i + j
    values = _two_bits(low).to(torch.int8) - 4 + 4 * has_bit.to(torch.int8)
    return _scaled(values, (scales.to(torch.int8) - 32) * _half(scale))


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpacks the eight 6-bit scales and eight 6-bit offsets of Q4_K and Q5_K from twelve bytes."""
    first, second, third = packed.split(4, dim=1)
    scales = torch.cat((first & 63, (third & 0x0F) | ((first >> 6) << 4)), dim=1)
    offsets = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales, offsets


def _wide_nibbles(field: Tensor) -> Tensor:
    """Unpacks 128 bytes to [blocks, 256]: each 32 bytes hold 64 elements, low nibbles first."""
    return _nibbles(field.reshape(-1, 32)).view(-1, 256)


def _q4_k(blocks: Tensor) -> Tensor:
    scale, offset, packed, values = _cut(blocks, 2, 2, 12, 128)
    scales, offsets = _k_scales(packed)
    return _scaled(_wide_nibbles(values), scales * _half(scale), offsets * _half(offset))


def _q5_k(blocks: Tensor) -> Tensor:
    scale, offset, packed, high, low = _cut(blocks, 2, 2, 12, 32, 128)
    scales, offsets = _k_scales(packed)
    fifth = _shifted(high, list(range(8)), 1).flatten(1)  # bit i of byte j belongs to element 32 * i + j
    values = _wide_nibbles(low).bitwise_or_(fifth << 4)
    return _scaled(values, scales * _half(scale), offsets * _half(offset))


def _q6_k(blocks: Tensor) -> Tensor:
    low, high, scales, scale = _cut(blocks, 128, 64, 16, 2)
    values = _nibbles(low.reshape(-1, 64)).view(-1, 256) | (_two_bits(high) << 4)
    return _scaled(values.to(torch.int8) - 32, scales.view(torch.int8) * _half(scale))


def _iq4_xs(blocks: Tensor) -> Tensor:
    """Decodes IQ4_XS: eight sub-blocks of 32 codes, each with a 6-bit scale whose high two bits lie in `high`."""
    scale, high, low, places = _cut(blocks, 2, 2, 4, 128)
    pairs = high.contiguous().view(torch.int16).int()  # [blocks, 1]
    upper = (pairs >> torch.arange(0, 16, 2, dtype=torch.int32, device=blocks.device)).bitwise_and_(3)
    lower = torch.stack((low & 15, low >> 4), 2).flatten(1)
    scales = (lower.int() | upper << 4).sub_(32)
    return _scaled(_uneven(places.reshape(-1, 16)).view(-1, 256), scales * _half(scale))


FORMATS: dict[str, BlockFormat] = {
    "F32": BlockFormat(1, 4, _f32),
    "F16": BlockFormat(1, 2, _f16),
    "BF16": BlockFormat(1, 2, _bf16),
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "MXFP4": BlockFormat(32, 17, _mxfp4),
    "Q2_K": BlockFormat(256, 84, _q2_k),
    "Q3_K": BlockFormat(256, 110, _q3_k),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q5_K": BlockFormat(256, 176, _q5_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
    "IQ4_NL": BlockFormat(32, 18, _iq4_nl),
    "IQ4_XS": BlockFormat(256, 136, _iq4_xs),
    "TQ1_0": BlockFormat(256, 54, _tq1_0),
    "TQ2_0": BlockFormat(256, 66, _tq2_0),
    **{
        name: BlockFormat(gguf_grids.ELEMENTS, size, gguf_grids.grid_decoder(name))
        for name, size in gguf_grids.SIZES.items()
    },
}
