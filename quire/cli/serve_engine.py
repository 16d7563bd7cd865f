"""The entry of the engine process: `quire serve` starts `python -m quire.cli.serve_engine ADDRESS`.

It only ties `assemble`, which knows torch, to `engine.process`, which does not, and makes this process a good neighbour
of the one that answers HTTP.
"""

from __future__ import annotations

import gc
import os
import sys

from quire.cli.output import show_warnings_plainly
from quire.config import Config
from quire.engine.host.process import Built, ready_message, run_engine_process
from quire.startup.early_init import open_engine

# OpenMP's threads wait for each other by spinning. Beside a process that answers HTTP, and needs a core for it, they
# spin for a thread that is not running: under load a step takes 3.6 s instead of 1.2 s with this. Told before torch
# loads them, they spin for about as long as the next operation takes to come, and then sleep. (docs/log.md has more.)
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def build(config: Config) -> Built:
    parts = open_engine(config)
    from quire.startup.assemble import (
        lower_precision,  # torch takes seconds, and the wrong message should not wait for it
    )

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
    if parts.desk is not None:
        parts.desk.warm()
    gc.collect()
    gc.freeze()  # what is there now stays: no later collection need walk over it
    return Built(parts.engine, ready, parts.desk)


if __name__ == "__main__":
    show_warnings_plainly()
    code = run_engine_process(sys.argv[1], build)
    if code:  # without tidying up: over a GPU that is lost, torch would abort on the way and the code be gone
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
