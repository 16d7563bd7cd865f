"""Between two steps nothing may read a value back: on a GPU every such read waits for the device.

A machine without one can still tell: forward and sampling run under a dispatcher that knows the operations whose
result's shape or value the host needs, and with `tolist` watched. Kernels are left out, a GPU has its own; the layers
around them are those of a GPU (`kernels="torch"`), of every kind of model. `tests/gpu/test_syncs.py` asks CUDA itself.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import quire
from quire.engine.grammar.matcher import GrammarCompiler
from quire.types import GrammarSpec, Plan, SamplingParams
from tests.cpu.families.harness import all_families, save_checkpoint
from tests.cpu.rig import load, make_engine, make_request
from tests.cpu.tiny_models import make_tiny

OURS = str(Path(quire.__file__).parent)
READS = (
    "_local_scalar_dense",
    "item",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "unique",
    "_unique2",
    "bincount",
)
KINDS = ("gemma3", "gemma4 experts", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "qwen3_next",
         "nemotron_h experts", "mamba2", "lfm2")  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.6, "seed": 3},
    "top-k, top-p, min-p": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "seed": 3},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "seed": 3},
    "bias, bad words, DRY": {"temperature": 0.7, "logit_bias": ((5, 2.0),), "bad_token_ids": ((7, 8), (9,)),
                             "dry_multiplier": 0.8, "seed": 3},
    "logprobs": {"temperature": 0.7, "logprobs": 3, "seed": 3},
}  # fmt: skip


class Reads(TorchDispatchMode):
    """Collects where values were read back."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1]
        )
        counted = name == "repeat_interleave" and not (kwargs or {}).get("output_size")
        if name in READS or by_mask or counted:
            self.note(name)
        return func(*args, **(kwargs or {}))

    def note(self, name: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(OURS)]
        is_kernel = bool(frames) and Path(frames[-1].filename).parent.name == "reference"  # a GPU runs other code
        if frames and not is_kernel:
            self.found.append(f"{name} at {Path(frames[-1].filename).name}:{frames[-1].lineno}")


class Watched:
    """Workers whose forward and sampling run under `Reads`; waiting for the tokens is free to read."""

    def __init__(self, inner: Any, reads: Reads, patch: pytest.MonkeyPatch):
        self._inner, self._reads, self._patch = inner, reads, patch

    def _run(self, call: Any, *args: Any) -> Any:
        tolist = torch.Tensor.tolist
        with self._reads, self._patch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", lambda tensor: (self._reads.note("tolist"), tolist(tensor))[1])
            return call(*args)

    def forward(self, plan: Plan) -> Any:
        return self._run(self._inner.forward, plan)

    def sample(self, forward: Any, masks: Mapping[int, bytes] | None = None) -> Any:
        return self._run(self._inner.sample, forward, masks)

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(make_tiny("qwen3", Path(tmp_path_factory.mktemp("qwen3")))[1], kernels="torch")


def reads_of(model: Any, params: SamplingParams, patch: pytest.MonkeyPatch, grammar: Any = None) -> list[str]:
    """Where four requests, in chunks and decodes mixed, read something back."""
    engine = make_engine(model, depth=2, chunk_tokens=16)
    reads = Reads()
    engine.workers = Watched(engine.workers, reads, patch)
    for index in range(4):
        request = make_request(f"r{index}", [(9 * index + j) % 250 for j in range(8 + 11 * index)], params)
        request.grammar = grammar() if grammar is not None and index % 2 else None
        engine.add(request)
    assert all(delta.error is None for delta in engine.run_until_idle())
    assert engine.scheduler.stats.sampled_tokens == 48
    return sorted(set(reads.found))


@pytest.mark.parametrize("case", CASES)
def test_no_step_reads_a_value_back(tiny: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not reads_of(tiny, SamplingParams(**CASES[case], max_tokens=12, ignore_eos=True), monkeypatch)


def test_nor_does_one_under_a_grammar(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [bytes([byte]) for byte in range(255)] + [b"<eos>"]
    compiler = GrammarCompiler(tokens, (255,), special_ids=(255,), vocab_size=256)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=12, ignore_eos=True)
    spec = GrammarSpec("regex", "[a-z]{40}")
    try:
        assert not reads_of(tiny, params, monkeypatch, lambda: compiler.compile(spec))
    finally:
        compiler.close()


@pytest.mark.parametrize("kind", KINDS)
def test_nor_does_a_model_of_another_kind(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(next(family for family in all_families() if family.name == kind), tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    assert not reads_of(load(tmp_path, kernels="torch"), params, monkeypatch)


def test_the_watch_sees_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def guilty(plan: Any) -> None:
        x = torch.arange(4)
        x[x > 1]
        x.sum().item()
        x.tolist()
        torch.repeat_interleave(x)

    for inference, item in ((False, "_local_scalar_dense"), (True, "item")):  # steps run in the second way
        reads = Reads()
        monkeypatch.setattr(reads, "note", reads.found.append)
        with torch.inference_mode(inference):
            Watched(None, reads, monkeypatch)._run(guilty, None)
        assert {"index", item, "tolist", "repeat_interleave"} <= set(reads.found), reads.found
