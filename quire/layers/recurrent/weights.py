"""Small weights of recurrent layers that GGUF files keep otherwise than Hugging Face does. The layers themselves are in
`short_conv`, `recurrent_mamba`, `recurrent_delta` and `recurrent_channel`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.weights import Form, Part, Weight


def conv_taps(name: str, channels: int, taps: int, dtype: torch.dtype, order: Form | None = None) -> Weight:
    """[channels, 1, taps] as Hugging Face keeps them; or as GGUF files do, without the dimension of one, and with
    channels that `order` brings into ours."""
    weight = Weight.whole(f"{name}.weight", (channels, 1, taps), dtype)
    weight.others = ((Part(f"{name}.taps.weight", (channels, taps), 0, channels, form=_Spread(order)),),)
    return weight


def conv_taps_apart(prefix: str, widths: tuple[int, int, int], taps: int, dtype: torch.dtype) -> Weight:
    """Of queries, keys and values below each other, so many channels each; or, as OLMo Hybrid and Kimi Linear are
    published, in a tensor for each. What transformers saves has these names, too, and three parts as even as can be,
    wherever that cuts them."""
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
    """`A_log`, [heads]; GGUF files have what becomes of it, A = -exp(A_log), and `order` for its heads."""
    weight = Weight.whole(f"{name}_log", (heads,), torch.float32)
    weight.others = ((Part(name, (heads,), 0, heads, form=_LogDecay(order)),),)
    return weight


@dataclass(frozen=True, slots=True)
class _Spread:
    """A form: [channels, taps] with a dimension of one between them."""

    order: Form | None

    def __call__(self, taps: Tensor) -> Tensor:
        return (taps if self.order is None else self.order(taps)).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class _LogDecay:
    order: Form | None

    def __call__(self, decay: Tensor) -> Tensor:
        return (decay if self.order is None else self.order(decay)).neg().log()
