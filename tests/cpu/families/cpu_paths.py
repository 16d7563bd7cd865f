"""The ways a CPU can run a family beside its usual one: plain torch, and matrices in blocks by the native kernels.

`test_families` runs these with the checks of `harness`. Blocks are compared with plain torch over the very same blocks
decoded: activations are rounded so finely that next to nothing may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quire.kernels.native.library import ISAS, NotBuilt, open_native
from tests.cpu.families.harness import GREEDY, PAGE_TOKENS, Case, Recorder, run
from tests.cpu.native_isas import open_or_skip
from tests.cpu.rig import load

QUANTS = ("q8_0", "q4_0")
PACKED = ("weight", "gate_up", "down")  # attributes that hold a list of matrices where they would hold a tensor


def check_torch(case: Case) -> None:
    """`--kernels torch`: logits of the longest prompt as transformers has them."""
    model = load(case.folder, PAGE_TOKENS, kernels="torch")
    want = case.reference_logits(case.prompts[-1])
    assert _error(_logits(case, model, 7), want) <= 1e-4


def check_quantized(case: Case) -> None:
    """`--quant`: every linear layer and every expert in blocks, and the logits those blocks stand for."""
    open_or_skip("portable")
    for quant in QUANTS:
        kept: Any = load(case.folder, PAGE_TOKENS, quant=quant)
        exact: Any = load(case.folder, PAGE_TOKENS, kernels="torch")
        forms = decode_into(exact, kept)
        assert quant.upper() in forms and forms <= {quant.upper(), "Q8_0", "F32"}
        want = _logits(case, exact, 7)
        # Some of these random models make much of a last bit: float32 itself shows by how much, in steps of other
        # sizes. 16 bits with a scale for every 32 numbers are some 400 times as coarse.
        bound = max(1e-3, 400 * _error(_logits(case, exact, 2), want))
        for chunk_tokens in (2, 7):
            error = _error(_logits(case, kept, chunk_tokens), want)
            assert error <= bound, f"{quant}, {chunk_tokens} tokens a step: {error:.1e} of {bound:.1e}"


def check_isas(case: Case) -> None:
    """`--kernels`: each instruction set this machine has, the portable one included, in float32 and in blocks."""
    want = case.reference_logits(case.prompts[-1])
    found = [isa for isa in ISAS if _can_open(isa)]
    if not found:
        pytest.skip("the native kernels were not built")
    blocks = []
    for isa in found:
        assert _error(_logits(case, load(case.folder, PAGE_TOKENS, kernels=isa), 7), want) <= 1e-4, isa
        model: Any = load(case.folder, PAGE_TOKENS, kernels=isa, quant="q4_0")
        blocks.append(_logits(case, model, 7))
        if getattr(model, "stack", None) is not None:  # a whole model in one call: other steps, the same bits
            assert torch.equal(_logits(case, model, 3).view(torch.int32), blocks[-1].view(torch.int32)), isa
    assert all(_error(other, blocks[0]) <= 1e-3 for other in blocks)


def _can_open(isa: str) -> bool:
    try:
        open_native(isa, 1)
    except NotBuilt:
        return False
    return True


def decode_into(exact: nn.Module, kept: nn.Module) -> set[str]:
    """Give `exact`, the same model of tensors, what the blocks of `kept` stand for. Returns the forms of those."""
    forms = set()
    for ours, theirs in zip(kept.modules(), exact.modules(), strict=True):
        for name in PACKED:
            matrices: Any = getattr(ours, name, None)
            if isinstance(matrices, list):
                rows = torch.cat([matrix.rows(torch.arange(matrix.shape[0])) for matrix in matrices])
                assert rows.shape == getattr(theirs, name).shape
                setattr(theirs, name, nn.Parameter(rows, requires_grad=False))
                forms.update(matrix.form for matrix in matrices)
    return forms


def _logits(case: Case, model: Any, chunk_tokens: int) -> Tensor:
    """Of every position of the longest prompt, [tokens, vocab]."""
    prompt = case.prompts[-1]
    recorder = Recorder(model, 1)
    run(case.engine(recorder, chunk_tokens=chunk_tokens), [prompt], replace(GREEDY, max_tokens=1))
    return torch.stack([recorder.logits_at[0, position] for position in range(len(prompt))])


def _error(got: Tensor, want: Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


CPU_CHECKS: dict[str, Callable[[Case], None]] = {
    "plain torch": check_torch,
    "quantized": check_quantized,
    "instruction sets": check_isas,
}
# By default one family of each kind; of the others the usual path alone is run, the rest is slow.
BY_DEFAULT = {
    "plain torch": ("llama", "gemma2", "phi"),
    "instruction sets": ("llama", "gemma2", "phi"),
    "quantized": ("llama", "gemma2", "phi", "olmo2", "mixtral", "deepseek_v3", "nemotron_h"),
}
