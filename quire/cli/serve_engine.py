"""Entry point of the engine process: `quire serve` starts `python -m quire.cli.serve_engine ADDRESS`.

Passes the engine that `startup.early_init` builds to `engine.host.process`, which does not import torch, and limits how
much CPU time this process takes from the HTTP process.
"""

from __future__ import annotations

import gc
import os
import sys

from quire.cli.output import show_warnings_plainly
from quire.config import Config
from quire.engine.host.process import Built, ready_message, run_engine_process
from quire.startup.early_init import open_engine

# OpenMP threads wait for each other by spinning. While the HTTP process occupies a core, they spin for a thread that is
# not scheduled: a step under load then takes 3.6 s instead of 1.2 s. This spin count covers the time between two
# operations, after which a thread sleeps. It must be set before torch loads OpenMP. (Details: docs/log.md.)
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def build(config: Config) -> Built:
    parts = open_engine(config)
    from quire.startup.assemble import (
        lower_precision,  # imported late: torch takes seconds, and `open_engine` raises its errors before that
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
    gc.freeze()  # these objects live as long as the process, so later collections skip them
    return Built(parts.engine, ready, parts.desk)


if __name__ == "__main__":
    show_warnings_plainly()
    code = run_engine_process(sys.argv[1], build)
    if code:  # exit without cleanup: after a lost GPU, torch's cleanup aborts and replaces the exit code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
