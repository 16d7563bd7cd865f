"""Faults on a real device: rows that are not finite, steps that fail; the others go on and lose nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.layers.step import Step
from quire.types import SamplingParams
from tests.cpu.rig import load, make_engine, make_request
from tests.cpu.tiny_models import make_tiny

POISON = 255  # no prompt has it and no output below, or the test says so
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class Faulty:
    """A model that goes wrong wherever a token appears: its state becomes NaN, or the whole step raises."""

    def __init__(self, model: Any, fault: str):
        self._model, self.fault = model, fault
        self.specs, self.vocab_size = model.specs, model.vocab_size
        self.max_positions, self.activation_elements = model.max_positions, model.activation_elements

    def forward(self, step: Step, caches: Mapping[str, Tensor]) -> Tensor:
        poisoned = step.tokens == POISON
        if self.fault == "raise" and poisoned.any():
            raise RuntimeError("device says no")
        if self.fault == "nan" and poisoned.any():
            row = embedding_row(self._model, POISON)
            saved = row.clone()
            row.fill_(float("nan"))  # keys and values of that token are NaN too
            try:
                return self._model.forward(step, caches)
            finally:
                row.copy_(saved)
        return self._model.forward(step, caches)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


def embedding_row(model: Any, token: int) -> Tensor:
    """Where a token's vector lies, to be written to: in a plain tensor or in a float matrix of the native kernels."""
    weight = model.embedding.weight
    if isinstance(weight, Tensor):
        return weight[token]
    matrix, lanes = weight[0], weight[0].native.lanes
    start = matrix.desc.data - matrix.memory.data_ptr()
    tiles = matrix.memory[start : start + matrix.memory.numel() - 64].view(torch.float32)
    return tiles.view(-1, matrix.shape[1], lanes)[token // lanes, :, token % lanes]


@pytest.fixture(scope="module", params=["auto", "torch"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(make_tiny("llama", Path(tmp_path_factory.mktemp("llama")))[1], kernels=request.param)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("fault", ["nan", "raise"])
def test_one_bad_request_ends_alone(tiny: Any, fault: str, depth: int) -> None:
    prompts = [[(7 * i + j) % 200 for j in range(5 + i)] for i in range(6)]
    prompts[2] = [3, 4, POISON, 6, 7, 8, 9]
    clean = make_engine(tiny)
    model = Faulty(tiny, fault)
    faulty = make_engine(model, depth=depth, late=depth == 2, num_pages=60)
    results = []
    for engine in (clean, faulty):
        for index, prompt in enumerate(prompts):
            request = make_request(f"r{index}", prompt, GREEDY)
            request.arrival = float(index)
            engine.add(request)
        tokens: dict[str, list[int]] = {f"r{i}": [] for i in range(6)}
        errors = {}
        while engine.has_work:
            for delta in engine.turn():
                tokens[delta.request_id] += delta.token_ids
                if delta.error_code:
                    errors[delta.request_id] = delta.error_code
            engine.scheduler.check()
        results.append((tokens, errors))
    (expected, _), (got, errors) = results
    assert not any(POISON in out for name, out in expected.items() if name != "r2"), "choose another token"
    assert errors == {"r2": "bad_logits" if fault == "nan" else "step_failed"}
    for index in (0, 1, 3, 4, 5):
        assert got[f"r{index}"] == expected[f"r{index}"]
    # Pages that held NaN come around again: nobody may notice.
    model.fault = ""
    for round_ in range(4):
        for index in range(6):
            name = f"again {round_}/{index}"
            faulty.add(make_request(name, [(11 * index + j) % 200 for j in range(9 + 2 * round_)], GREEDY))
        assert all(delta.error_code is None for delta in faulty.run_until_idle())
    assert all(torch.isfinite(t).all() for t in caches(faulty)), "every NaN was cleared"


def caches(engine: Any) -> list[Tensor]:
    workers = engine.workers
    while not hasattr(workers, "store"):
        workers = workers.inner if hasattr(workers, "inner") else workers._inner
    return list(workers.store.tensors.values())


@pytest.mark.parametrize("checksums", [True, False])
def test_a_page_that_changed_on_the_host_is_computed_again(tiny: Any, checksums: bool) -> None:
    """Without the checksum the wrong bytes would be believed: the last line shows that this test can tell."""
    prompts = [[(5 * i + j) % 200 for j in range(9)] for i in range(6)]
    options: dict[str, Any] = {"num_pages": 24, "max_rows": 6, "prefix_cache": False, "host_memory": 1 << 20}
    outputs = []
    for corrupt in (False, True):
        engine = make_engine(tiny, swap_checksums=checksums, **options)
        workers: Any = engine.workers
        while not hasattr(workers, "store"):
            workers = workers.inner if hasattr(workers, "inner") else workers._inner
        store = workers.store
        for index, prompt in enumerate(prompts):
            request = make_request(f"r{index}", prompt, GREEDY)
            request.arrival = float(index)
            engine.add(request)
        tokens: dict[str, list[int]] = {}
        while engine.has_work:
            for delta in engine.turn():
                assert delta.error is None, delta.error
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if corrupt and engine.scheduler.stats.swaps:
                for host in store._host.values():
                    with torch.inference_mode():
                        host.add_(0.5)
                corrupt = False
            engine.scheduler.check()
        assert engine.scheduler.stats.swaps
        outputs.append(tokens)
    assert (outputs[0] == outputs[1]) is checksums
