"""`Build`: all that a model's modules need to know when they are built, besides the model's own config.

The loader makes one and passes it to a family, which passes it to every layer. Nothing else reaches a layer: types,
kernels, the scheme of each tensor and the group of ranks all come from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quire.kernels.table import Ops
from quire.layers.quant.scheme import Scheme
from quire.layers.quant.schemes import Schemes
from quire.layers.split import HeadShare, InSplit, OutSplit, merged_rows, share_of_width, share_out
from quire.layers.weights import Span, Weight
from quire.parallel import ALONE, Communicator


@dataclass(frozen=True, slots=True)
class Build:
    """How a model is built. Immutable; the `with_` methods return a changed copy."""

    dtype: torch.dtype  # of the computation
    cache_dtype: torch.dtype  # of keys and values in the cache
    device: torch.device  # of the modules' own tables; weights are on meta until they are loaded
    page_tokens: int
    ops: Ops
    schemes: Schemes  # how each linear weight is stored and applied
    communicator: Communicator = ALONE  # the ranks that share each layer
    whole_experts: bool = False  # each of these ranks has whole experts (expert parallel), not a share of each
    packing: str = ""  # how keys and values are packed, see `CacheSpec`; "": they are of `cache_dtype`
    whole_layers: frozenset[int] = frozenset()  # layers whose keys and values are not packed

    @classmethod
    def plain(cls, dtype: torch.dtype, ops: Ops, scheme: Scheme | None = None) -> Build:
        """Returns the build of single layers outside a model, for trials and tests. `scheme`: `Dense` by default."""
        if scheme is None:
            from quire.layers.quant.dense import Dense

            scheme = Dense(ops)
        return cls(dtype, dtype, torch.device("cpu"), 16, ops, Schemes(scheme))

    def with_scheme(self, scheme: Scheme) -> Build:
        """Returns the build of layers that all have this scheme."""
        return replace(self, schemes=Schemes(scheme))

    def with_communicator(self, communicator: Communicator, whole_experts: bool = False) -> Build:
        """Returns the build of one rank of this group."""
        return replace(self, communicator=communicator, whole_experts=whole_experts)

    # -- this rank's share of a layer -------------------------------------------------------------------------------

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadShare:
        """Returns the heads of attention that this rank computes."""
        return HeadShare.of(num_heads, num_kv_heads, self.communicator.rank, self.communicator.size)

    def span(self, width: int) -> Span:
        """Returns this rank's span of an inner width."""
        return share_of_width(width, self.communicator.rank, self.communicator.size)

    def vocabulary(self, size: int) -> list[Span]:
        """Returns the tokens of each rank, whose vectors and logits it has."""
        return share_out(size, self.communicator.size)

    def split_outputs(self, matrices: Sequence[tuple[int, Span]]) -> OutSplit | None:
        """Returns the split of a linear layer that merges matrices, each (rows, this rank's rows); None: one rank."""
        if self.communicator.size == 1:
            return None
        return OutSplit(merged_rows([rows for rows, _ in matrices], [span for _, span in matrices]))

    def split_inputs(self, span: Span, *, reduces: bool = True) -> InSplit | None:
        """Returns the split of a linear layer whose inputs are this rank's `span`; None: one rank. See `InSplit`."""
        return None if self.communicator.size == 1 else InSplit(span, reduces)

    @property
    def exchanges_experts(self) -> bool:
        return self.whole_experts and self.communicator.size > 1

    def cut_rows(self, weight: Weight, matrices: Sequence[tuple[int, Span]]) -> Weight:
        """Returns this rank's rows of a weight that merges matrices, each (rows, this rank's rows)."""
        split = self.split_outputs(matrices)
        return weight if split is None else weight.cut(split.share)
