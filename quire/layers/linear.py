"""A linear layer over one or more checkpoint matrices. Attention, MLP and head consist of these.

Matrices with the same input are merged into one weight and cost one product: queries, keys and values; gate and up. The
scheme defines how the weight is stored and applied. It receives the norm before the product and the gate or the
residual addition after it, and decides which of these it fuses.
"""

from __future__ import annotations

from torch import Tensor, nn

from quire.kernels.activations import Curve
from quire.layers.adapters import LinearAdapters
from quire.layers.build import Build
from quire.layers.norm import RMSNorm
from quire.layers.quant.scheme import Activation, Scaled, apply_epilogue, apply_norm
from quire.layers.split import InSplit, Split
from quire.layers.weights import Weight, own_weights


class Linear(nn.Module):
    """A product with a merged weight, with an optional norm before it and a gate or residual addition after it."""

    weight: Tensor
    bias: Tensor | None
    whole: Tensor | None = None  # the weight with zero rows appended, if a product with these is much faster
    weight_scale: Tensor  # [out_features], of schemes with per-row scales
    bias_after: Tensor | None  # a bias that is added to the sum over ranks
    adapters: LinearAdapters | None = None  # set once the engine has an adapter for this weight

    def __init__(
        self,
        in_features: int,
        sources: list[tuple[str, int]],
        *,
        bias: bool = False,
        build: Build,
        split: Split | None = None,
    ):
        """`sources`: (checkpoint prefix, rows) of each merged matrix, in the order of their outputs. `split`: what this
        rank holds of the matrices, which `in_features` and `sources` describe as a whole.
        """
        super().__init__()
        self.ops = build.ops
        self.in_features = in_features
        self.out_features = sum(rows for _, rows in sources)
        self.scheme = build.schemes.of_all(f"{prefix}.weight" for prefix, _ in sources)
        sums = isinstance(split, InSplit)
        self.scheme.create(self, sources, bias and not sums, build.dtype)
        self.communicator = build.communicator if isinstance(split, InSplit) and split.reduces else None
        self.bias_after = None
        if split is None:
            return
        for name, weight in own_weights(self):
            setattr(self, name, weight.cut(split.share))
        self.out_features, self.in_features = split.share.size((self.out_features, self.in_features))
        if bias and sums:
            assert self.communicator is not None
            biases = [(f"{prefix}.bias", rows) for prefix, rows in sources]
            self.bias_after = Weight.stacked(biases, (), build.dtype)

    def finish(self) -> None:
        """Repacks the weights as the scheme needs. Called by the loader once the weights are loaded."""
        self.scheme.finish(self)

    def forward(
        self, x: Activation, *, norm: RMSNorm | None = None, gate: Curve | None = None, residual: Tensor | None = None
    ) -> Activation:
        """Returns norm(x) times the weight, then gate(first half) * second half, then plus `residual`.

        x [tokens, in_features] -> [tokens, out_features], or half of these columns with `gate`. The result may take
        the memory of `residual`. With `gate` it may be a `Scaled`, which only a linear of the same scheme accepts.
        """
        if self.adapters is not None and self.adapters.is_used:
            return self._with_adapters(x, norm, gate, residual)
        if self.communicator is None:
            return self.scheme.apply(self, x, norm, gate, residual)
        assert gate is None
        out = self.communicator.all_reduce(self.scheme.apply(self, x, norm, None, None))
        if self.bias_after is not None:
            out = out.add_(self.bias_after)
        return out if residual is None else residual.add_(out)

    def _with_adapters(
        self, x: Activation, norm: RMSNorm | None, gate: Curve | None, residual: Tensor | None
    ) -> Tensor:
        """As `forward`, with the adapters' updates between the product and what follows it."""
        assert self.adapters is not None and self.communicator is None, "adapters need one rank"
        if isinstance(x, Scaled):
            x = (x.values.float() * x.scale.unsqueeze(1)).to(x.dtype)
        x = apply_norm(self.ops, x, norm)
        out = self.scheme.apply(self, x, None, None, None)
        assert isinstance(out, Tensor)
        self.adapters.add_to(out, x)
        return apply_epilogue(self.ops, out, gate, residual)
