"""Quantizes floats to GGUF's block formats in plain torch. `quire quantize` calls `quantize`.

Every encoder minimizes the error of the decoded values, weighted by the importance of each column: it tries several
scales for each sub-block, solves for the best scale of the integers that each of them gives, and then, once the scales
themselves are rounded, rounds the values again with what is stored. `gguf_blocks` decodes what is written here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.formats.gguf_blocks import FORMATS, UNEVEN

CHUNK_ELEMENTS = 1 << 20  # elements encoded at a time: the trials of an encoder take some twenty times this memory
SYMMETRIC_TRIALS = 19  # scales tried for a sub-block without offset
OFFSET_TRIALS = 21  # the same with offset
ROUNDS = 2  # times that the two scales of a block are solved again after its values were rounded


# Takes values and weights, [blocks, elements] float32, and returns [blocks, bytes] uint8.
Encoder = Callable[[Tensor, Tensor], Tensor]


def quantize(rows: Tensor, type_name: str, importance: Tensor | None = None) -> Tensor:
    """Returns the blocks of a matrix, [bytes] uint8.

    rows [rows, columns] float32, whose columns are whole blocks; importance [columns] float32 or None: the weight of a
    squared error in each column, the mean square of what the column is multiplied with.
    """
    form, encode = FORMATS[type_name], ENCODERS[type_name]
    columns = rows.shape[1]
    assert columns % form.elements == 0
    weights = torch.ones(columns)
    if importance is not None and importance.mean() > 0:
        relative = importance.float() / importance.float().mean()
        # A column that nothing was multiplied with counts a little, so that its values do not become arbitrary.
        weights = relative.clamp_min(1e-6)
    step = max(1, CHUNK_ELEMENTS // columns)
    found = []
    for first in range(0, len(rows), step):
        part = rows[first : first + step].float()
        shape = (-1, form.elements)
        blocks = encode(part.reshape(shape), weights.expand(len(part), -1).reshape(shape))
        assert blocks.shape[1] == form.num_bytes
        found.append(blocks.reshape(-1))
    return torch.cat(found)


# ---------------------------------------------------------------------------------------------------------------------
# Shared pieces


def _half_bytes(numbers: Tensor) -> Tensor:
    """Returns float16 values as bytes: [blocks, n] -> [blocks, 2 * n] uint8."""
    return numbers.half().contiguous().view(torch.uint8)


def _rounded_half(numbers: Tensor) -> Tensor:
    return numbers.half().float()


def _inverse(numbers: Tensor) -> Tensor:
    """Returns 1 / x, and 0 where x is 0."""
    return torch.where(numbers == 0, torch.zeros(()), 1 / numbers)


def _join_nibbles(values: Tensor, run: int) -> Tensor:
    """Packs runs of 2 * `run` values of four bits, the first half of each run into the low nibbles."""
    low, high = values.view(len(values), -1, 2, run).unbind(2)
    return (low | high << 4).flatten(1)


def _search_scale(x: Tensor, w: Tensor, lowest: int, highest: int) -> Tensor:
    """Returns the scale of each group, [..., 1], with the least weighted error of integers from `lowest` to `highest`.

    x, w [..., group]
    """
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    best_gain = torch.zeros_like(largest)
    best = largest / lowest
    wx = w * x
    for trial in range(SYMMETRIC_TRIALS):
        reach = lowest + 0.1 * (trial - SYMMETRIC_TRIALS // 2)  # the integer that the largest value would become
        q = (x * (reach * _inverse(largest))).round_().clamp_(lowest, highest)
        product, square = (wx * q).sum(-1, keepdim=True), (w * q * q).sum(-1, keepdim=True)
        gain = product.square() * _inverse(square)
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best = torch.where(better, product * _inverse(square), best)
    return best


def _search_scale_and_offset(x: Tensor, w: Tensor, highest: int) -> tuple[Tensor, Tensor]:
    """Returns scale and offset of each group, both [..., 1] and not negative, for values q * scale - offset with
    integers q from 0 to `highest`. x, w [..., group]
    """
    low = x.amin(-1, keepdim=True).clamp_max(0)
    spread = x.amax(-1, keepdim=True) - low
    sum_w, sum_x = w.sum(-1, keepdim=True), (w * x).sum(-1, keepdim=True)
    best_scale, best_offset = spread / highest, -low
    best_error = torch.full_like(low, torch.inf)
    for trial in range(OFFSET_TRIALS):
        reach = highest + 0.1 * (trial - OFFSET_TRIALS // 2)
        q = ((x - low) * (reach * _inverse(spread))).round_().clamp_(0, highest)
        sum_q, sum_qq = (w * q).sum(-1, keepdim=True), (w * q * q).sum(-1, keepdim=True)
        sum_xq = (w * x * q).sum(-1, keepdim=True)
        determinant = sum_w * sum_qq - sum_q.square()
        scale = (sum_w * sum_xq - sum_x * sum_q) * _inverse(determinant)
        offset = (sum_q * sum_xq - sum_qq * sum_x) * _inverse(determinant)
        without = sum_xq * _inverse(sum_qq)  # the best scale if the offset is 0
        alone = (offset < 0) | (determinant <= 1e-6 * sum_w * sum_qq)  # or all integers are the same
        scale = torch.where(alone, without, scale).clamp_min(0)
        offset = torch.where(alone, torch.zeros(()), offset)
        error = (w * (q * scale - offset - x).square()).sum(-1, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale, best_offset = torch.where(better, scale, best_scale), torch.where(better, offset, best_offset)
    return best_scale, best_offset


# ---------------------------------------------------------------------------------------------------------------------
# Plain floats, and blocks of 32 with one scale


def _f32(x: Tensor, w: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _f16(x: Tensor, w: Tensor) -> Tensor:
    return _half_bytes(x)


def _bf16(x: Tensor, w: Tensor) -> Tensor:
    return x.bfloat16().contiguous().view(torch.uint8)


def _q8_0(x: Tensor, w: Tensor) -> Tensor:
    scale = _rounded_half(x.abs().amax(1, keepdim=True) / 127)
    q = (x * _inverse(scale)).round_().clamp_(-128, 127)
    return torch.cat((_half_bytes(scale), q.to(torch.int8).view(torch.uint8)), 1)


def _q4_0(x: Tensor, w: Tensor) -> Tensor:
    scale = _rounded_half(_search_scale(x, w, -8, 7))
    q = (x * _inverse(scale)).round_().clamp_(-8, 7)
    return torch.cat((_half_bytes(scale), _join_nibbles((q + 8).to(torch.uint8), 16)), 1)


def _q4_1(x: Tensor, w: Tensor) -> Tensor:
    low = x.amin(1, keepdim=True)  # the offset may have either sign here
    scale, offset = _search_scale_and_offset(x - low, w, 15)
    scale, least = _rounded_half(scale), _rounded_half(low - offset)
    q = ((x - least) * _inverse(scale)).round_().clamp_(0, 15)
    return torch.cat((_half_bytes(scale), _half_bytes(least), _join_nibbles(q.to(torch.uint8), 16)), 1)


def _q5_0(x: Tensor, w: Tensor) -> Tensor:
    scale = _rounded_half(_search_scale(x, w, -16, 15))
    q = ((x * _inverse(scale)).round_().clamp_(-16, 15) + 16).to(torch.uint8)
    return torch.cat((_half_bytes(scale), _fifth_bits(q), _join_nibbles(q & 15, 16)), 1)


def _fifth_bits(q: Tensor) -> Tensor:
    """Packs bit 4 of 32 values into four bytes: [blocks, 32] -> [blocks, 4] uint8."""
    bits = (q >> 4).view(len(q), 4, 8)
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


# ---------------------------------------------------------------------------------------------------------------------
# K blocks of 256: sub-blocks with small integer scales of their own


def _round_blocks(subs: Tensor, w: Tensor, highest: int) -> tuple[Tensor, ...]:
    """Quantizes eight sub-blocks of 32 with 6-bit scales and offsets, which two float16 numbers of the block scale.

    subs, w [blocks, 8, 32] -> block scale and block offset [blocks, 1]; scales and offsets [blocks, 8] uint8; values
    [blocks, 8, 32] uint8
    """
    scale, offset = (found.squeeze(-1) for found in _search_scale_and_offset(subs, w, highest))  # [blocks, 8]
    of_scales = _rounded_half(scale.amax(1, keepdim=True) / 63)
    of_offsets = _rounded_half(offset.amax(1, keepdim=True) / 63)
    scales = (scale * _inverse(of_scales)).round_().clamp_(0, 63)
    offsets = (offset * _inverse(of_offsets)).round_().clamp_(0, 63)
    for _ in range(ROUNDS):
        scales, offsets = _try_neighbours(subs, w, highest, of_scales, of_offsets, scales, offsets)
        q = _values(subs, of_scales * scales, of_offsets * offsets, highest)
        of_scales, of_offsets = _solve_block(subs, w, q, scales, offsets, of_scales, of_offsets)
    q = _values(subs, of_scales * scales, of_offsets * offsets, highest)
    return of_scales, of_offsets, scales.to(torch.uint8), offsets.to(torch.uint8), q.to(torch.uint8)


def _values(subs: Tensor, scale: Tensor, offset: Tensor, highest: int) -> Tensor:
    """Rounds sub-blocks with the scales and offsets that are stored, [blocks, 8] each."""
    return ((subs + offset.unsqueeze(-1)) * _inverse(scale).unsqueeze(-1)).round_().clamp_(0, highest)


def _try_neighbours(
    subs: Tensor, w: Tensor, highest: int, of_scales: Tensor, of_offsets: Tensor, scales: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the rounded scales and offsets, or neighbours of them that give each sub-block a smaller error."""
    best, found = torch.full_like(scales, torch.inf), (scales, offsets)
    for up in (0, -1, 1):
        for right in (0, -1, 1):
            one, other = (scales + up).clamp(0, 63), (offsets + right).clamp(0, 63)
            scale, offset = of_scales * one, of_offsets * other
            q = _values(subs, scale, offset, highest)
            decoded = q * scale.unsqueeze(-1) - offset.unsqueeze(-1)
            error = (w * (decoded - subs).square()).sum(-1)
            better = error < best
            best = torch.where(better, error, best)
            found = torch.where(better, one, found[0]), torch.where(better, other, found[1])
    return found


def _solve_block(
    subs: Tensor, w: Tensor, q: Tensor, scales: Tensor, offsets: Tensor, of_scales: Tensor, of_offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the two numbers of each block that fit its rounded values best; the old ones if that is no gain."""
    a, b = q * scales.unsqueeze(-1), offsets.unsqueeze(-1).expand_as(q)

    def total(product: Tensor) -> Tensor:
        return (w * product).sum((1, 2)).unsqueeze(1)

    aa, ab, bb, xa, xb = total(a * a), total(a * b), total(b * b), total(subs * a), total(subs * b)
    determinant = aa * bb - ab.square()
    is_flat = determinant <= 1e-6 * aa * bb
    one = torch.where(is_flat, xa * _inverse(aa), (xa * bb - xb * ab) * _inverse(determinant))
    other = torch.where(is_flat, of_offsets, (xa * ab - xb * aa) * _inverse(determinant))
    one, other = _rounded_half(one), _rounded_half(other)

    def error(scale: Tensor, offset: Tensor) -> Tensor:
        return total((a * scale.unsqueeze(-1) - b * offset.unsqueeze(-1) - subs).square())

    is_better = (one >= 0) & (other >= 0) & (error(one, other) < error(of_scales, of_offsets))
    return torch.where(is_better, one, of_scales), torch.where(is_better, other, of_offsets)


def _pack_k_scales(scales: Tensor, offsets: Tensor) -> Tensor:
    """Packs eight 6-bit scales and eight 6-bit offsets into twelve bytes."""
    low, high = scales[:, :4], scales[:, 4:]
    first, last = offsets[:, :4], offsets[:, 4:]
    return torch.cat((low | (high >> 4) << 6, first | (last >> 4) << 6, (high & 15) | (last & 15) << 4), 1)


def _wide_nibbles(values: Tensor) -> Tensor:
    """Packs [blocks, 256] values of four bits: each 32 bytes hold 64 elements, low nibbles first."""
    return _join_nibbles(values, 32)


def _q4_k(x: Tensor, w: Tensor) -> Tensor:
    subs = x.view(-1, 8, 32)
    of_scales, of_offsets, scales, offsets, q = _round_blocks(subs, w.view(-1, 8, 32), 15)
    return torch.cat(
        (_half_bytes(of_scales), _half_bytes(of_offsets), _pack_k_scales(scales, offsets), _wide_nibbles(q.flatten(1))),
        1,
    )


def _q5_k(x: Tensor, w: Tensor) -> Tensor:
    subs = x.view(-1, 8, 32)
    of_scales, of_offsets, scales, offsets, q = _round_blocks(subs, w.view(-1, 8, 32), 31)
    places = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)  # bit i of byte j belongs to element 32 * i + j
    fifth = ((q >> 4) << places).sum(1, dtype=torch.uint8)
    low = _wide_nibbles((q & 15).flatten(1))
    packed = _pack_k_scales(scales, offsets)
    return torch.cat((_half_bytes(of_scales), _half_bytes(of_offsets), packed, fifth, low), 1)


def _round_symmetric(
    subs: Tensor, w: Tensor, reach: int, nearest: Callable[[Tensor], Tensor], searched: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes sub-blocks without offsets, whose integer scales lie in -reach ... reach - 1.

    subs, w [blocks, subs, n]; nearest: values in units of their scale -> the representable value next to each;
    searched [blocks, subs]: the best scales before rounding. Returns the block's scale [blocks, 1], the scales and the
    values in units of their scale.
    """
    largest = searched.gather(1, searched.abs().argmax(1, keepdim=True))
    of_scales = _rounded_half(largest / -reach)
    scales = (searched * _inverse(of_scales)).round_().clamp_(-reach, reach - 1)
    for _ in range(ROUNDS):
        best, chosen = torch.full_like(scales, torch.inf), scales
        for step in (0, -1, 1):
            tried = (scales + step).clamp(-reach, reach - 1)
            scale = (of_scales * tried).unsqueeze(-1)
            error = (w * (nearest(subs * _inverse(scale)) * scale - subs).square()).sum(-1)
            better = error < best
            best, chosen = torch.where(better, error, best), torch.where(better, tried, chosen)
        scales = chosen
        decoded = nearest(subs * _inverse((of_scales * scales).unsqueeze(-1))) * scales.unsqueeze(-1)
        product, square = (w * subs * decoded).sum((1, 2)), (w * decoded.square()).sum((1, 2))
        solved = _rounded_half((product * _inverse(square)).unsqueeze(1))
        of_scales = torch.where(solved == 0, of_scales, solved)
    return of_scales, scales, nearest(subs * _inverse((of_scales * scales).unsqueeze(-1)))


def _q6_k(x: Tensor, w: Tensor) -> Tensor:
    subs, weights = x.view(-1, 16, 16), w.view(-1, 16, 16)
    searched = _search_scale(subs, weights, -32, 31).squeeze(-1)
    of_scales, scales, q = _round_symmetric(subs, weights, 128, lambda v: v.round().clamp_(-32, 31), searched)
    values = (q.flatten(1) + 32).to(torch.uint8)  # [blocks, 256]
    low = _join_nibbles(values & 15, 64)
    pairs = (values >> 4).view(-1, 2, 4, 32)  # 32 bytes hold 128 elements, lowest bits first
    high = (pairs << torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)).sum(2, dtype=torch.uint8)
    return torch.cat((low, high.flatten(1), scales.to(torch.int8).view(torch.uint8), _half_bytes(of_scales)), 1)


# ---------------------------------------------------------------------------------------------------------------------
# IQ4: sixteen uneven values

_UNEVEN = torch.tensor(UNEVEN, dtype=torch.float32)
_BETWEEN = (_UNEVEN[1:] + _UNEVEN[:-1]) / 2


def _uneven_places(values: Tensor) -> Tensor:
    return torch.bucketize(values, _BETWEEN)


def _nearest_uneven(values: Tensor) -> Tensor:
    return _UNEVEN[_uneven_places(values)]


def _search_uneven(x: Tensor, w: Tensor) -> Tensor:
    """Returns the scale of each group, [..., 1], with the least weighted error of the uneven values."""
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    best_gain = torch.zeros_like(largest)
    best = largest / UNEVEN[0]
    wx = w * x
    for trial in range(SYMMETRIC_TRIALS):
        reach = UNEVEN[0] + 2.0 * (trial - SYMMETRIC_TRIALS // 2)
        q = _nearest_uneven(x * (reach * _inverse(largest)))
        product, square = (wx * q).sum(-1, keepdim=True), (w * q * q).sum(-1, keepdim=True)
        gain = product.square() * _inverse(square)
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best = torch.where(better, product * _inverse(square), best)
    return best


def _iq4_nl(x: Tensor, w: Tensor) -> Tensor:
    scale = _rounded_half(_search_uneven(x, w))
    places = _uneven_places(x * _inverse(scale))
    return torch.cat((_half_bytes(scale), _join_nibbles(places.to(torch.uint8), 16)), 1)


def _iq4_xs(x: Tensor, w: Tensor) -> Tensor:
    subs, weights = x.view(-1, 8, 32), w.view(-1, 8, 32)
    of_scales, scales, _ = _round_symmetric(
        subs, weights, 32, _nearest_uneven, _search_uneven(subs, weights).squeeze(-1)
    )
    places = _uneven_places(subs * _inverse((of_scales * scales).unsqueeze(-1))).to(torch.uint8)
    biased = (scales + 32).int()  # [blocks, 8], six bits
    high = ((biased >> 4) << torch.arange(0, 16, 2, dtype=torch.int32)).sum(1, keepdim=True)
    high_bytes = torch.cat((high & 255, high >> 8), 1).to(torch.uint8)
    low = (biased & 15).view(-1, 4, 2)
    low_bytes = (low[..., 0] | low[..., 1] << 4).to(torch.uint8)
    packed = _join_nibbles(places.flatten(1), 16)
    return torch.cat((_half_bytes(of_scales), high_bytes, low_bytes, packed), 1)


ENCODERS: dict[str, Encoder] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
