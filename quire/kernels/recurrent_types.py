"""What the recurrent ops share: the shape of a layer's state and how it lies in its slot, and the small weights.

A recurrent layer keeps two things a row: the last inputs of its causal convolution, and one matrix a head. Both lie in
one slot, packed: a state is atomic, so it is one unit to copy, swap and evict. The convolution's part is a ring of
`conv_len` entries, indexed by position; a step writes its own entry and reads the others, so programs that share
channels need not wait for each other. A layer that is nothing but a convolution keeps the ring alone.
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
    beta_top: float = 1.0  # what the delta rule's beta comes up to; above 1 it may turn around what the state has

    @property
    def values(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def keys(self) -> int:
        return self.num_groups * self.key_dim

    @property
    def channels(self) -> int:
        """What goes through the convolution: values, keys and queries of one token."""
        return self.values + 2 * self.keys

    @property
    def matrix_elements(self) -> int:
        return self.values * self.key_dim

    @property
    def slot_elements(self) -> int:
        return self.matrix_elements + self.conv_len * self.channels

    @property
    def activation_elements(self) -> int:
        """That a token has alive at one time: the projection and what comes out of the convolution, the latter in
        float32, and the output before its norm."""
        return 4 * self.channels + 5 * self.values

    def matrices(self, state: Tensor) -> Tensor:
        """A layer's [slots, slot_elements] as the matrices in it: [slots, heads, value_dim, key_dim], a view."""
        matrices = state[:, : self.matrix_elements]
        return matrices.unflatten(1, (self.num_heads, self.value_dim, self.key_dim))

    def rings(self, state: Tensor) -> Tensor:
        """A layer's [slots, slot_elements] as the convolution's rings in it: [slots, conv_len, channels], a view."""
        return state[:, self.matrix_elements :].unflatten(1, (self.conv_len, self.channels))


@dataclass(frozen=True, slots=True)
class ConvShape:
    """Of a layer that is nothing but a convolution between two gates (LFM2)."""

    channels: int
    conv_len: int  # taps, the token itself included

    @property
    def slot_elements(self) -> int:
        return self.conv_len * self.channels

    @property
    def activation_elements(self) -> int:
        """That a token has alive at one time: both gates and the input, what is convolved, and what comes out."""
        return 6 * self.channels

    def rings(self, state: Tensor) -> Tensor:
        """A layer's [slots, slot_elements] as [slots, conv_len, channels], a view."""
        return state.unflatten(1, (self.conv_len, self.channels))


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """Of such a layer, beside its projections."""

    conv: Tensor  # [channels, 1, conv_len]
    bias: Tensor | None  # [channels]


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Of a gated delta net, beside its projections."""

    conv: Tensor  # [channels, 1, conv_len]
    a_log: Tensor  # [heads]
    dt_bias: Tensor  # [heads]; [keys] where each channel has a decay of its own
    norm: Tensor  # [value_dim]
    eps: float


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """Of a Mamba2 layer, beside its projections."""

    conv: Tensor  # [channels, 1, conv_len]
    conv_bias: Tensor | None  # [channels]
    a_log: Tensor  # [heads]
    dt_bias: Tensor  # [heads]
    skip: Tensor  # [heads]: how much of a value goes straight to the output
    norm: Tensor | None  # [values]; None: the output is gated and not normed
    eps: float
    norm_groups: int  # parts the output is normed in
    dt_low: float  # the time step is held within these
    dt_high: float
    gate_first: bool = True  # the output is gated before it is normed

    @property
    def gated_early(self) -> bool:
        """Whether the recurrence's output can be gated as it is made: nothing comes between the two."""
        return self.norm is None or self.gate_first
