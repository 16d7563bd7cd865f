"""How far bfloat16 and FP8 are from float32 on real weights and real text, beside `transformers` in bfloat16.

Teacher-forced: every position gets the text itself before it, and the divergence of its distribution from float32's is
taken over the whole vocabulary. Half of each window also goes through decode steps, one token at a time. The weights
come from a pack (`kl_pack`), at .scratch/kl/smollm2.npz or where QUIRE_KL_PACK says; without one the tests are skipped.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.types import PageWrite, Plan, PlanRow, RowInit, SamplingParams
from tests.cpu.rig import load, make_engine
from tests.gpu.kl_pack import unpack
from tests.gpu.script import DEVICE, ON_GPU, marks, run_file, skip

pytestmark = marks()

PACK = Path(os.environ.get("QUIRE_KL_PACK", ".scratch/kl/smollm2.npz"))
BOUND = 1.2  # times what transformers has in bfloat16
PAGE = 64


@functools.cache
def checkpoint() -> tuple[Path, Tensor]:
    folder = Path(tempfile.mkdtemp(prefix="quire-kl-"))
    return folder, unpack(PACK, folder)


@torch.inference_mode()
def transformers_logprobs(dtype: torch.dtype) -> Tensor:
    """[windows, tokens, vocab] float32, on the CPU: the float32 ones are kept for every comparison."""
    from transformers import AutoModelForCausalLM

    folder, tokens = checkpoint()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(DEVICE).eval()
    return torch.stack([model(row[None].to(DEVICE)).logits[0].float().log_softmax(-1).cpu() for row in tokens])


@functools.cache
def truth() -> Tensor:
    return transformers_logprobs(torch.float32)


def divergence(logprobs: Tensor, first: int = 0) -> float:
    """Mean KL from float32, over positions from `first` of each window on. In float64: the terms nearly cancel."""
    true = truth()[:, first:].double()
    return (true.exp() * (true - logprobs[:, -true.shape[1] :].double())).sum(-1).mean().item()


@torch.inference_mode()
def quire_logprobs(split: int, **how: Any) -> Tensor:
    """The same of our model: `split` tokens of each window in one ragged step, the others one by one."""
    folder, tokens = checkpoint()
    num_rows, length = tokens.shape
    model = load(folder, PAGE, DEVICE, **how)
    pages = -(-length // PAGE)
    engine = make_engine(model, device=DEVICE, max_len=length + 8, page_tokens=PAGE, max_rows=num_rows,
                         num_pages=num_rows * pages + 2, max_batch_tokens=num_rows * length)  # fmt: skip
    runner = engine.workers.inner
    rows, caches = runner._rows, runner.store.tensors
    params = SamplingParams(temperature=0.0).resolve()
    added = [RowInit(f"r{r}", r, row.tolist(), length, 0, params, (), 0, 0) for r, row in enumerate(tokens)]
    writes = [PageWrite(0, r, 0, list(range(1 + r * pages, 1 + (r + 1) * pages))) for r in range(num_rows)]
    runner._apply(Plan(0, added=added, page_writes=writes))
    plan = Plan(1, [PlanRow(f"r{r}", r, 0, split, 0, True) for r in range(num_rows)])
    step = rows.gather(plan).step
    logits = model.logits(model.forward(step, caches)).float().log_softmax(-1)
    found = [logits.view(num_rows, split, -1).cpu()]
    for place in range(split, length):  # the row's own next token is the text's: nothing is sampled
        if runner._graphs is not None:  # eagerly twice, then captured
            logits = runner._graphs.run(list(range(num_rows)), choose=False).logits
        else:
            plan = Plan(1, [PlanRow(f"r{r}", r, place, 1, 0, True) for r in range(num_rows)])
            logits = model.logits(model.forward(rows.gather(plan).step, caches))
        found.append(logits.float().log_softmax(-1).cpu()[:, None])
    return torch.cat(found, 1)


def test_divergence_from_float32_is_no_larger_than_that_of_transformers() -> None:
    if not PACK.exists():
        return skip(f"there is no {PACK}; see tests/gpu/kl_pack.py")
    length = checkpoint()[1].shape[1]
    half = length // 2
    ours = quire_logprobs(half, dtype="float32")
    exact = divergence(ours)
    print(f"Quire float32: KL {exact:.2e}")
    assert exact < 1e-6, "float32 is float32"
    if not ON_GPU:
        return
    theirs = transformers_logprobs(torch.bfloat16)
    bars = {"prompt": divergence(theirs), "decode": divergence(theirs, half)}
    print(
        f"transformers bfloat16: KL {bars['prompt']:.3e} over all positions, {bars['decode']:.3e} over the second half"
    )
    schemes: dict[str, dict[str, str]] = {
        "bfloat16": {"dtype": "bfloat16"},
        "FP8 weights": {"dtype": "bfloat16", "quant": "fp8"},
        "FP8 weights and KV": {"dtype": "bfloat16", "quant": "fp8", "kv_dtype": "fp8"},
    }
    measured = {}
    for name, how in schemes.items():
        prompt, decode = divergence(quire_logprobs(length, **how)), divergence(quire_logprobs(half, **how), half)
        measured[name] = {"prompt": prompt, "decode": decode}
        ratios = f"{prompt / bars['prompt']:.2f} and {decode / bars['decode']:.2f} times that of transformers"
        print(f"Quire {name}: KL {prompt:.3e} as a prompt, {decode:.3e} in decode steps ({ratios})", flush=True)
    for part, bar in bars.items():
        assert measured["bfloat16"][part] <= BOUND * bar, f"{part}: {measured['bfloat16'][part]:.3e} against {bar:.3e}"


if __name__ == "__main__":
    run_file(globals(), *sys.argv[1:2])
