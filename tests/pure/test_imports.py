"""The rooms of `quire`, its first-level packages and modules, import each other without a cycle.

The contracts in pyproject.toml name what a room must not import. This test finds a cycle that no contract names.
"""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

ROOT = "quire"


def rooms() -> dict[str, set[str]]:
    """For each room the rooms that its modules import, also inside functions and for type checking only."""
    graph = grimp.build_graph(ROOT, cache_dir=None)
    found = sorted(graph.find_children(ROOT))
    for room in found:
        graph.squash_module(room)
    return {room: graph.find_modules_directly_imported_by(room) & set(found) - {room} for room in found}


def cycle(imports: Mapping[str, set[str]]) -> list[str]:
    """The rooms along one cycle, the first one repeated at the end; empty if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_rooms_import_each_other_without_a_cycle() -> None:
    found = rooms()
    assert len(found) > 15 and found["quire.cache"] >= {"quire.types", "quire.config"}
    # graphlib takes edges to predecessors, so it names a cycle from the imported room to the importing one.
    assert not cycle(found), " <- ".join(cycle(found))


@pytest.mark.parametrize(("room", "imported"), [("quire.types", "quire.cli"), ("quire.bench", "quire.chaos")])
def test_a_cycle_is_found(room: str, imported: str) -> None:
    found = rooms()
    found[room] = found[room] | {imported}
    assert {room, imported} <= set(cycle(found))
