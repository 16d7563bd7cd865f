"""Counter-based sampling noise: one number for each (seed, sample index, position, token id), without generator state.

The sampler adds it to scaled logits and takes the argmax (the Gumbel trick), so a seeded request samples the same
tokens alone, in a batch, preempted or resumed, over the whole vocabulary or over a few candidates. Draft verification
uses the same noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The increment and multipliers of splitmix64, the multipliers of murmur3's 32-bit finalizer (both public algorithms),
# and the golden ratio again, as an odd 32-bit number.
_GOLDEN = 0x9E3779B97F4A7C15
_GOLDEN_32 = 0x9E3779B1
_MULTIPLY_64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MULTIPLY_32 = (0x85EBCA6B, 0xC2B2AE35)
_MASK_64 = (1 << 64) - 1

# Maps 31 random bits to [0, 1). The factor is slightly below 2**-31, because 2**31 - 1 rounds up to 2**31 in float32.
_TO_UNIT = 2.0**-31 * (1 - 2.0**-24)
_HALF_STEP = 2.0**-32


def stream_key(seed: int, sample_index: int) -> int:
    """Returns the signed 64-bit key of a request's noise; computed on the host when the request gets its row."""
    return _signed(_mix_int(_mix_int(seed & _MASK_64) + sample_index * _GOLDEN & _MASK_64))


def mix64(x: Tensor) -> Tensor:
    """Applies splitmix64's finalizer elementwise, in wrapping int64."""
    x = (x ^ _shift_right(x, 30)) * _signed(_MULTIPLY_64[0])
    x = (x ^ _shift_right(x, 27)) * _signed(_MULTIPLY_64[1])
    return x ^ _shift_right(x, 31)


class Noise:
    """Gumbel noise over one vocabulary.

    A (key, position) pair is mixed once per row, in 64 bits; each cell then combines it with its token id in 32-bit
    lanes by two rounds of multiply and shift, which are the passes over [rows, vocab] that noise costs.
    """

    def __init__(self, vocab_size: int, device: torch.device | str):
        # Multiplied by an odd number, ids stay distinct in their low bits, which later passes carry upwards.
        token_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
        self.token_words = token_ids * _signed(_GOLDEN_32, 32)  # [vocab]

    def gumbel(self, keys: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Returns the noise of rows with these `keys` ([rows], from `stream_key`) and `positions` ([rows]), for every
        token id ([rows, vocab]) or for `token_ids` ([rows, candidates], also the result's shape)."""
        bits = self.bits(keys, positions, token_ids)
        if bits.is_cuda:
            return _gumbel(bits.to(torch.float32))
        # On a CPU torch computes the remainder of each thread's range by another formula, which differs in the last
        # bit. Row by row, the remainders are at the same tokens for every row, whatever the batch.
        noise = bits.to(torch.float32)
        for row in noise:
            _gumbel(row)
        return noise

    def bits(self, keys: Tensor, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Returns 31 random bits for each cell, as non-negative int32."""
        row_words = mix64(keys + positions.to(torch.int64) * _signed(_GOLDEN)).view(torch.int32).view(-1, 2)
        whiten, multiply = row_words[:, :1], row_words[:, 1:] | 1  # [rows, 1] each
        tokens = self.token_words if token_ids is None else self.token_words[token_ids]
        x = (tokens ^ whiten).mul_(multiply)
        # An arithmetic shift costs one pass less than a logical one; it maps x and ~x to the same 31 bits.
        x.bitwise_xor_(x >> 15).mul_(_signed(_MULTIPLY_32[0], 32))
        x.bitwise_xor_(x >> 13).mul_(_signed(_MULTIPLY_32[1], 32))
        return x.bitwise_xor_(x >> 16)


def _gumbel(bits: Tensor) -> Tensor:
    """Turns random bits into Gumbel noise in place. An exponential variate is -log(1 - u). Small variates decide the
    argmax, so u keeps all its bits near 0, and half a step is added to avoid log(0)."""
    bits.mul_(-_TO_UNIT).log1p_().neg_().add_(_HALF_STEP)
    return bits.log_().neg_()


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Logical right shift, which fills with zeros instead of the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int, width: int = 64) -> int:
    return value - (1 << width) if value >> (width - 1) else value


def _mix_int(x: int) -> int:
    x = (x ^ (x >> 30)) * _MULTIPLY_64[0] & _MASK_64
    x = (x ^ (x >> 27)) * _MULTIPLY_64[1] & _MASK_64
    return x ^ (x >> 31)
