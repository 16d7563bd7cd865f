"""Rotary positions: how fast each pair of a head's elements turns, and the angles of one step's tokens.

A model computes the angles once a step and hands them to every layer; there is no table to size or to outgrow.
Frequencies and angles are worked out in float32 the way transformers does, so that long positions agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.kernels.angles import Angles
from quire.kernels.table import Ops
from quire.types import QuireError

SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    kind: str = "default"  # one of SUPPORTED, or "none": nothing turns
    theta: float = 10000.0
    factor: float = 1.0  # how many times longer than in training sequences may get
    original_len: int = 0  # positions the model was first trained with (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's ends to whole pairs
    attention_factor: float | None = None  # yarn, longrope: scales cos and sin; None: from `factor`
    share: float = 1.0  # proportional: of the pairs, the first that turn
    divisors: tuple[float, ...] = ()  # one per pair, on top of all that (longrope; GGUF keeps llama3 scaling this way)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> RopeConfig:
        """Read `rope_parameters`, or the older `rope_theta` and `rope_scaling`, of a config.json."""
        given = {**_fields(config, "rope_scaling"), **_fields(config, "rope_parameters")}
        kind = given.get("rope_type") or given.get("type") or "default"
        kind = {"su": "longrope"}.get(kind, kind)  # its first name
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
        """What cos and sin are multiplied with."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "yarn":
            return yarn_magnitude(self.factor)
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_len)) if self.factor > 1 else 1.0


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair, [head_dim / 2] float32."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32)
    plain = 1.0 / config.theta ** (pairs / head_dim)
    match config.kind:
        case "none":
            return torch.zeros_like(plain)
        case "linear":
            scaled = plain / config.factor
        case "proportional":
            turning = int(config.share * head_dim // 2)
            scaled = torch.where(torch.arange(len(plain)) < turning, plain / config.factor, 0.0)
        case "llama3":
            scaled = _llama3(config, plain)
        case "yarn":
            scaled = _yarn(config, plain, head_dim)
        case _:  # dynamic scaling, too, begins only beyond the positions we offer
            scaled = plain
    if not config.divisors:
        return scaled
    if len(config.divisors) != len(scaled):
        what = f"Rope is scaled by {len(config.divisors)} factors, a head has {len(scaled)} pairs."
        raise QuireError("bad_config", what, "Check config.json.")
    return scaled / torch.tensor(config.divisors)


class Rope:
    """The angles of a step's tokens for one kind of rope."""

    def __init__(
        self, config: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device, ops: Ops, still_dim: int = 0
    ):
        """`still_dim`: elements of a head that do not turn, the second half of each half (see `layers.partial`)."""
        turning = inverse_frequencies(config, head_dim - still_dim)
        self.frequencies = torch.cat((turning, torch.zeros(still_dim // 2))).to(device)
        self.scale = config.angle_scale
        self.dtype = dtype
        self.ops = ops

    def angles(self, positions: Tensor) -> Angles:
        """positions [tokens]"""
        return self.ops.plan_angles(positions, self.frequencies, self.scale, self.dtype)


def _fields(config: dict[str, Any], key: str) -> dict[str, Any]:
    given = config.get(key) or {}
    if not isinstance(given, dict):
        raise QuireError("bad_config", f"{key}={given!r} must be an object.", "Check config.json.")
    return given


def _above_zero(given: dict[str, Any], key: str, default: float) -> float:
    """A field that is absent, null or 0 has the default."""
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
    """One set of factors for all sequences, or what is cached would be of no use to longer ones: the long set, unless
    no sequence may outgrow the positions the model was first trained with."""
    served_len = config.get("served_len") or config.get("max_position_embeddings") or 0
    key = "long_factor" if served_len > original_len else "short_factor"
    factors = given.get(key)
    if not isinstance(factors, (list, tuple)) or not all(isinstance(f, (int, float)) and f > 0 for f in factors):
        raise QuireError("bad_config", f"Rope of type longrope needs {key}, a list of numbers.", "Check config.json.")
    return tuple(float(f) for f in factors)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Longer contexts flatten the softmax; this is the factor that sharpens it again."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Slow pairs are divided by the factor, fast ones are left alone, those between are blended."""
    turns = config.original_len * plain / (2 * math.pi)  # full turns within the original length
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / config.factor + blend * plain


def _yarn(config: RopeConfig, plain: Tensor, head_dim: int) -> Tensor:
    """Pairs that turn often within the original length keep their speed, rare ones are slowed down, with a ramp."""

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(config.original_len / (times * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    slowed = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / config.factor * slowed + plain * (1 - slowed)
