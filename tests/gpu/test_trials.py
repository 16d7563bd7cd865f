"""Kernels that the compiler refuses, in whole models on a GPU: a mixture, latents, hybrids. One line says which, torch
does its work, and the tokens are those of torch alone. What stays in the table is tried for real, in `trial_checks`."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from quire.types import QuireError, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[7 * i * i % 250 + 3 for i in range(n)] for n in (90, 1, 17)]
PAGED = {"page_tokens": 16, "max_rows": 4, "max_batch_tokens": 64, "depth": 2}
CASES = [  # family, module below kernels.triton, kernel, what is said of it
    ("qwen3_moe", "experts", "_grouped_kernel", "experts"),
    ("qwen3_moe", "experts", "_one_row_down_kernel", "experts"),
    ("qwen3_moe", "norm", "_rms_norm_kernel", "norm"),
    ("gpt_oss", "route", "_route_kernel", "router"),
    ("gpt_oss", "prefill", "_prefill_kernel", "attention"),
    ("granitemoehybrid", "rope", "_qk_norm_rope_write_kernel", "rope"),
    ("deepseek_v3", "latent", "_latent_kernel", "latent attention"),
    ("deepseek_v3", "latent", "_latent_write_kernel", "latent write"),
    ("qwen3_next", "recurrent_scan", "_walk_kernel", "delta net"),
    ("qwen3_next", "recurrent_step", "_step_kernel", "delta net"),
    ("nemotron_h experts", "recurrent_scan", "_walk_kernel", "Mamba2"),
]


class Refused:
    """Stands where a kernel was: whatever it is launched with, the compiler finds something wrong."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        import triton
        from triton.compiler.errors import CompilationError

        def launch(*args: Any, **options: Any) -> None:
            if triton.knobs.runtime.interpret:
                raise CompilationError("", None, "no such instruction")
            from tests.gpu.uncompilable import uncompilable

            uncompilable[(1,)](args[0])

        return launch


@cache
def checkpoint(name: str) -> Path:
    from tests.cpu.families.harness import all_families, save_checkpoint

    folder = Path(mkdtemp(prefix="quire-trials-"))
    save_checkpoint(next(family for family in all_families() if family.name == name), folder)
    return folder


@cache
def expected(name: str, device: torch.device) -> list[list[int]]:
    from tests.cpu.rig import load, make_engine, run

    model = load(checkpoint(name), 16, device, kernels="torch")
    return run(make_engine(model, device=device, **PAGED), PROMPTS, GREEDY)


@pytest.mark.parametrize(("family", "module", "kernel", "said"), CASES)
def test_a_kernel_that_does_not_compile(family: str, module: str, kernel: str, said: str,
                                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    check(family, module, kernel, said, torch.device("cuda", 0), monkeypatch)


def check(family: str, module: str, kernel: str, said: str, device: torch.device, monkeypatch: Any) -> None:
    from tests.cpu.rig import load, make_engine, run

    wanted = expected(family, device)
    place = importlib.import_module(f"quire.kernels.triton.{module}")
    assert hasattr(place, kernel)
    monkeypatch.setattr(place, kernel, Refused())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model: Any = load(checkpoint(family), 16, device)
    lines = [str(each.message) for each in told if "can't be used here" in str(each.message)]
    assert len(lines) == 1 and lines[0].startswith(f"The {said} kernel") and "\n" not in lines[0], lines
    assert "no such instruction" in lines[0]
    assert run(make_engine(model, device=device, **PAGED), PROMPTS, GREEDY) == wanted
    with pytest.raises(QuireError, match=said) as refused:
        load(checkpoint(family), 16, device, strict_kernels=True)
    assert refused.value.code == "kernel_failed"
