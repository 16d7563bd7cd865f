"""Builds the engine inside its own process: the engine, its ready message and its grammar compile queue.

`quire.cli.serve_engine` and the engine process of `quire.chaos` pass `build_engine` to `run_engine_process`.
"""

from __future__ import annotations

import gc
import os

from quire.config import Config
from quire.engine.host.process import Built, ready_message
from quire.startup.early_init import open_engine

# OpenMP threads wait for each other by spinning. While the HTTP process occupies a core, they spin for a thread that is
# not scheduled: a step under load then takes 3.6 s instead of 1.2 s. This spin count covers the time between two
# operations, after which a thread sleeps. It must be set before torch loads OpenMP. (Details: docs/log.md.)
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def build_engine(config: Config) -> Built:
    """Returns the engine of this process with its ready message and grammar compile queue."""
    parts = open_engine(config)
    # Imported late: torch takes seconds, and `open_engine` raises its errors before that.
    from quire.startup.assemble import lower_precision

    ready = ready_message(
        parts.engine,
        vocab_size=parts.edge.vocab_size,
        max_len=parts.edge.max_len,
        eos_ids=parts.edge.eos_ids,
        defaults=parts.edge.defaults,
        model=config.model.model,
        dtype=parts.dtype,
        memory=parts.memory.to_json(),
        lower=lower_precision(config, parts),
    )
    if parts.grammars is not None:
        parts.grammars.warm()
    gc.collect()
    gc.freeze()  # these objects live as long as the process, so later collections skip them
    return Built(parts.engine, ready, parts.grammars)
