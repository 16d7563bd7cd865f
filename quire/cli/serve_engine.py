"""Entry point of the engine process: `quire serve` starts `python -m quire.cli.serve_engine ADDRESS`."""

from __future__ import annotations

import os
import sys

from quire.cli.output import show_warnings_plainly
from quire.engine.host.process import run_engine_process
from quire.startup.build_engine import build_engine

if __name__ == "__main__":
    show_warnings_plainly()
    code = run_engine_process(sys.argv[1], build_engine)
    if code:  # exit without cleanup: after a lost GPU, torch's cleanup aborts and replaces the exit code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
