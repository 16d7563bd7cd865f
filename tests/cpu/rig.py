"""An engine around a model, for tests: small pools, late devices, and plain lists of tokens in and out."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quire.config import Config
from quire.config_build import override_config
from quire.engine.loop import Engine
from quire.engine.speculation.seam import Drafter
from quire.files.source import resolve_model
from quire.models.adapters.places import Places
from quire.models.loading.loader import LoadedModel, load_model
from quire.models.model import Model
from quire.startup.assemble import build_model_engine
from quire.startup.draft_network import LoadedDraft
from quire.types import Delta, Plan, Request, SamplingParams, StepOutput

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
NUM_THREADS = torch.get_num_threads()  # for the native kernels, which go by torch's when a model is loaded


def load(folder: Path, page_tokens: int = 4, device: torch.device = CPU, dtype: str = "float32", **how: Any) -> Model:
    return load_whole(folder, page_tokens, device, dtype, **how).model


def load_whole(folder: Path, page_tokens: int = 4, device: torch.device = CPU, dtype: str = "float32",
               **how: Any) -> LoadedModel:  # fmt: skip
    """With the kernels anyone gets, or those that TEST_KERNELS names: `make paths` runs the engine's tests on both."""
    if device.type == "cpu" and not how.get("deterministic"):
        how.setdefault("kernels", os.environ.get("TEST_KERNELS", "auto"))
    files = resolve_model(str(folder))
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    try:
        return load_model(files, dtype=dtype, device=device, max_model_len=None, page_tokens=page_tokens, **how)
    finally:
        torch.set_num_threads(before)


def ragged_prompts(vocab: int, seed: int = 5) -> list[list[int]]:
    """Sixteen prompts of 1 to 60 tokens; some share a beginning, two are the same."""
    rng = random.Random(seed)
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 31, 40, 48, 60]
    prompts = [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths]
    prompts[14] = prompts[13] + prompts[14][:8]
    prompts[5] = prompts[12][:7]
    prompts[6] = list(prompts[7][:8])
    return prompts


def make_engine(
    model: Model,
    *,
    late: bool = False,
    max_len: int = 256,
    device: torch.device = CPU,
    drafter: Drafter | None = None,
    draft: LoadedDraft | None = None,
    places: Places | None = None,
    **knobs: Any,
) -> Engine:
    # Without a target time, and with drafts only where a test asks for them: whether those are worth their time is
    # measured, and the schedule has to be the same however busy the machine is.
    knobs = {"max_rows": 16, "max_batch_tokens": 64, "num_pages": 600, "page_tokens": 4, "step_target_ms": 0, **knobs}
    knobs = {"speculate": "off", **knobs}
    config = override_config(Config(), knobs)
    engine, _ = build_model_engine(model, config, max_len, device, drafter=drafter, draft=draft, places=places)
    if late:
        engine.workers = LateDevice(engine.workers)
    return engine


class LateDevice:
    """Runs nothing before someone waits for it: step N+1 is submitted while N's tokens do not exist yet."""

    def __init__(self, inner: Any):
        self._inner = inner
        self._queue: list[_LateTicket] = []
        self.submitted_ahead = 0

    def forward(self, plan: Plan) -> _LateTicket:
        self.submitted_ahead += any(t.ticket is None for t in self._queue)
        ticket = _LateTicket(self, plan)
        self._queue.append(ticket)
        return ticket

    def sample(self, forward: _LateTicket, masks: Mapping[int, bytes] | None = None) -> _LateTicket:
        forward.masks = masks
        return forward

    def run(self, upto: _LateTicket) -> None:
        while upto.ticket is None:
            ticket = self._queue.pop(0)
            ticket.ticket = self._inner.sample(self._inner.forward(ticket.plan), ticket.masks)

    def warm_ups(self) -> Iterator[None]:
        return self._inner.warm_ups()

    def close(self) -> None:
        self._inner.close()


class _LateTicket:
    def __init__(self, device: LateDevice, plan: Plan):
        self._device, self.plan = device, plan
        self.masks: Mapping[int, bytes] | None = None
        self.ticket: Any = None

    def wait(self) -> StepOutput:
        self._device.run(self)
        return self.ticket.wait()


def make_request(name: str, prompt: Sequence[int], params: SamplingParams, *, sample_index: int = 0,
                 priority: int = 0, stop_ids: frozenset[int] = frozenset()) -> Request:  # fmt: skip
    params = params.resolve()
    assert params.max_tokens is not None
    seed = params.seed or 0
    return Request(name, list(prompt), len(prompt), params, len(prompt) + params.max_tokens, stop_ids, seed,
                   sample_index, priority, arrival=float(len(name)) * 1e6 + hash(name) % 1)  # fmt: skip


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *, check: bool = True) -> list[list[int]]:  # fmt: skip
    """All prompts at once, to the end; tokens in the order of the prompts."""
    deltas = run_deltas(engine, prompts, params, check=check)
    return [[t for d in ds for t in d.token_ids] for ds in deltas]


def run_deltas(engine: Engine, prompts: Sequence[Sequence[int]],
               params: SamplingParams | Sequence[SamplingParams] = GREEDY, *,
               check: bool = True) -> list[list[Delta]]:  # fmt: skip
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    base = engine.scheduler.stats.ended
    for index, (prompt, p) in enumerate(zip(prompts, each, strict=True)):
        request = make_request(f"{base}-{index:04d}", prompt, p)
        request.arrival = float(index)
        engine.add(request)
    found: dict[str, list[Delta]] = {f"{base}-{index:04d}": [] for index in range(len(prompts))}
    while engine.has_work:
        for delta in engine.turn():
            assert delta.error is None, delta.error
            found[delta.request_id].append(delta)
        if check:
            engine.scheduler.check()
    return list(found.values())


def with_tokens(params: SamplingParams, max_tokens: int) -> SamplingParams:
    return replace(params, max_tokens=max_tokens)
