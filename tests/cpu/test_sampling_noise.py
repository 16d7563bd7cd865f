"""The noise is what a good hash gives: uniform, and blind to which seed, position or token stands next to which."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from quire.sampling.noise import Noise, stream_key

VOCAB = 49152


def keys(seeds: list[int], sample_index: int = 0) -> torch.Tensor:
    return torch.tensor([stream_key(seed, sample_index) for seed in seeds])


def plain_bits(seed: int, sample_index: int, position: int, token: int) -> int:
    """The definition in Python integers."""
    mask64, mask32 = (1 << 64) - 1, (1 << 32) - 1

    def mix(x: int) -> int:
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask64
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask64
        return x ^ x >> 31

    def fold(x: int, count: int) -> int:  # x ^ (x >> count) with the sign carried along
        signed = x - (1 << 32) if x >> 31 else x
        return (x ^ signed >> count) & mask32

    golden = 0x9E3779B97F4A7C15
    key = mix((mix(seed & mask64) + sample_index * golden) & mask64)
    row = mix((key + position * golden) & mask64)
    x = (token * 0x9E3779B1 & mask32) ^ (row & mask32)
    x = x * (row >> 32 | 1) & mask32
    x = fold(x, 15) * 0x85EBCA6B & mask32
    x = fold(x, 13) * 0xC2B2AE35 & mask32
    return fold(x, 16)


def test_matches_its_definition_in_plain_integers():
    noise = Noise(1000, "cpu")
    for seed, sample_index, position in [(0, 0, 0), (-1, 3, 7), ((1 << 63) - 1, 1, 100_000), (-(1 << 63), 127, 1)]:
        bits = noise.bits(keys([seed], sample_index), torch.tensor([position]))[0].tolist()
        assert bits[:50] == [plain_bits(seed, sample_index, position, token) for token in range(50)]


def test_candidates_get_what_the_whole_vocabulary_gets_bit_for_bit():
    noise = Noise(VOCAB, "cpu")
    positions = torch.arange(8) * 1000
    everything = noise.gumbel(keys(list(range(8))), positions)
    generator = torch.Generator().manual_seed(1)
    for count in (1, 7, 64, 1000):
        ids = torch.randint(0, VOCAB, (8, count), generator=generator)
        assert torch.equal(noise.gumbel(keys(list(range(8))), positions, ids), everything.gather(1, ids))
    for row in range(8):
        assert torch.equal(noise.gumbel(keys([row]), positions[row : row + 1])[0], everything[row])


def test_larger_vocabulary_leaves_the_noise_of_its_tokens_alone():
    small, large = Noise(100, "cpu"), Noise(5000, "cpu")
    key, position = keys([5]), torch.tensor([3])
    assert torch.equal(small.gumbel(key, position), large.gumbel(key, position)[:, :100])


def test_uniform_in_its_high_and_low_bits_and_in_the_tail():
    bits = Noise(VOCAB, "cpu").bits(keys([11, 12]).repeat(16), torch.arange(32)).flatten().long()
    assert bits.min() >= 0 and bits.max() < 1 << 31
    for part in (bits >> 19, bits & 4095):
        assert stats.chisquare(torch.bincount(part, minlength=4096).numpy()).pvalue > 1e-4
    tail = bits[bits < 1 << 24]  # the smallest 1/128th decides who wins
    assert stats.chisquare(torch.bincount(tail >> 16, minlength=256).numpy()).pvalue > 1e-4


def test_gumbel_distribution_is_finite_everywhere():
    noise = Noise(VOCAB, "cpu").gumbel(keys([3] * 4), torch.arange(4)).flatten()
    assert torch.isfinite(noise).all()
    assert stats.kstest(noise[::7].double().numpy(), "gumbel_r").pvalue > 1e-4


def test_extreme_bits_give_finite_noise(monkeypatch: pytest.MonkeyPatch):
    noise = Noise(4, "cpu")
    monkeypatch.setattr(
        noise, "bits", lambda *_: torch.tensor([[0, 1, (1 << 31) - 2, (1 << 31) - 1]], dtype=torch.int32)
    )
    values = noise.gumbel(keys([0]), torch.tensor([0]))
    expected = -np.log(-np.log1p(-(np.array([0.5, 1.5, (1 << 31) - 64, (1 << 31) - 64]) / 2.0**31)))
    assert torch.isfinite(values).all()
    assert np.allclose(values[0].numpy(), expected, atol=0.1)


@pytest.mark.parametrize("step", [1, 2, 17, 4096])
def test_neighbours_are_independent(step: int):
    """Joint distribution of two cells that differ by `step` in token id, position, seed or sample index."""
    count = 1 << 16
    noise, places = Noise(8192, "cpu"), torch.arange(count)
    two_tokens = torch.tensor([[5, 5 + step]]).expand(count, 2)
    one_token = two_tokens[:, :1]
    tokens = noise.bits(keys([1]).expand(count), places, two_tokens)
    seeds = keys(list(range(1 << 14)))
    later_seeds = keys([seed + step for seed in range(1 << 14)])
    other_index = keys(list(range(1 << 14)), step)
    zeros = torch.zeros(1 << 14)
    pairs = {
        "token": (tokens[:, 0], tokens[:, 1]),
        "position": (
            noise.bits(keys([1]).expand(count), places, one_token)[:, 0],
            noise.bits(keys([1]).expand(count), places + step, one_token)[:, 0],
        ),
        "seed": (noise.bits(seeds, zeros, one_token[: 1 << 14]), noise.bits(later_seeds, zeros, one_token[: 1 << 14])),
        "index": (noise.bits(seeds, zeros, one_token[: 1 << 14]), noise.bits(other_index, zeros, one_token[: 1 << 14])),
    }
    for name, (a, b) in pairs.items():
        joint = (a.flatten().long() >> 27) * 16 + (b.flatten().long() >> 27)
        assert stats.chisquare(torch.bincount(joint, minlength=256).numpy()).pvalue > 1e-4, name
        correlation = np.corrcoef(a.flatten().double(), b.flatten().double())[0, 1]
        assert abs(correlation) * np.sqrt(a.numel()) < 4.5, name


def test_winner_among_equals_is_uniform():
    noise = Noise(512, "cpu")
    best = noise.gumbel(keys([9]).expand(1 << 14), torch.arange(1 << 14)).topk(2).indices
    assert stats.chisquare(torch.bincount(best[:, 0], minlength=512).numpy()).pvalue > 1e-4
    apart = (best[:, 1] - best[:, 0]) % 512
    assert stats.chisquare(torch.bincount(apart, minlength=512)[1:].numpy()).pvalue > 1e-4
