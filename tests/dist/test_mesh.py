"""The mesh of ranks: numbers, groups and what is refused."""

from __future__ import annotations

import pytest

from quire.parallel.mesh import Mesh
from quire.types import QuireError


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 3), (2, 2), (3, 4)])
def test_every_rank_has_one_place(tp: int, pp: int) -> None:
    mesh = Mesh(tp, pp)
    assert [mesh.rank(*mesh.place(rank)) for rank in range(mesh.size)] == list(range(tp * pp))
    for rank in range(mesh.size):
        assert rank in mesh.tensor_group(rank) and rank in mesh.pipeline(rank)
        assert len(mesh.tensor_group(rank)) == tp and len(mesh.pipeline(rank)) == pp
        assert set(mesh.tensor_group(rank)) & set(mesh.pipeline(rank)) == {rank}
    assert mesh.place(mesh.answering) == (pp - 1, 0)


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(QuireError, match="tp=16 times pp=8 are 128 ranks, more than 64"):
        Mesh(16, 8)
