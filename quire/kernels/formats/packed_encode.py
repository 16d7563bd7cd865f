"""Quantizes floats to the formats of compressed-tensors checkpoints in plain torch. `quire quantize` calls it.

`packed_ints` decodes what is written here. Scales are searched as for GGUF's blocks: of several around the obvious one,
the one with the least weighted error is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.formats.gguf_blocks import FP4

TRIALS = 20
LEAST_SHARE = 0.6  # of the obvious scale: smaller ones are not tried
FP8_MAX = 448.0
NVFP4_GROUP = 16
MXFP4_GROUP = 32

_FP4 = torch.tensor(sorted(set(FP4)))  # fifteen values, of which 0 counts once
_FP4_BETWEEN = (_FP4[1:] + _FP4[:-1]) / 2
_FP4_CODES = torch.tensor([FP4.index(float(value)) for value in _FP4], dtype=torch.uint8)
FP4_MAX = 6.0


def integer_scales(matrix: Tensor, bits: int, group: int, importance: Tensor | None = None) -> Tensor:
    """Returns the scales of symmetric integers, [rows, groups], with the least weighted error.

    matrix [rows, columns] float32; group: columns that share a scale; importance [columns] or None
    """
    most = (1 << (bits - 1)) - 1
    x = matrix.unflatten(1, (-1, group))
    w = torch.ones(1, 1, 1) if importance is None else importance.float().view(1, -1, group)
    obvious = (x.abs().amax(-1) / most).clamp_min(torch.finfo(torch.float32).tiny)
    best, best_error = obvious, torch.full_like(obvious, torch.inf)
    for trial in range(TRIALS):
        scale = obvious * (1 - (1 - LEAST_SHARE) * trial / TRIALS)
        q = (x / scale.unsqueeze(-1)).round_().clamp_(-most - 1, most)
        error = (w * (q * scale.unsqueeze(-1) - x).square()).sum(-1)
        better = error < best_error
        best, best_error = torch.where(better, scale, best), torch.where(better, error, best_error)
    return best


def round_integers(matrix: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Returns the integers nearest to a matrix, [rows, columns] int8. scales [rows, groups]"""
    most = (1 << (bits - 1)) - 1
    x = matrix.unflatten(1, (scales.shape[1], -1))
    return (x / scales.float().unsqueeze(-1)).round_().clamp_(-most - 1, most).flatten(1).to(torch.int8)


def pack_words(numbers: Tensor, bits: int) -> Tensor:
    """Packs signed integers of 4 or 8 bits into words, with half their range added: [rows, columns] int8 -> [rows,
    words] int32. Columns past the last are zeros.
    """
    per_word = 32 // bits
    raised = numbers.int() + (1 << (bits - 1))
    raised = torch.nn.functional.pad(raised, (0, -raised.shape[1] % per_word)).unflatten(1, (-1, per_word))
    shifts = torch.arange(0, 32, bits)
    return (raised.long() << shifts).sum(-1).to(torch.uint32).view(torch.int32)


def fp8_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns FP8 (e4m3) values and a scale for each row, [rows, 1] float32."""
    scale = (matrix.abs().amax(1, keepdim=True) / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    return (matrix / scale).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def nvfp4(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns packed FP4 values, FP8 scales of sixteen columns each, and the number that divides these scales, [1]."""
    x = matrix.unflatten(1, (-1, NVFP4_GROUP))
    largest = x.abs().amax(-1)
    overall = FP8_MAX * FP4_MAX / largest.max().clamp_min(torch.finfo(torch.float32).tiny)
    scales = (largest / FP4_MAX * overall).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return _pack_fp4(x, scales.float() / overall), scales, overall.reshape(1)


def mxfp4(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns packed FP4 values and the exponents of each 32 columns' scale, biased by 127, uint8."""
    x = matrix.unflatten(1, (-1, MXFP4_GROUP))
    largest = x.abs().amax(-1)
    exponent = torch.frexp(largest.contiguous()).exponent  # largest = mantissa * 2 ** exponent, mantissa in [0.5, 1)
    low = exponent - 3  # values up to 4 are exact at this scale, those up to 8 are cut off at 6
    best, best_error = low, torch.full_like(largest, torch.inf)
    for step in (0, 1):
        tried = low + step
        scale = torch.exp2(tried.float())
        error = (_nearest_fp4(x, scale) * scale.unsqueeze(-1) - x).square().sum(-1)
        better = error < best_error
        best, best_error = torch.where(better, tried, best), torch.where(better, error, best_error)
    best = torch.where(largest == 0, 0, best).clamp_(-127, 127)
    return _pack_fp4(x, torch.exp2(best.float())), (best + 127).to(torch.uint8)


def _places(x: Tensor, scale: Tensor) -> Tensor:
    inverse = torch.where(scale == 0, torch.zeros(()), 1 / scale).unsqueeze(-1)
    return torch.bucketize(x * inverse, _FP4_BETWEEN)


def _nearest_fp4(x: Tensor, scale: Tensor) -> Tensor:
    return _FP4[_places(x, scale)]


def _pack_fp4(x: Tensor, scale: Tensor) -> Tensor:
    """Packs two neighbours into a byte, the first into its low nibble: x [rows, groups, n], scale [rows, groups]."""
    codes = _FP4_CODES[_places(x, scale)].flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4
