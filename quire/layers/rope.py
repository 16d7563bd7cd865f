"""Rotary position embedding: the frequency of each pair of a head's elements, and the angles of a step's tokens.

A model computes the angles once per step and passes them to every layer, so there is no table whose size limits
positions. Frequencies and angles are computed in float32 like those of transformers, so that long positions agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.kernels.angles import Angles
from quire.layers.build import Build
from quire.types import QuireError

SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rope settings of one kind of layer."""

    kind: str = "default"  # one of SUPPORTED, or "none": no rotation
    theta: float = 10000.0
    factor: float = 1.0  # ratio of supported positions to `original_len`
    original_len: int = 0  # positions in the first training (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: rounds the ends of the ramp to whole pairs
    attention_factor: float | None = None  # yarn, longrope: scale of cos and sin; None: derived from `factor`
    share: float = 1.0  # proportional: fraction of the pairs that rotate, the first ones
    divisors: tuple[float, ...] = ()  # one per pair, applied last (longrope; llama3 scaling in GGUF files)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> RopeConfig:
        """Reads `rope_parameters`, or the older `rope_theta` and `rope_scaling`, from a config.json."""
        given = {**_fields(config, "rope_scaling"), **_fields(config, "rope_parameters")}
        kind = given.get("rope_type") or given.get("type") or "default"
        kind = {"su": "longrope"}.get(kind, kind)  # an older name of the same scaling
        if kind not in SUPPORTED:
            raise QuireError(
                "unsupported_model",
                f"Rope scaling {kind!r} is not supported.",
                f"Supported are {', '.join(SUPPORTED)}.",
            )
        max_positions = _above_zero(config, "max_position_embeddings", 2048)
        original_len = _above_zero(given, "original_max_position_embeddings", max_positions)
        if kind == "longrope":
            original_len = _above_zero(config, "original_max_position_embeddings", original_len)
        stretched = kind in ("yarn", "longrope")
        factor = _above_zero(given, "factor", max_positions / original_len if stretched else 1.0)
        theta = _above_zero(given, "rope_theta", _above_zero(config, "rope_theta", 10000.0))
        low, high = (_above_zero(given, f"{name}_freq_factor", usual) for name, usual in (("low", 1.0), ("high", 4.0)))
        if kind == "llama3" and low == high:
            what = f"Rope of type llama3 can't blend between low_freq_factor={low} and high_freq_factor={high}."
            raise QuireError("bad_config", what, "Check config.json.")
        return cls(
            kind=kind,
            theta=theta,
            factor=factor,
            original_len=int(original_len),
            low_freq_factor=low,
            high_freq_factor=high,
            beta_fast=_above_zero(given, "beta_fast", 32.0),
            beta_slow=_above_zero(given, "beta_slow", 1.0),
            truncate=bool(given.get("truncate", True)),
            share=_above_zero(given, "partial_rotary_factor", 1.0),
            attention_factor=_hf_attention_factor(given, factor),
            divisors=_longrope_divisors(config, given, original_len)
            if kind == "longrope"
            else tuple(given.get("divisors") or ()),
        )

    @property
    def angle_scale(self) -> float:
        """The factor of cos and sin."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "yarn":
            return yarn_magnitude(self.factor)
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_len)) if self.factor > 1 else 1.0


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Returns the radians per position of each pair, [head_dim / 2] float32."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32)
    plain = 1.0 / config.theta ** (pairs / head_dim)
    match config.kind:
        case "none":
            return torch.zeros_like(plain)
        case "linear":
            scaled = plain / config.factor
        case "proportional":
            num_rotated = int(config.share * head_dim // 2)
            scaled = torch.where(torch.arange(len(plain)) < num_rotated, plain / config.factor, 0.0)
        case "llama3":
            scaled = _llama3(config, plain)
        case "yarn":
            scaled = _yarn(config, plain, head_dim)
        case _:  # also "dynamic", whose scaling begins beyond the positions that are served
            scaled = plain
    if not config.divisors:
        return scaled
    if len(config.divisors) != len(scaled):
        what = f"Rope is scaled by {len(config.divisors)} factors, a head has {len(scaled)} pairs."
        raise QuireError("bad_config", what, "Check config.json.")
    return scaled / torch.tensor(config.divisors)


class Rope:
    """Computes the angles of a step's tokens for one `RopeConfig`."""

    def __init__(self, config: RopeConfig, head_dim: int, build: Build, unrotated_dim: int = 0):
        """`unrotated_dim`: elements of a head without rotation: the end of each half (see `layers.head_layout`)."""
        rotated = inverse_frequencies(config, head_dim - unrotated_dim)
        self.frequencies = torch.cat((rotated, torch.zeros(unrotated_dim // 2))).to(build.device)
        self.scale = config.angle_scale
        self.dtype = build.dtype
        self.ops = build.ops

    def angles(self, positions: Tensor) -> Angles:
        """Returns cos and sin for the positions of a step. positions [tokens]"""
        return self.ops.plan_angles(positions, self.frequencies, self.scale, self.dtype)


def _fields(config: dict[str, Any], key: str) -> dict[str, Any]:
    given = config.get(key) or {}
    if not isinstance(given, dict):
        raise QuireError("bad_config", f"{key}={given!r} must be an object.", "Check config.json.")
    return given


def _above_zero(given: dict[str, Any], key: str, default: float) -> float:
    """Returns a number above 0; an absent field, null and 0 have the default."""
    value = given.get(key) or default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise QuireError("bad_config", f"{key}={value!r} must be a number above 0.", "Check config.json.")
    return float(value)


def _hf_attention_factor(given: dict[str, Any], factor: float) -> float | None:
    if given.get("attention_factor") is not None:
        return _above_zero(given, "attention_factor", 1.0)
    if given.get("mscale") and given.get("mscale_all_dim"):
        weights = (_above_zero(given, key, 1.0) for key in ("mscale", "mscale_all_dim"))
        return yarn_magnitude(factor, next(weights)) / yarn_magnitude(factor, next(weights))
    return None


def _longrope_divisors(config: dict[str, Any], given: dict[str, Any], original_len: float) -> tuple[float, ...]:
    """Returns one set of factors for all sequences, so that cached pages fit sequences of any length.

    This is the long set, unless no sequence may exceed the positions of the first training.
    """
    served_len = config.get("served_len") or config.get("max_position_embeddings") or 0
    key = "long_factor" if served_len > original_len else "short_factor"
    factors = given.get(key)
    if not isinstance(factors, (list, tuple)) or not all(isinstance(f, (int, float)) and f > 0 for f in factors):
        raise QuireError("bad_config", f"Rope of type longrope needs {key}, a list of numbers.", "Check config.json.")
    return tuple(float(f) for f in factors)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Returns yarn's scale of cos and sin, which offsets the flatter softmax of longer contexts."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Returns frequencies with slow pairs divided by the factor, fast pairs unchanged, and a blend in between."""
    rotations = config.original_len * plain / (2 * math.pi)  # full rotations within the original length
    blend = (rotations - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / config.factor + blend * plain


def _yarn(config: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """Returns frequencies unchanged for pairs with many rotations in the original length, divided by the factor for
    pairs with few, and on a linear ramp in between."""

    def pair_with_rotations(times: float) -> float:
        return head_dim * math.log(config.original_len / (times * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = pair_with_rotations(config.beta_fast), pair_with_rotations(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    slowed = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / config.factor * slowed + plain * (1 - slowed)
