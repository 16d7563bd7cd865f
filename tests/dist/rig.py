"""Groups of ranks that are threads of the test's process, as the workers of an engine.

Each rank loads its own share of a checkpoint once. Every engine made from it has rank loops of its own, in threads that
end when the engine is closed.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from quire.cache.memory import MemoryPlan
from quire.config import Config
from quire.config_build import override_config
from quire.engine.loop import Engine
from quire.models.model import Model
from quire.models.stages import Stage
from quire.parallel.in_memory import ThreadCommunicator, make_group, make_pipes
from quire.parallel.pipes import Pipe
from quire.ranks.group import RankGroup
from quire.ranks.thread_links import ThreadLink
from quire.startup.assemble import engine_of
from quire.startup.rank_runner import build_rank
from tests.cpu.families.harness import CHUNK, PAGE_TOKENS, Case, Family, Witness, run
from tests.cpu.rig import CPU, LateDevice, load

MAX_LEN = 256
SECONDS = 60.0  # deadline of an operation, on a machine that may be busy


class ThreadRanks:
    """The ranks of one checkpoint, with their models."""

    def __init__(self, folder: Path, tp: int = 1, pp: int = 1, ep: int = 1, page_tokens: int = PAGE_TOKENS, **how: Any):
        self.tp, self.pp = tp, pp
        self.communicators: list[ThreadCommunicator] = []  # by rank: stage by stage
        self.models: list[Model] = []
        for stage in range(pp):
            for communicator in make_group(tp, SECONDS):
                self.communicators.append(communicator)
                model = load(
                    folder, page_tokens, communicator=communicator, stage=Stage(stage, pp), whole_experts=ep > 1, **how
                )
                self.models.append(model)
        self._open: list[Engine] = []

    def engine(self, *, late: bool = False, drafter: Any = None, **knobs: Any) -> Engine:
        """Returns an engine whose workers are these ranks."""
        knobs = {
            "max_rows": 16,
            "max_batch_tokens": 64,
            "num_pages": 600,
            "page_tokens": PAGE_TOKENS,
            "step_target_ms": 0,
            "speculate": "off",
            "pp": self.pp,
            **knobs,
        }
        config = override_config(Config(), knobs)
        agreement = Agreement(len(self.models))
        links = [ThreadLink(rank, SECONDS) for rank in range(len(self.models))]
        pipes: list[Pipe | None] = [None] * self.tp
        if self.pp > 1:
            by_place = [make_pipes(self.pp, SECONDS) for _ in range(self.tp)]
            pipes = [by_place[place][stage] for stage in range(self.pp) for place in range(self.tp)]
        for communicator, pipe, model, link in zip(self.communicators, pipes, self.models, links, strict=True):
            arguments = (communicator, pipe, model, link, config, agreement)
            threading.Thread(target=run_rank, args=arguments, name=f"rank {communicator.rank}", daemon=True).start()
        memory = agreement.wait()
        group = RankGroup([link.engine for link in links], answering=self.tp * (self.pp - 1))
        engine = engine_of(group, memory, config, CPU, drafter)
        if late:
            engine.workers = LateDevice(engine.workers)
        self._open.append(engine)
        return engine

    def close(self) -> None:
        for engine in self._open:
            engine.workers.close()
        self._open.clear()


class Agreement:
    """Where ranks agree on the smallest of their caches."""

    def __init__(self, size: int):
        self._barrier = threading.Barrier(size + 1)
        self._plans: list[MemoryPlan] = []

    def agree(self, plan: MemoryPlan) -> MemoryPlan:
        self._plans.append(plan)
        self._barrier.wait(SECONDS)
        return self._smallest(plan)

    def wait(self) -> MemoryPlan:
        self._barrier.wait(SECONDS)
        return self._smallest(self._plans[0])

    def _smallest(self, plan: MemoryPlan) -> MemoryPlan:
        units = tuple(map(min, zip(*(other.num_units for other in self._plans), strict=True)))
        hosts = [other.num_host_units for other in self._plans]
        host = None if None in hosts else tuple(map(min, zip(*(other or () for other in hosts), strict=True)))
        return replace(plan, num_units=units, num_host_units=host)


def run_rank(
    communicator: ThreadCommunicator,
    pipe: Pipe | None,
    model: Model,
    link: ThreadLink,
    config: Config,
    agreement: Agreement,
) -> None:
    """Runs one rank until its link ends. If it fails, so do the operations of the others."""
    try:
        build_rank(model, config, MAX_LEN, CPU, link.rank, communicator, pipe, agreement.agree, num_ranks=8).run()
    except BaseException:
        communicator.leave()
        link.rank.end()
        raise


class GroupCase(Case):
    """A family on several ranks. What it must sample is what one rank samples."""

    def __init__(self, one: Case, tp: int = 1, pp: int = 1, ep: int = 1):
        self.one = one
        self.family, self.folder, self.device = one.family, one.folder, one.device
        self.page_tokens, self.prompts, self.model = one.page_tokens, one.prompts, one.model
        self.ranks = ThreadRanks(one.folder, tp, pp, ep)

    @cached_property
    def first_run(self) -> tuple[Engine, Witness, list[list[int]]]:
        engine = self.engine(chunk_tokens=CHUNK)
        witness = Witness(engine)
        tokens = run(engine, self.prompts)
        engine.workers = witness.inner
        return engine, witness, tokens

    @cached_property
    def expected(self) -> list[list[int]]:
        return self.one.first_run[2]

    def engine(self, model: Model | None = None, **knobs: Any) -> Engine:
        assert model is None
        return self.ranks.engine(**{"max_rows": 8, "num_pages": 400, **self.family.knobs, **knobs})


def family_named(name: str, families: list[Family]) -> Family:
    return next(family for family in families if family.name == name)
