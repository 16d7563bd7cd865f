"""Kernels that the compiler refuses, in whole models on a GPU: a mixture, latents, hybrids, and the sampler. One line
says which, torch does its work, and the tokens are those of torch alone. What stays in the table is tried for real, in
`trial_checks`."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import replace
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
    ("qwen3_moe", "experts.experts", "_grouped_kernel", "experts"),
    ("qwen3_moe", "experts.few_tokens", "_few_down_kernel", "experts"),
    ("qwen3_moe", "linear.norm", "_rms_norm_kernel", "norm"),
    ("gpt_oss", "experts.route", "_route_kernel", "router"),
    ("gpt_oss", "attention.prefill", "_prefill_kernel", "attention"),
    ("granitemoehybrid", "attention.rope_write", "_qk_norm_rope_write_kernel", "rope"),
    ("deepseek_v3", "latent.latent", "_latent_kernel", "latent attention"),
    ("deepseek_v3", "latent.latent", "_latent_write_kernel", "latent write"),
    ("deepseek_v3", "latent.per_head", "_head_product_kernel", "products by head"),
    ("gemma2", "linear.norm", "_norm_add_kernel", "norm of what is added"),
    ("qwen3_next", "recurrent.scan", "_walk_kernel", "delta net"),
    ("qwen3_next", "recurrent.step", "_step_kernel", "delta net"),
    ("kimi_linear", "recurrent.channel_delta", "_channel_prepare_kernel", "Kimi delta net"),
    ("kimi_linear", "recurrent.channel_step", "_channel_step_kernel", "Kimi delta net"),
    ("nemotron_h experts", "recurrent.scan", "_walk_kernel", "Mamba2"),
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


def test_prompts_go_to_the_kernel_for_all_cards_where_hoppers_own_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured as ever, with chunks among them: torch has no part in it."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for Hopper")
    from quire.kernels.triton.attention import prefill, prefill_hopper
    from tests.cpu.rig import load, make_engine, run
    from tests.cpu.tiny_models import make_tiny

    device, folder = torch.device("cuda", 0), Path(mkdtemp(prefix="quire-trials-"))
    make_tiny("qwen3", folder, head_dim=128)
    launches: list[int] = []
    launch = prefill.prefill_attention
    monkeypatch.setattr(prefill, "prefill_attention", lambda *args, **how: launches.append(1) or launch(*args, **how))
    load(folder, 16, device, dtype="bfloat16", strict_kernels=True)
    assert not launches, "Hopper's own did it"
    monkeypatch.setattr(prefill_hopper, "prefill_attention", lambda *args, **how: 1 / 0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model: Any = load(folder, 16, device, dtype="bfloat16")
    lines = [str(each.message) for each in told if "can't be used here" in str(each.message)]
    assert len(lines) == 1 and lines[0].startswith("The prompt attention for Hopper"), lines
    assert "portable Triton kernel runs instead" in lines[0], lines
    assert model.ops.captures and launches
    engine = make_engine(model, device=device, **PAGED)
    engine.prepare()
    assert [len(tokens) for tokens in run(engine, PROMPTS, GREEDY)] == [12, 12, 12]
    runner: Any = engine.workers
    assert runner.inner._graphs is not None and runner.inner._mixed is not None
    with pytest.raises(QuireError, match="prompt attention for Hopper") as refused:
        load(folder, 16, device, dtype="bfloat16", strict_kernels=True)
    assert refused.value.code == "kernel_failed"


SAMPLED = [  # asked for, module, kernel, what is said of it, whether steps are still captured
    (GREEDY, "sampling.sample", "_choose_kernel", "sampling", False),
    (GREEDY, "step_inputs", "_gather_kernel", "rows", False),
    (GREEDY, "step_inputs", "_slots_kernel", "rows", False),
    (replace(GREEDY, temperature=0.8, seed=5), "sampling.sample", "_finish_kernel", "sampling", False),
    (
        replace(GREEDY, temperature=0.8, top_p=0.9, seed=5),
        "sampling.filters",
        "_survey_kernel",
        "filtered sampling",
        True,
    ),
    (
        replace(GREEDY, temperature=0.8, top_k=20, seed=5),
        "sampling.filters",
        "_verify_kernel",
        "filtered sampling",
        True,
    ),
    (replace(GREEDY, repetition_penalty=1.3), "sampling.edits", "_penalties_kernel", "logit edits", True),
    (replace(GREEDY, logit_bias=((7, 3.0),)), "sampling.edits", "_copy_kernel", "logit edits", True),
    (replace(GREEDY, logprobs=3), "sampling.logprobs", "_score_rows_kernel", "logprobs", True),
]


@pytest.mark.parametrize(("params", "module", "kernel", "said", "captured"), SAMPLED)
def test_a_sampling_kernel_that_does_not_compile(params: SamplingParams, module: str, kernel: str, said: str,
                                                 captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    check_sampled(params, module, kernel, said, captured, torch.device("cuda", 0), monkeypatch)


def check_sampled(params: SamplingParams, module: str, kernel: str, said: str, captured: bool, device: torch.device,
                  monkeypatch: Any) -> None:  # fmt: skip
    from tests.cpu.rig import load, make_engine, run, run_deltas

    asked = [params, GREEDY, params]
    model: Any = load(checkpoint("llama"), 16, device)
    wanted = run(make_engine(model, device=device, kernels="torch", **PAGED), PROMPTS, asked)
    place = importlib.import_module(f"quire.kernels.triton.{module}")
    assert hasattr(place, kernel)
    monkeypatch.setattr(place, kernel, Refused())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine = make_engine(model, device=device, **PAGED)
        got = run(engine, PROMPTS, asked)
        again = run(engine, PROMPTS, GREEDY)
    lines = [str(each.message) for each in told if "can't be used here" in str(each.message)]
    assert len(lines) == 1 and lines[0].startswith(f"The {said} kernel") and "\n" not in lines[0], lines
    assert "no such instruction" in lines[0] and got == wanted and again[1] == wanted[1]
    runner: Any = engine.workers
    assert device.type == "cpu" or (runner.inner._graphs is not None) == captured
    if not captured:
        with pytest.raises(QuireError, match=said) as refused:
            make_engine(model, device=device, strict_kernels=True, **PAGED)
        assert refused.value.code == "kernel_failed"
        return
    strict = make_engine(model, device=device, strict_kernels=True, **PAGED)
    assert run(strict, PROMPTS[1:2], GREEDY) == wanted[1:2]
    with pytest.raises(AssertionError, match=f"The {said} kernel"):  # what the request is told
        run_deltas(strict, PROMPTS[:1], params)
