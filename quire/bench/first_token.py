"""The process that `bench_start` times: opens a model, answers one prompt, and prints the time of each phase.

Reads the settings and its start time as JSON from stdin; the last line of stdout is the result as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

NUM_TOKENS = 10


def main() -> None:
    task = json.load(sys.stdin)
    try:
        result: dict[str, Any] = measure(task)
    except Exception as error:
        code, hint = getattr(error, "code", "start_failed"), getattr(error, "hint", "")
        what = getattr(error, "what", f"{type(error).__name__}: {error}.")
        result = {"code": code, "what": what, "hint": hint}
    print(json.dumps(result), flush=True)


def measure(task: dict[str, Any]) -> dict[str, float]:
    from quire.config import Config
    from quire.config_build import override_config
    from quire.files.progress import QuietProgress
    from quire.llm import LLM
    from quire.types import SamplingParams

    def elapsed() -> float:
        return time.monotonic() - float(task["started"])

    class Watch(QuietProgress):
        """Records when loading weights starts: by then torch is imported, the model is built, and trials have run."""

        tried = 0.0

        def start(self, what: str, total: int, done: int = 0) -> None:
            self.tried = elapsed()

    watch = Watch()
    with LLM(config=override_config(Config(), task["settings"]), progress=watch) as llm:
        ready = elapsed()
        prompt = [index % llm.edge.vocab_size for index in range(1, task["prompt_len"] + 1)]
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        stream = llm.stream(prompt, params)
        next(stream)
        first = elapsed()
        for _ in stream:
            pass
        return {"tried_s": watch.tried, "ready_s": ready, "first_token_s": first, "tenth_token_s": elapsed()}


if __name__ == "__main__":
    main()
