"""An engine process without a model: the real scheduler, cache index and loop around a device that repeats.

In a ChatML prompt it says what the last user message said, so a test can put any words into the model's mouth; any
other prompt it repeats for ever. `STUB_STEP_SECONDS` makes each step take that long, `STUB_START_SECONDS` the start.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from quire.cache.index import CacheIndex
from quire.config import Config
from quire.engine.host.process import Built, ready_message, run_engine_process
from quire.engine.limits import SchedulerLimits
from quire.engine.loop import Engine
from quire.engine.scheduler import Scheduler
from quire.types import CacheSpec, Plan, RowInit, StepOutput, TokenLogprobs

TURN, END = 1, 2  # <|im_start|> and <|im_end|> of SmolLM2
USER = 4093  # the token "user" after <|im_start|>
VOCAB = 49152


class Parrot:
    """Implements `Workers`."""

    def __init__(self) -> None:
        self._scripts: dict[int, list[int]] = {}
        self._places: dict[int, int] = {}
        self._rows: dict[int, RowInit] = {}
        self._pause = float(os.environ.get("STUB_STEP_SECONDS", "0"))

    def forward(self, plan: Plan) -> Plan:
        for row in plan.added:
            self._rows[row.row] = row
            self._scripts[row.row] = script_of(row.tokens[: row.prompt_len])
            self._places[row.row] = len(row.tokens) - row.prompt_len
        if self._pause:
            time.sleep(self._pause)
        return plan

    def warm_ups(self) -> Iterator[None]:
        return iter(())

    def sample(self, forward: Plan, masks: Mapping[int, bytes] | None = None) -> _Done:
        output = StepOutput(forward.step, [])
        for index, row in enumerate(forward.rows):
            params = self._rows[row.row].params
            if params.prompt_logprobs is not None and row.start < self._rows[row.row].prompt_len:
                tokens = self._rows[row.row].tokens[max(1, row.start) : row.start + row.count]
                output.prompt_logprobs[index] = [logprob_of(token) for token in tokens]
            if params.pooling is not None and row.wants_sample:
                prompt = self._rows[row.row].tokens
                output.pooled[index] = [float(prompt[-1]), float(sum(prompt)) / len(prompt), 2.0]
            if not row.wants_sample:
                output.tokens.append([])
                continue
            script, place = self._scripts[row.row], self._places[row.row]
            token = script[place % len(script)]
            self._places[row.row] += 1
            output.tokens.append([token])
            if params.logprobs is not None:
                output.logprobs[index] = [logprob_of(token)]
        return _Done(output)

    def close(self) -> None:
        pass


class _Done:
    def __init__(self, output: StepOutput):
        self._output = output

    def wait(self) -> StepOutput:
        return self._output


def logprob_of(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, 1, [token, 100], [-0.5, -1.5])


def script_of(prompt: list[int]) -> list[int]:
    starts = [place for place, token in enumerate(prompt[:-1]) if token == TURN and prompt[place + 1] == USER]
    if not starts:
        return prompt
    said = prompt[starts[-1] + 3 :]  # after the role and its line break
    return [*(said[: said.index(END)] if END in said else said), END]


def build(config: Config) -> Built:
    time.sleep(float(os.environ.get("STUB_START_SECONDS", "0")))
    max_len = config.model.max_model_len or 4096
    limits = SchedulerLimits(
        max_rows=config.scheduler.max_rows or 64,
        max_batch_tokens=config.scheduler.max_batch_tokens or 8192,
        chunk_tokens=8192,
        max_waiting=config.scheduler.max_waiting,
        max_waiting_tokens=config.scheduler.max_waiting_tokens,
    )
    spec = CacheSpec("full", "paged", (0,), (1,), "float32")
    cache = CacheIndex([spec], [config.cache.num_pages or 4096], None)
    engine = Engine(Scheduler(cache, limits), Parrot())
    memory: dict[str, Any] = {"device": "none"}
    defaults: dict[str, Any] = {"top_p": 0.95}  # told to clients that ask what is in force; the parrot needs none
    ready = ready_message(engine, vocab_size=VOCAB, max_len=max_len, eos_ids=(END,), defaults=defaults, model="parrot",
                          dtype="float32", memory=memory, lower={})  # fmt: skip
    return Built(engine, ready)


if __name__ == "__main__":
    sys.exit(run_engine_process(sys.argv[1], build))
