"""Shapes, slot layout and small weights that the recurrent ops share.

A recurrent layer keeps two things per row: the last inputs of its causal convolution, and one matrix per head. Both are
packed into one slot, which is copied, swapped and evicted as one unit. The convolution's part is a ring of `conv_len`
entries, indexed by position; a step writes its own entry and reads the others, so programs that share channels need no
synchronization. A pure convolution layer keeps the ring only.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    num_groups: int  # heads of a group share their key and query
    num_heads: int
    key_dim: int
    value_dim: int
    conv_len: int  # taps of the convolution, the token itself included
    beta_top: float = 1.0  # upper bound of the delta rule's beta; above 1 an update may flip the sign of stored values

    @property
    def values(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def keys(self) -> int:
        return self.num_groups * self.key_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, keys and queries of one token."""
        return self.values + 2 * self.keys

    @property
    def matrix_elements(self) -> int:
        return self.values * self.key_dim

    @property
    def slot_elements(self) -> int:
        return self.matrix_elements + self.conv_len * self.channels

    @property
    def activation_elements(self) -> int:
        """Peak activation elements per token: the projection, the convolution's output (in float32) and the output
        before its norm."""
        return 4 * self.channels + 5 * self.values

    def matrices(self, state: Tensor) -> Tensor:
        """Returns a view of the matrices in a layer's `state` [slots, slot_elements]: [slots, heads, value_dim,
        key_dim]."""
        matrices = state[:, : self.matrix_elements]
        return matrices.unflatten(1, (self.num_heads, self.value_dim, self.key_dim))

    def rings(self, state: Tensor) -> Tensor:
        """Returns a view of the convolution rings in a layer's `state` [slots, slot_elements]: [slots, conv_len,
        channels]."""
        return state[:, self.matrix_elements :].unflatten(1, (self.conv_len, self.channels))


@dataclass(frozen=True, slots=True)
class ConvShape:
    """Shape of a layer that is a convolution between two gates (LFM2)."""

    channels: int
    conv_len: int  # taps, the token itself included

    @property
    def slot_elements(self) -> int:
        return self.conv_len * self.channels

    @property
    def activation_elements(self) -> int:
        """Peak activation elements per token: both gates, the input, the convolution's input and its output."""
        return 6 * self.channels

    def rings(self, state: Tensor) -> Tensor:
        """Returns a layer's `state` [slots, slot_elements] as a view [slots, conv_len, channels]."""
        return state.unflatten(1, (self.conv_len, self.channels))


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """Weights of a short convolution, excluding its projections."""

    conv: Tensor  # [channels, 1, conv_len]
    bias: Tensor | None  # [channels]


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of a gated delta net, excluding its projections."""

    conv: Tensor  # [channels, 1, conv_len]
    a_log: Tensor  # [heads]
    dt_bias: Tensor  # [heads]; [keys] with per-channel decay
    norm: Tensor  # [value_dim]
    eps: float


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """Weights of a Mamba2 layer, excluding its projections."""

    conv: Tensor  # [channels, 1, conv_len]
    conv_bias: Tensor | None  # [channels]
    a_log: Tensor  # [heads]
    dt_bias: Tensor  # [heads]
    skip: Tensor  # [heads]: factor of the value in the skip connection to the output
    norm: Tensor | None  # [values]; None: the output is gated but not normed
    eps: float
    norm_groups: int  # groups of channels that the output is normed in
    dt_low: float  # lower clamp of the time step
    dt_high: float  # upper clamp of the time step
    gate_first: bool = True  # gate before norm; False: norm before gate

    @property
    def gated_early(self) -> bool:
        """Whether the recurrence kernel can gate its own output, because no norm precedes the gate."""
        return self.norm is None or self.gate_first
