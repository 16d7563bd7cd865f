"""Small weights of recurrent layers whose layout in GGUF files differs from that of Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.weights import Form, Part, Weight


def conv_taps(name: str, channels: int, taps: int, dtype: torch.dtype, order: Form | None = None) -> Weight:
    """Returns the weight of a depthwise convolution, [channels, 1, taps].

    GGUF files lack the middle dimension; `order` reorders their channels.
    """
    weight = Weight.whole(f"{name}.weight", (channels, 1, taps), dtype)
    weight.others = ((Part(f"{name}.taps.weight", (channels, taps), 0, channels, form=_Spread(order)),),)
    return weight


def conv_taps_apart(prefix: str, widths: tuple[int, int, int], taps: int, dtype: torch.dtype) -> Weight:
    """Returns the convolution over the stacked channels of queries, keys and values, `widths` of each.

    OLMo Hybrid and Kimi Linear are published with a tensor for each. Checkpoints saved by transformers have the same
    names but cut the stack into three parts as even as possible.
    """
    channels = sum(widths)
    third = -(-channels // 3)
    weight = Weight.whole(f"{prefix}.conv1d.weight", (channels, 1, taps), dtype)
    names = [f"{prefix}.{part}_conv1d.weight" for part in "qkv"]
    weight.others = tuple(
        Weight.stacked(list(zip(names, rows, strict=True)), (1, taps), dtype).parts
        for rows in (widths, (third, third, channels - 2 * third))
    )
    return weight


def log_decay(name: str, heads: int, order: Form | None = None) -> Weight:
    """Returns `A_log`, [heads]. GGUF files store A = -exp(A_log) instead; `order` reorders their heads."""
    weight = Weight.whole(f"{name}_log", (heads,), torch.float32)
    weight.others = ((Part(name, (heads,), 0, heads, form=_LogDecay(order)),),)
    return weight


@dataclass(frozen=True, slots=True)
class _Spread:
    """A form that turns [channels, taps] into [channels, 1, taps]."""

    order: Form | None

    def __call__(self, taps: Tensor) -> Tensor:
        return (taps if self.order is None else self.order(taps)).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class _LogDecay:
    """A form that turns A into A_log."""

    order: Form | None

    def __call__(self, decay: Tensor) -> Tensor:
        return (decay if self.order is None else self.order(decay)).neg().log()
