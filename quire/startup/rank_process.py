"""The process of one rank: it joins its group, loads its share of the model, and executes the engine's plans.

`quire.ranks.launch` starts it as `python -m quire.startup.rank_process DESCRIPTOR` with one end of a pair of sockets.
It ends when the engine closes the other end, which the system does when the engine's process ends in any way.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from quire.cache.memory import MemoryPlan
from quire.config import Config
from quire.config_build import override_config
from quire.ranks import messages
from quire.ranks.messages import AgreedCache, RankFailed, RankLoaded, RankReady, Regroup, StartRank
from quire.ranks.socket_links import FrameSocket
from quire.types import QuireError


def run_rank_process(descriptor: int, *, is_spare: bool = False) -> int:
    """Runs the rank from start to end. Returns its exit code. `is_spare`: it waits for its start with torch loaded."""
    if is_spare:
        import quire.startup.rank_runner  # noqa: F401
    frames = FrameSocket(socket.socket(fileno=descriptor))
    try:
        first = frames.read()
        start = None if first is None else messages.decode_to_rank(first)
        if not isinstance(start, StartRank):
            return 1
        _run(start, frames)
        return 0
    except QuireError as error:
        failed = RankFailed(code=error.code, what=error.what, hint=error.hint, param=error.param)
    except Exception as error:
        failed = RankFailed(code="engine_failed", what=f"A rank failed: {type(error).__name__}: {error}.")
    with contextlib.suppress(OSError):  # the engine may be gone
        frames.write(messages.encode(failed))
    print(f"quire rank: {failed.error()}", file=sys.stderr)
    return 1


def _run(start: StartRank, frames: FrameSocket) -> None:
    # Imported late: torch takes seconds, and a wrong start message must fail before that.
    import torch

    from quire.models.loading.loader import load_model
    from quire.models.stages import Stage
    from quire.parallel.shared_memory import GroupMemory, SharedMemoryCommunicator, create_group_memory
    from quire.parallel.socket_pipes import SocketPipe, listen
    from quire.startup.cache_plan import find_files
    from quire.startup.defaults import pick_device, resolve_page_tokens
    from quire.startup.model_digest import model_digest
    from quire.startup.rank_runner import build_rank

    with contextlib.suppress(OSError):  # the name that `ps` and the chaos gate see, from now on
        Path("/proc/self/comm").write_text("quire-rank")
    config = override_config(Config(), start.settings)
    device = pick_device(config.engine.device)
    torch.set_num_threads(config.engine.threads or 1)

    def open_memory(path: str) -> GroupMemory:
        """Returns the group's memory; that of a rank without others on this machine is its own."""
        if path:
            return GroupMemory(Path(path))
        own = create_group_memory(start.size)
        try:
            return GroupMemory(own)
        finally:
            own.unlink()

    communicator = SharedMemoryCommunicator(open_memory(start.memory), start.rank, start.size, start.seconds)
    pipe = None
    if start.stages > 1:
        servers = [listen(address) for address in start.pipes[start.stage]]
        pipe = SocketPipe(
            start.stage,
            start.stages,
            servers,
            start.secret,
            start.seconds,
            lambda: communicator.is_cancelled or frames.interrupts(),
        )
        pipe.open(start.generation, start.pipes)
    files = find_files(config, None)
    with warnings.catch_warnings():
        if start.rank or start.stage:  # all ranks say the same about the model
            warnings.simplefilter("ignore")
        loaded = load_model(
            files,
            dtype=config.model.dtype,
            device=device,
            max_model_len=config.model.max_model_len,
            page_tokens=resolve_page_tokens(config, device),
            random_weights=config.model.random_weights,
            quant=config.model.quant,
            kv_dtype=config.cache.kv_dtype,
            kv_skip=config.cache.kv_dtype_skip,
            deterministic=config.engine.deterministic,
            kernels=config.engine.kernels,
            communicator=communicator,
            whole_experts=config.parallel.ep > 1,
            stage=Stage(start.stage, start.stages),
        )

    def agree(memory: MemoryPlan) -> MemoryPlan:
        """Returns the plan with the units that the engine found to fit on all ranks."""
        found = RankLoaded(
            vocab_size=loaded.model.vocab_size,
            max_model_len=loaded.max_model_len,
            eos_ids=list(loaded.eos_ids),
            defaults=loaded.generation_defaults,
            dtype=loaded.dtype,
            weights=loaded.weights_bytes,
            memory=memory,
            digest=model_digest(files),
        )
        frames.write(messages.encode(found))
        frame = frames.read()
        agreed = None if frame is None else messages.decode_to_rank(frame)
        if not isinstance(agreed, AgreedCache):
            raise QuireError("engine_lost", "The engine ended before it had agreed on the size of the cache.")
        host = None if agreed.num_host_units is None else tuple(agreed.num_host_units)
        return replace(memory, num_units=tuple(agreed.num_units), num_host_units=host)

    def regroup(frame: bytes) -> None:
        """Joins the group again, some ranks of which were replaced."""
        message = messages.decode_to_rank(frame)
        assert isinstance(message, Regroup)
        communicator.rejoin(open_memory(message.memory))
        if pipe is not None:
            pipe.open(message.generation, start.pipes)
        frames.write(messages.encode(RankReady()))

    loop = build_rank(
        loaded.model,
        config,
        loaded.max_model_len,
        device,
        frames,
        communicator,
        pipe,
        agree,
        weights=loaded.weights_bytes,
        num_ranks=start.num_ranks,
        on_step=communicator.enter_step,
        on_regroup=regroup,
    )
    if loaded.model.ops.native is not None:
        torch.set_num_threads(1)  # the native thread pool uses the cores
    frames.write(messages.encode(RankReady()))
    try:
        loop.run()
    finally:
        communicator.leave()


if __name__ == "__main__":
    code = run_rank_process(int(sys.argv[1]), is_spare=sys.argv[2:] == ["spare"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
