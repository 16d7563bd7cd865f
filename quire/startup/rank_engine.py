"""Starts the ranks that a config asks for, and returns the workers of their group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.cache.memory import MemoryPlan
from quire.config import Config
from quire.config_build import engine_settings
from quire.engine.speculation.build import parse_speculate
from quire.engine.workers import Workers
from quire.machine import read_machine
from quire.parallel.mesh import Mesh
from quire.parallel.topology import Topology, read_topology
from quire.ranks.launch import LocalRanks
from quire.ranks.messages import RankLoaded
from quire.startup.defaults import pick_device
from quire.types import QuireError


@dataclass(frozen=True, slots=True)
class RunningRanks:
    """A group of ranks that wait for plans."""

    workers: Workers
    memory: MemoryPlan
    loaded: RankLoaded


def start_ranks(config: Config) -> RunningRanks:
    """Returns the group of the config's ranks."""
    check_ranks(config)
    topology = None if config.parallel.topology is None else read_topology(Path(config.parallel.topology))
    mesh = _mesh(config, topology)
    threads = config.engine.threads or max(1, read_machine().num_usable_cores // mesh.size)
    settings = {**engine_settings(config), "threads": threads}
    ranks = LocalRanks(settings, mesh, config.parallel.rank_timeout, config.parallel.spare_rank, topology)
    try:
        memory = ranks.agree()
    except BaseException:
        ranks.close()
        raise
    return RunningRanks(ranks.group(), memory, ranks.loaded[mesh.answering])


def _mesh(config: Config, topology: Topology | None) -> Mesh:
    parallel = config.parallel
    if topology is None:
        return Mesh.of(parallel.tp, parallel.pp, parallel.ep)
    stages = len(topology.nodes)
    if parallel.pp != stages or parallel.tp != 1 or parallel.ep != 1:
        what = f"The topology has {stages} nodes, with one pipeline stage each"
        raise _refuse("pp", what, f"Use --pp {stages}, without --tp and --ep.")
    return Mesh(pp=stages)


def check_ranks(config: Config) -> None:
    """Raises an error for settings that a group of ranks does not have."""
    if pick_device(config.engine.device).type != "cpu":
        raise _refuse("device", "Several ranks run on CPUs only", "Use --device cpu, or one rank.")
    setting = parse_speculate(config.engine.speculate)
    if setting.draft_model is not None or setting.head:
        raise _refuse("speculate", "A draft model does not run on several ranks", "Use other proposers, or one rank.")
    if config.engine.verify != "exact":
        raise _refuse("verify", "Verification by rejection does not run on several ranks", "Use exact, or one rank.")


def _refuse(name: str, what: str, hint: str) -> QuireError:
    return QuireError("invalid_parameter", f"{what}.", hint, param=name)
