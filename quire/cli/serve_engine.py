"""The entry of the engine process: `quire serve` starts `python -m quire.cli.serve_engine ADDRESS`.

It only ties `assemble`, which knows torch, to `engine.process`, which does not.
"""

from __future__ import annotations

import sys

from quire.cli.output import show_warnings_plainly
from quire.config import Config
from quire.engine.process import Built, ready_message, run_engine_process


def build(config: Config) -> Built:
    from quire.assemble import assemble  # torch takes seconds, and the wrong message should not wait for it

    parts = assemble(config)
    parts.engine.do_chore()  # what one request needs: the first client should not wait for a compiler
    ready = ready_message(
        parts.engine,
        vocab_size=parts.edge.vocab_size,
        max_len=parts.edge.max_len,
        eos_ids=parts.edge.eos_ids,
        defaults=parts.edge.defaults,
        model=config.model.model,
        dtype=parts.dtype,
        memory=parts.memory.to_json(),
    )
    if parts.desk is not None:
        parts.desk.warm()
    return Built(parts.engine, ready, parts.desk)


if __name__ == "__main__":
    show_warnings_plainly()
    sys.exit(run_engine_process(sys.argv[1], build))
