"""Between two steps nothing may read a value back: on a GPU every such read waits for the device.

A machine without one can still tell: forward and sampling run under a dispatcher that knows the operations whose
result's shape or value the host needs, and with `tolist` watched. Kernels are left out, a GPU has its own.
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
from quire.types import Plan, SamplingParams
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
REFERENCE = ("reference.py", "reference_attention.py", "dequant.py")  # other code runs on a GPU
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
        if frames and Path(frames[-1].filename).name not in REFERENCE:
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
    return load(make_tiny("qwen3", Path(tmp_path_factory.mktemp("qwen3")))[1])


@pytest.mark.parametrize("case", CASES)
def test_no_step_reads_a_value_back(tiny: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tiny, depth=2, chunk_tokens=16)
    reads = Reads()
    engine.workers = Watched(engine.workers, reads, monkeypatch)
    params = SamplingParams(**CASES[case], max_tokens=12, ignore_eos=True)
    for index in range(4):
        engine.add(make_request(f"r{index}", [(9 * index + j) % 250 for j in range(8 + 11 * index)], params))
    assert all(delta.error is None for delta in engine.run_until_idle())
    assert engine.scheduler.stats.sampled_tokens == 48 and not reads.found, sorted(set(reads.found))


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
