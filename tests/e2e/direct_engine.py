"""The real engine without a server: `python -m tests.e2e.direct_engine ROWS TOKENS CORE`, on one core of the machine.

For each line on stdin it runs one batch and prints CPU seconds and steps, so that it can take turns with a server.
"""

from __future__ import annotations

import json
import os
import sys
import time

from quire.config import Config
from quire.config_build import override_config
from quire.startup.assemble import assemble
from quire.types import SamplingParams

SETTINGS = {"threads": 1, "max_model_len": 1024, "cache_memory": 200 << 20, "host_memory": 0}
PROMPT = "Once upon a time there was a small engine that"


def main(num_rows: int, num_tokens: int, core: int) -> None:
    os.sched_setaffinity(0, {core})
    parts = assemble(override_config(Config(), SETTINGS))
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for line in sys.stdin:
        for index in range(num_rows):
            for request in parts.edge.requests(parts.edge.encode(f"{PROMPT} {index}"), params, salt=line.encode()):
                parts.engine.add(request)
        steps, before = parts.engine.scheduler.stats.steps, time.process_time()
        parts.engine.run_until_idle()
        used, count = time.process_time() - before, parts.engine.scheduler.stats.steps - steps
        print(json.dumps({"cpu_seconds": used, "steps": count}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
