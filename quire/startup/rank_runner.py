"""Builds what one rank of a group runs: a `Runner` on the last pipeline stage, a `StageRunner` on the stages before it.

The process of a rank calls it, and tests whose ranks are threads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.cache.memory import MemoryPlan
from quire.config import Config
from quire.models.loading.device_memory import available_memory
from quire.models.model import Model
from quire.parallel import Communicator
from quire.parallel.pipes import Pipe
from quire.ranks.rank_loop import RankLink, RankLoop, StageLoop
from quire.ranks.shared_sampler import SharedSampler, StageSampler
from quire.runtime.rows import DeviceRows
from quire.runtime.stage_runner import StageInput, StageRunner
from quire.sampling.sampler import Sampler, TokenSampler
from quire.startup.assemble import build_runner
from quire.startup.cache_plan import allocate_cache, plan_model_memory
from quire.startup.defaults import resolve_limits


def build_rank(
    model: Model,
    config: Config,
    max_model_len: int,
    device: torch.device,
    link: RankLink,
    communicator: Communicator,
    pipe: Pipe | None,
    agree: Callable[[MemoryPlan], MemoryPlan],
    *,
    weights: int = 0,
    num_ranks: int = 1,
    on_step: Callable[[int], None] = lambda step: None,
    on_regroup: Callable[[bytes], None] | None = None,
) -> RankLoop | StageLoop:
    """Returns the loop of a rank. `pipe`: None without pipeline stages; `num_ranks`: those that share the memory."""
    if pipe is not None and pipe.stage < pipe.count - 1:
        limits = resolve_limits(config, device)
        available = available_memory(device) // num_ranks
        memory = agree(plan_model_memory(model, config, limits, device, available, weights, max_model_len))
        checksums = config.cache.swap_checksums
        store, memory = allocate_cache(memory, device, device.type == "cpu" if checksums is None else checksums)
        rows = DeviceRows(limits.max_rows, max_model_len, list(model.specs), device)
        return StageLoop(StageRunner(model, store, rows, pipe), link, on_step, on_regroup)

    stage = None if pipe is None else StageInput(pipe)

    def share_samples(sampler: Sampler) -> TokenSampler:
        shared: TokenSampler = sampler
        if communicator.size > 1:
            shared = SharedSampler(sampler, communicator, source=0)
        return shared if stage is None else StageSampler(shared, stage)

    runner, _ = build_runner(
        model,
        config,
        max_model_len,
        device,
        weights=weights,
        share_samples=share_samples,
        incoming=stage or (lambda: None),
        agree=agree,
        num_ranks=num_ranks,
    )
    return RankLoop(runner, link, answers=communicator.rank == 0, on_step=on_step, on_regroup=on_regroup, stage=stage)
