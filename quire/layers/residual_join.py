"""Adds a block's output to the residual stream, at the end of attention and feed-forward blocks."""

from __future__ import annotations

from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.layers.norm import Norm, RMSNorm


class ResidualJoin(nn.Module):
    """Adds an output inside the block's last product, or norms and scales it first where the model does."""

    def __init__(self, norm: Norm | None = None, scale: float = 1.0):
        super().__init__()
        self.norm = norm
        self.scale = scale

    @property
    def is_plain(self) -> bool:
        """Whether the output is added without a norm or a scale."""
        return self.norm is None and self.scale == 1.0

    def forward(self, last: Linear, x: Tensor, stream: Tensor) -> Tensor:
        """Returns stream + last(x), with `last` the block's last product. The result may take the stream's memory."""
        return last(x, residual=stream) if self.is_plain else self.add(last(x), stream)

    def add(self, out: Tensor, stream: Tensor) -> Tensor:
        """Returns the stream plus a block's output, in the stream's memory."""
        if isinstance(self.norm, RMSNorm):
            return self.norm.add_to(stream, out, self.scale)
        if self.norm is not None:
            out = self.norm(out)
        return stream.add_(out, alpha=self.scale)
