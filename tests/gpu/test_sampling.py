"""What a step may do around the sampling kernels on a GPU: be captured, and never wait for the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.kernels.table import triton_sampling
from quire.sampling.fused import ALL_KERNELS
from quire.sampling.sampler import Sampler
from tests.cpu.sampling_cases import random_case, set_up
from tests.gpu.sampling_checks import check_choice, random_filters, random_logits
from tests.gpu.where import Where

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_a_captured_draw_is_right_for_other_logits_and_parameters() -> None:
    """One graph; rows change from narrow to wide, from filtered to plain, between its replays."""
    from quire.kernels.triton.sampling.filters import sample_filtered

    count, vocab = 24, 50304
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    logits = torch.zeros(count, vocab, dtype=torch.bfloat16, device="cuda")
    keys = torch.arange(count, device="cuda") * 7919
    positions = torch.zeros(count, dtype=torch.int64, device="cuda")
    asked = random_filters(Where("cuda", True, (), seed), count, vocab).tensors("cuda")
    sample_filtered(logits, keys, positions, *asked)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, bad = sample_filtered(logits, keys, positions, *asked)
    for turn in range(6):
        where = Where("cuda", True, (), seed + turn)
        logits.copy_(random_logits(where, count, vocab, torch.bfloat16).roll(turn, 0))
        positions.fill_(turn)
        for old, new in zip(asked, random_filters(where, count, vocab).tensors("cuda"), strict=True):
            old.copy_(new)
        tokens.fill_(-1)
        graph.replay()
        assert not bad.any()
        check_choice(tokens, logits, keys, positions, asked, f"turn {turn}")
        eager, _ = sample_filtered(logits, keys, positions, *asked)
        assert torch.equal(eager, tokens)


def test_sampling_never_waits_for_the_device() -> None:
    names = ("temperature", "top_k", "top_p", "min_p", "top_n_sigma", "repetition_penalty", "presence_penalty",
             "frequency_penalty", "logit_bias", "bad_words", "min_tokens")  # fmt: skip
    rng = np.random.default_rng(0)
    cases = [random_case(rng, 32000, *names) for _ in range(16)] + [random_case(rng, 32000, "greedy")]
    for case in cases[:4]:
        case.params = replace(case.params, logprobs=5)
    batch, histories = set_up(cases, 32000, rng, "cuda")
    logits = torch.randn(len(cases), 32000, device="cuda", dtype=torch.bfloat16)
    sampler = Sampler(32000, "cuda", triton_sampling(), irreplaceable=ALL_KERNELS)
    sampler.sample(logits, batch, histories)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.sample(logits, batch, histories)
    finally:
        torch.cuda.set_sync_debug_mode("default")
