"""How a linear layer is split over the ranks of a group, and how heads and inner widths are shared out.

`Linear` takes a `Split`: by outputs (each rank computes some rows of the weight) or by inputs (each rank has some
columns, and the ranks' products are summed). Attention, feed-forward blocks and experts make them from `Build`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.layers.weights import Share, Span
from quire.types import QuireError

UNITS = (256, 32)  # columns of the blocks that quantized types have, the widest first


@dataclass(frozen=True, slots=True)
class OutSplit:
    """A rank computes some of the outputs."""

    rows: tuple[Span, ...]  # of the merged weight, ascending

    @property
    def share(self) -> Share:
        return Share(rows=self.rows)


@dataclass(frozen=True, slots=True)
class InSplit:
    """A rank has some of the inputs, and its output is its share of a sum over ranks."""

    columns: Span
    reduces: bool = True  # False: the caller sums over ranks, with other outputs at once

    @property
    def share(self) -> Share:
        return Share(columns=self.columns)


Split = OutSplit | InSplit


def share_out(total: int, size: int, unit: int = 1) -> list[Span]:
    """Returns the consecutive spans of `size` ranks, in whole units and as equal as these allow."""
    count = -(-total // unit)
    ends = [min(total, unit * (count * (rank + 1) // size)) for rank in range(size)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def share_of_width(width: int, rank: int, size: int) -> Span:
    """Returns a rank's span of an inner width: on the widest block boundaries that leave shares nearly equal."""
    for unit in UNITS:
        spans = share_out(width, size, unit)
        if width % unit == 0 and max(stop - start for start, stop in spans) * size <= 1.05 * width:
            return spans[rank]
    unit = UNITS[-1] if width % UNITS[-1] == 0 and width >= UNITS[-1] * size else 1
    spans = share_out(width, size, unit)
    if min(stop - start for start, stop in spans) == 0:
        raise cannot_split(f"an inner width of {width}", size)
    return spans[rank]


@dataclass(frozen=True, slots=True)
class HeadShare:
    """A rank's query heads and key-value heads. Its queries attend to its keys and values alone."""

    heads: Span
    kv_heads: Span
    is_first: bool = True  # no rank before this one has these key-value heads

    @property
    def num_heads(self) -> int:
        return self.heads[1] - self.heads[0]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads[1] - self.kv_heads[0]

    def elements(self, head_dim: int) -> tuple[Span, Span]:
        """Returns the elements of the merged queries, and of the merged keys, that these heads are."""
        (first, stop), (kv_first, kv_stop) = self.heads, self.kv_heads
        return (first * head_dim, stop * head_dim), (kv_first * head_dim, kv_stop * head_dim)

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, rank: int, size: int) -> HeadShare:
        """Returns a rank's heads: whole groups of a key-value head where there are enough of these.

        With fewer key-value heads than ranks each is on several ranks, which share its queries out among them.
        """
        group = num_heads // num_kv_heads
        if size <= num_kv_heads:
            first, stop = share_out(num_kv_heads, size)[rank]
            return cls((first * group, stop * group), (first, stop))
        owners = share_out(size, num_kv_heads)  # the ranks of each key-value head
        kv_head = next(index for index, (first, stop) in enumerate(owners) if first <= rank < stop)
        first, stop = owners[kv_head]
        if stop - first > group:
            raise cannot_split(f"{num_heads} query heads in {num_kv_heads} groups", size)
        low, high = share_out(group, stop - first)[rank - first]
        return cls((kv_head * group + low, kv_head * group + high), (kv_head, kv_head + 1), rank == first)


def merged_rows(sizes: Sequence[int], spans: Sequence[Span]) -> tuple[Span, ...]:
    """Returns the rows of a merged weight in which its matrices, of these sizes, have their own spans of rows."""
    found, start = [], 0
    for size, (first, stop) in zip(sizes, spans, strict=True):
        found.append((start + first, start + stop))
        start += size
    return tuple(found)


def cannot_split(what: str, size: int) -> QuireError:
    return QuireError("unsupported_split", f"{what} can't be split over {size} ranks.", "Use fewer ranks.", param="tp")
