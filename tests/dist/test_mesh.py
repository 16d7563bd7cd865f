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


def test_experts_are_on_the_ranks_of_a_stage() -> None:
    assert Mesh.of(1, 1, 2) == Mesh(2, 1, 2) and Mesh.of(2, 2, 2).size == 4 and Mesh.of(3, 1, 1) == Mesh(3, 1, 1)
    with pytest.raises(QuireError, match="ep=4 does not fit tp=2"):
        Mesh.of(2, 1, 4)
