"""How a block's output comes back to the residual stream: attention and feed-forward blocks end with it."""

from __future__ import annotations

from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.layers.norm import Norm, RMSNorm


class Join(nn.Module):
    """Added inside the last product where that is all there is to it; else normed or scaled on the way."""

    def __init__(self, norm: Norm | None = None, scale: float = 1.0):
        super().__init__()
        self.norm = norm
        self.scale = scale

    @property
    def is_plain(self) -> bool:
        """Nothing is done to what is added."""
        return self.norm is None and self.scale == 1.0

    def forward(self, last: Linear, x: Tensor, stream: Tensor) -> Tensor:
        """`last` is the block's last product and x its input; returns the stream with the block's share added,
        for which its memory may be taken"""
        return last(x, residual=stream) if self.is_plain else self.add(last(x), stream)

    def add(self, out: Tensor, stream: Tensor) -> Tensor:
        """The stream with a block's output added, in the stream's memory; for a block that does not end with a
        product."""
        if isinstance(self.norm, RMSNorm):
            return self.norm.add_to(stream, out, self.scale)
        if self.norm is not None:
            out = self.norm(out)
        return stream.add_(out, alpha=self.scale)
