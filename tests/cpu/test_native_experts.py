"""A mixture of experts in one call of the native library, against plain torch over the same matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.expert_types import ExpertWeights, GatedActivation, Routing
from quire.kernels.native.experts import PackedExperts, run_packed_experts
from quire.kernels.native.library import Native
from quire.kernels.native.matrix import PackedLinear, PackedMatrix, pack_floats
from quire.kernels.native.mixture import MixturePlan, run_mixture
from quire.kernels.reference.experts import route, run_experts
from tests.cpu.families.harness import all_families, save_checkpoint
from tests.cpu.native_isas import open_or_skip
from tests.cpu.rig import load
from tests.cpu.test_native_quant import ISAS

GPT_OSS = GatedActivation(1.702, 1.0, 7.0)
GELU = GatedActivation(curve="gelu_tanh")


def draw(native: Native, form: str, num: int, width: int, inner: int, activation: GatedActivation, biased: bool,
         seed: int = 0) -> tuple[PackedExperts, ExpertWeights]:  # fmt: skip
    """Experts in blocks, gates and ups apart in every second one, and the floats that these stand for."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    def pack(matrix: Tensor) -> PackedMatrix:
        return pack_floats(native, form, *matrix.shape, lambda first, count: matrix[first : first + count])

    def floats(parts: list[PackedMatrix]) -> Tensor:
        return torch.cat([part.rows(torch.arange(part.shape[0])) for part in parts])

    ups: Any = [[pack(part) for part in normal(2 * inner, width).chunk(1 + e % 2)] for e in range(num)]
    downs: Any = [[pack(normal(width, inner))] for _ in range(num)]
    up_bias, down_bias = (normal(num, n) if biased else None for n in (2 * inner, width))
    weights = ExpertWeights(torch.stack([floats(up) for up in ups]), torch.stack([floats(down) for down in downs]),
                            up_bias, down_bias, activation)  # fmt: skip

    def linears(parts: Any, bias: Tensor | None) -> list[PackedLinear]:
        return [PackedLinear(part, None if bias is None else bias[e]) for e, part in enumerate(parts)]

    return PackedExperts(linears(ups, up_bias), linears(downs, down_bias), activation), weights


def send(num_tokens: int, num_experts: int, top_k: int, width: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, width, generator=generator)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    scores[:, 0] -= 0.7 * (num_tokens > 1)  # some are busier than others
    weights, chosen = scores.topk(top_k, -1)
    return x, chosen, weights


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("form", "width", "inner", "activation", "biased"), [
    ("Q4_0", 96, 64, GatedActivation(), False), ("Q8_0", 64, 96, GPT_OSS, True), ("Q8_0", 32, 160, GELU, False),
    ("F16", 40, 24, GatedActivation(), True), ("F32", 33, 7, GPT_OSS, False),
])  # fmt: skip
def test_it_is_what_torch_makes_of_the_same_matrices(isa: str, form: str, width: int, inner: int,
                                                     activation: GatedActivation, biased: bool) -> None:  # fmt: skip
    native = open_or_skip(isa)
    packed, weights = draw(native, form, 6, width, inner, activation, biased)
    for num_tokens, top_k in ((1, 2), (1, 6), (3, 1), (37, 3)):
        x, chosen, shares = send(num_tokens, 6, top_k, width)
        residual = torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(2))
        for onto in (residual, None):
            got = run_packed_experts(x, packed, chosen, shares, onto)
            want = run_experts(x, weights, chosen, shares, onto)
            assert (got - want).abs().max() <= 1e-4 * want.abs().max(), (num_tokens, top_k)
        assert torch.equal(residual, torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(2)))


@pytest.mark.parametrize("isa", ISAS)
def test_a_token_has_the_same_bits_in_any_company(isa: str) -> None:
    packed, _ = draw(open_or_skip(isa), "Q4_0", 8, 64, 96, GatedActivation(), False)
    x, chosen, shares = send(50, 8, 3, 64)
    together = run_packed_experts(x, packed, chosen, shares, x)
    for token in (0, 7, 49):
        one = slice(token, token + 1)
        assert torch.equal(run_packed_experts(x[one], packed, chosen[one], shares[one], x[one]), together[one])
    turned = chosen.flip(1), shares.flip(1)  # the order in which experts were chosen is nothing to a sum
    assert torch.equal(run_packed_experts(x, packed, *turned, x), together)


def test_a_nan_stays_with_its_token() -> None:
    packed, _ = draw(open_or_skip("portable"), "Q8_0", 4, 64, 64, GPT_OSS, True)
    x, chosen, shares = send(20, 4, 2, 64)
    fine = run_packed_experts(x, packed, chosen, shares)
    x[5] = torch.nan
    got = run_packed_experts(x, packed, chosen, shares)
    assert got[5].isnan().all()
    kept = torch.arange(20) != 5
    assert torch.equal(got[kept], fine[kept])


def test_no_tokens() -> None:
    packed, _ = draw(open_or_skip("portable"), "Q8_0", 4, 64, 64, GatedActivation(), False)
    x, chosen, shares = send(1, 4, 2, 64)
    assert run_packed_experts(x[:0], packed, chosen[:0], shares[:0]).shape == (0, 64)


@pytest.mark.parametrize(("name", "runs_as_one_call"), [
    ("qwen3_moe", True), ("mixtral", True), ("qwen2_moe", True), ("glm4_moe", True), ("gpt_oss", True),
    ("flex_olmo", True), ("granitemoe", True), ("granitemoeshared", False), ("afmoe", False), ("cohere2_moe", False),
])  # fmt: skip
def test_mixtures_in_blocks_are_one_call(name: str, runs_as_one_call: bool, tmp_path: Path) -> None:
    """Those whose attention and shared expert the stack knows; `families/cpu_paths.py` compares their numbers."""
    open_or_skip("portable")
    family = next(family for family in all_families() if family.name == name)
    save_checkpoint(family, tmp_path)
    in_blocks: Any = load(tmp_path, quant="q8_0")
    assert (in_blocks.stack is not None) == runs_as_one_call
    floats: Any = load(tmp_path)
    assert floats.stack is None  # torch multiplies those faster


def choose(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The stack's choice, seen through experts that return which they are: each adds one column of its own."""
    native = open_or_skip("portable")
    num, width = routing.num_experts, 64 + routing.num_experts
    zeros = torch.zeros

    def pack(matrix: Tensor) -> PackedLinear:
        rows, columns = matrix.shape
        return PackedLinear([pack_floats(native, "F32", rows, columns, lambda first, n: matrix[first : first + n])])

    gate_up, down = [], []
    for expert in range(num):
        up = zeros(2, width)
        up[:, 0] = torch.tensor([30.0, 1.0])  # silu(30) * 1 is 30
        out = zeros(width, 1)
        out[64 + expert] = 1 / 30
        gate_up.append(pack(up))
        down.append(pack(out))
    router = zeros(num, width)
    router[:, 0] = logits
    plan = MixturePlan(PackedExperts(gate_up, down, GatedActivation()), pack(router), routing, bias)
    x = zeros(1, width)
    x[0, 0] = 1.0
    shares = run_mixture(native, plan, x)[0, 64:]
    return shares.nonzero().flatten(), shares


@pytest.mark.parametrize("routing", [
    Routing(8, 3), Routing(8, 3, normalise=False, scale=2.5), Routing(8, 2, "sigmoid"),
    Routing(16, 4, "sigmoid", num_groups=4, top_groups=2, group_members=2, scale=1.5),
    Routing(16, 3, num_groups=8, top_groups=3), Routing(5, 5),
])  # fmt: skip
def test_experts_are_chosen_as_in_torch(routing: Routing) -> None:
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(routing.num_experts, generator=generator)
        bias = torch.randn(routing.num_experts, generator=generator) * 0.3 if seed % 2 else None
        chosen, weights = route(logits[None], bias, routing)
        want = torch.zeros(routing.num_experts).scatter_(0, chosen[0], weights[0])
        found, shares = choose(logits, routing, bias)
        assert sorted(chosen[0].tolist()) == found.tolist()
        assert (shares - want).abs().max() <= 1e-5 * want.max()
