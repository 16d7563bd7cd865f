"""What is tried before a model is built: with the kernels as they are every row passes, on its own terms; run as
`kernel_checks` are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from quire.kernels.expert_types import GatedActivation, Routing
from quire.kernels.recurrent_types import ConvShape, RecurrentShape
from quire.kernels.table import Ops, deterministic_ops, select_ops, triton_rows, triton_sampling
from quire.kernels.validation.expert_trials import ExpertsTrialShape, list_expert_trials
from quire.kernels.validation.latent_trials import LatentTrialShape, list_latent_trials
from quire.kernels.validation.recurrent_trials import (
    MambaTrialShape,
    delta_net_trial,
    mamba_trial,
    short_conv_trial,
)
from quire.kernels.validation.trials import (
    KernelTrial,
    Product,
    TrialShape,
    dense_trials,
    failure,
    gate_mul_trial,
    norm_add_trial,
    norm_trial,
    product_trial,
)
from quire.runtime.row_trial import settle_row_ops
from quire.sampling.fused import ALL_KERNELS
from quire.sampling.sampler import Sampler
from quire.sampling.trial import settle_sampling
from quire.types import CacheSpec
from tests.cpu.sampling_cases import Case, random_case, resolved, set_up
from tests.gpu.where import Where

CLAMPED = GatedActivation(1.702, 1.0, 7.0)
SQUARED = GatedActivation(alpha=1e30)
GELU = GatedActivation(curve="gelu_tanh")


def assert_pass(ops: Ops, rows: Iterable[KernelTrial], what: str) -> None:
    tried = [(row.name, failure(ops, row)) for row in rows]
    failed = [(name, repr(error)) for name, error in tried if error is not None]
    assert not failed, f"{what}: {failed}"


def check_dense(where: Where) -> None:
    device = torch.device(where.device)
    for dtype in where.dtypes:
        for window in (None, 7):
            heads = (32, 8, 128) if where.large else (4, 2, 16)
            shape = TrialShape(*heads, 16, window, qk_norm=window is None, dtype=dtype, cache_dtype=dtype)
            if window is not None:
                shape = replace(shape, sinks=True)
            else:
                shape = replace(shape, softcap=20.0, qk_dtype=torch.float32)
            assert_pass(select_ops("cuda"), dense_trials(shape, device), f"{dtype}, window {window}")
        width = 4096 if where.large else 64
        out = Product(width, width, dtype, residual=True, bias=True)
        rows = [product_trial(out, device), norm_trial(width, dtype, torch.float32, device)]
        assert_pass(select_ops("cuda"), rows, f"{dtype}, alone")
    dtype = where.dtypes[-1]
    rows = [norm_add_trial(width, dtype, torch.float32, device), gate_mul_trial(width, "gelu_tanh", dtype, device)]
    rows += [product_trial(Product(width, 2 * width, dtype, torch.float32, gate="gelu_tanh"), device)]
    assert_pass(select_ops("cuda"), rows, f"{dtype}, a block of Gemma's")


def _mixtures(where: Where) -> list[ExpertsTrialShape]:
    """Qwen3-MoE's, gpt-oss's, DeepSeek V3's, Nemotron-H's and Gemma 4's kinds."""
    dtype = where.dtypes[-1]
    if where.large:
        return [
            ExpertsTrialShape(Routing(128, 8), 2048, 2048, 768, GatedActivation(), dtype, dtype),
            ExpertsTrialShape(Routing(32, 4), 2880, 2880, 2880, CLAMPED, dtype, dtype, True, False, True, True),
            # With a quarter of its experts: those of all tests that run side by side have to fit on one card.
            ExpertsTrialShape(Routing(64, 8, "sigmoid", True, 2.5, 8, 4, 2, True), 7168, 7168, 2048, GatedActivation(),
                              dtype, dtype, choice_bias=True),
            ExpertsTrialShape(Routing(512, 10), 2048, 2048, 512, GatedActivation(), dtype, torch.float32),
            ExpertsTrialShape(Routing(64, 6, "sigmoid"), 4096, 1024, 1856, SQUARED, dtype, None, choice_bias=True,
                              residual=False),
            ExpertsTrialShape(Routing(128, 8), 2816, 2816, 704, GELU, dtype, torch.float32, residual=False,
                              expert_scale=True),
        ]  # fmt: skip
    return [
        ExpertsTrialShape(Routing(5, 2), 48, 48, 24, GatedActivation(), torch.float32, torch.float32),
        ExpertsTrialShape(Routing(4, 1), 40, 40, 16, CLAMPED, dtype, torch.float32, True, False, True, True),
        ExpertsTrialShape(Routing(8, 2, "sigmoid", True, 2.5, 4, 2, 2, True), 32, 16, 16, SQUARED, dtype, None,
                          choice_bias=True, residual=False),
        ExpertsTrialShape(Routing(4, 2), 40, 40, 24, GELU, dtype, torch.float32, residual=False, expert_scale=True),
    ]  # fmt: skip


def check_experts(where: Where) -> None:
    for shape in _mixtures(where):
        for ops in (select_ops("cuda"), deterministic_ops("cuda")):
            assert_pass(ops, list_expert_trials(shape, torch.device(where.device)), str(shape))


def check_latents(where: Where) -> None:
    device, page = torch.device(where.device), 64 if where.large else 16
    sizes = [(16, 512, 64, 128, None), (128, 512, 64, 128, 1536)] if where.large else [(4, 16, 8, 12, None)]
    for dtype in where.dtypes:
        for heads, rank, rope_dim, nope_dim, q_rank in sizes:
            caches = (dtype, torch.float8_e4m3fn) if where.large and dtype != torch.float32 else (dtype,)
            for cache_dtype in caches:
                shape = LatentTrialShape(heads, rank, rope_dim, page, dtype, cache_dtype, 512, nope_dim, q_rank,
                                         interleaved=q_rank is None)  # fmt: skip
                assert_pass(select_ops("cuda"), list_latent_trials(shape, device), str(shape))


def check_recurrent(where: Where) -> None:
    device = torch.device(where.device)
    state = RecurrentShape(16, 32, 128, 128, 4) if where.large else RecurrentShape(1, 2, 16, 24, 4)
    for dtype in where.dtypes:
        for ops in (select_ops("cuda"), deterministic_ops("cuda")) if where.large else (select_ops("cuda"),):
            for has_bias in (True, False) if where.large else (dtype == torch.float32,):
                mamba = MambaTrialShape(state, 1, has_bias, (0.0, float("inf")), dtype)
                short = short_conv_trial(ConvShape(2048 if where.large else 40, 3), has_bias, dtype, device)
                assert_pass(ops, [delta_net_trial(state, dtype, device), mamba_trial(mamba, device), short], str(mamba))


def check_sampling(where: Where) -> None:
    """What every request is sampled with, and what captured steps do besides the model."""
    device, vocab = torch.device(where.device), 151936 if where.large else 700
    sampling, rows = triton_sampling(), triton_rows()
    assert sampling is not None and rows is not None
    specs = [CacheSpec("full", "paged", (0, 1), (2, 8), "float32"), CacheSpec("walk", "state", (2,), (8,), "float32")]
    for dtype in where.dtypes:
        assert settle_sampling(sampling, vocab, dtype, device, strict=True) is sampling
        assert settle_row_ops(rows, specs, 100, vocab, dtype, device, strict=True) is rows


def check_late_kernels(where: Where) -> None:
    """Each of the other sampling kernels in turn can't be used: torch stands beside those that can, with the tokens of
    torch alone but at near-ties."""
    ops = triton_sampling()
    assert ops is not None
    rng, vocab = np.random.default_rng(where.seed), 32000 if where.large else 100
    cases = [random_case(rng, vocab) for _ in range(64 if where.large else 1)]
    cases += [Case(resolved(temperature=0.7, logprobs=3)), Case(resolved(temperature=0.0, repetition_penalty=1.2))]
    cases += [Case(resolved(temperature=0.7, top_p=0.9)), Case(resolved(temperature=0.7, logit_bias=((3, 1.0),)))]
    batch, histories = set_up(cases, vocab, rng, where.device)
    logits = where.normal(len(cases), vocab, dtype=where.dtypes[-1]) * 3
    expected = Sampler(vocab, where.device).sample(logits, batch, histories)
    assert expected.logprobs is not None
    broken = {"sample_filtered": "filtered sampling", "copy_samples": "logit edits", "apply_penalties": "logit edits",
              "add_bias": "logit edits", "score_rows": "logprobs"}  # fmt: skip
    for name, said in broken.items():
        sampler = Sampler(vocab, where.device, replace(ops, **{name: _refused}), irreplaceable=ALL_KERNELS - {said})
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2 if where.large else 1):
                got = sampler.sample(logits, batch, histories)
        lines = [str(each.message) for each in told if "can't be used here" in str(each.message)]
        assert [line.split(" kernel")[0] for line in lines] == [f"The {said}"], lines
        assert torch.equal(got.bad, expected.bad)
        differ = int((got.tokens != expected.tokens).sum())
        assert differ <= 0.02 * len(cases), f"without {name} {differ} of {len(cases)} tokens differ"
        assert got.logprobs is not None
        torch.testing.assert_close(got.logprobs.top_logprobs, expected.logprobs.top_logprobs, rtol=1e-5, atol=1e-5)


def _refused(*args: Any, **options: Any) -> Any:
    raise ValueError("no such instruction")


CHECKS: dict[str, Callable[[Where], None]] = {
    "trial": check_dense,
    "trial of experts": check_experts,
    "trial of latents": check_latents,
    "trial of recurrent layers": check_recurrent,
    "trial of sampling": check_sampling,
    "late kernels": check_late_kernels,
}
