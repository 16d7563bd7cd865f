"""`Mesh`: the axes along which a model is shared out over ranks, and the groups that each rank is in.

Ranks are numbered stage by stage; within a stage those with neighbouring numbers share its layers. Axes:

- `pp`: pipeline stages, each with some of the layers;
- `tp`: ranks that share every layer of a stage;
- `ep`: ranks of a stage that have whole experts. They are the ranks of `tp`, which share the other parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.types import QuireError

MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class Mesh:
    """The shape of a group of ranks."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, tp: int, pp: int, ep: int) -> Mesh:
        """Returns the mesh of these flags: `ep` alone has as many ranks in a stage as it says."""
        return cls(ep if tp == 1 else tp, pp, ep)

    def __post_init__(self) -> None:
        if self.ep not in (1, self.tp):
            what = f"ep={self.ep} does not fit tp={self.tp}: whole experts are on all ranks of a stage, or on none."
            raise QuireError("invalid_parameter", what, "Use the same number for both, or one of them.", param="ep")
        if self.size > MAX_RANKS:
            what = f"tp={self.tp} times pp={self.pp} are {self.size} ranks, more than {MAX_RANKS}."
            raise QuireError("invalid_parameter", what, "Use fewer ranks.", param="tp")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp

    @property
    def answering(self) -> int:
        """The rank that samples: the first of the last stage."""
        return self.tp * (self.pp - 1)

    def place(self, rank: int) -> tuple[int, int]:
        """Returns a rank's stage, and its index among the ranks that share this stage's layers."""
        return divmod(rank, self.tp)

    def rank(self, stage: int, index: int) -> int:
        return stage * self.tp + index

    def tensor_group(self, rank: int) -> list[int]:
        """Returns the ranks that share the layers of this rank."""
        stage = self.place(rank)[0]
        return [self.rank(stage, index) for index in range(self.tp)]

    def pipeline(self, rank: int) -> list[int]:
        """Returns the ranks that pass activations on to each other, by stage."""
        index = self.place(rank)[1]
        return [self.rank(stage, index) for stage in range(self.pp)]
