"""The kernels of a mixture of experts against their reference in float64; run as `kernel_checks` are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional

from quire.kernels import reference, reference_experts
from quire.kernels.experts import ExpertWeights, GatedActivation, Routing, quantize_matrix
from tests.gpu.where import Where, close

GELU = GatedActivation(curve="gelu_tanh")
ROUTINGS = (
    Routing(8, 2),
    Routing(60, 4, normalise=False),
    Routing(160, 6, num_groups=8, top_groups=3, scale=16.0, normalise=False),
    Routing(32, 5, "sigmoid", True, 2.5, 4, 2, 2),
    Routing(256, 8, "sigmoid", True, 2.5, 8, 4, 2, num_shared=2),
    Routing(16, 3, num_shared=1, shared_gated=True),
)


def check_route(where: Where) -> None:
    from quire.kernels.triton import route

    for routing in ROUTINGS if where.large else (*ROUTINGS[:3], replace(ROUTINGS[3], num_shared=3), ROUTINGS[5]):
        for biased in (False, True):
            bias = where.normal(routing.num_experts) * 0.1 if biased else None
            width = 2048 if where.large else 72
            for tokens in (1, 16, 17, 3000) if where.large else (3, 17 if routing.num_experts == 8 else 1):
                stream = where.normal(tokens, width)
                norm = where.normal(width) + 1
                router = where.normal(routing.num_logits, width) * width**-0.5
                router_bias = where.normal(routing.num_logits) if biased else None
                scale = None if biased else where.normal(routing.num_experts)
                where.settle()
                where.poison()
                x, chosen, weights = route.norm_route(stream, norm, 1e-6, router, router_bias, bias, routing, scale)
                normed = reference.rms_norm(stream.double(), norm.double(), 1e-6)
                close(x, normed, torch.float32, "norm_route: the norm")
                # By what the kernel normed itself: near ties may fall otherwise after another order of sums.
                logits = x @ router.T if router_bias is None else x @ router.T + router_bias
                want, want_weights = reference_experts.route(logits, bias, routing, scale)
                same = (chosen.long() == want).all(1)
                assert same.float().mean() >= (1.0 if tokens < 100 else 0.995), f"{routing}: other experts"
                close(weights[same], want_weights[same], torch.float32, f"{routing}: weights")


def check_sort(where: Where) -> None:
    """Every pair once, expert by expert, in tiles that hold pairs of one expert only."""
    from quire.kernels.triton import route

    cases = [(8, 1, 2, 16), (60, 5, 4, 16), (128, 40, 8, 16), (128, 700, 8, 32), (5, 300, 2, 64), (5, 300, 1, 16),
             (512, 40, 10, 16), (3, 9000, 2, 64)]  # fmt: skip
    for experts, tokens, top_k, rows in [*cases, (512, 5000, 10, 128), (128, 8192, 8, 128)] if where.large else cases:
        skew = torch.linspace(0, 3, experts, device=where.device)  # some experts get much more than others
        chosen = (where.normal(tokens, experts) + skew).topk(top_k).indices.int()
        where.poison()
        pairs = route.sort_by_expert(chosen, experts, rows)
        order = chosen.flatten().argsort(stable=True)
        assert (pairs.order.long() == order).all()
        by_place, seen = chosen.flatten()[order].tolist(), 0
        for expert, first, end, _ in pairs.tiles.tolist():
            if expert >= 0:
                assert first == seen and 0 < end - first <= rows and set(by_place[first:end]) == {expert}
                seen = end
            else:
                assert expert == -1 and seen == tokens * top_k, "nothing comes behind an empty tile"
        assert seen == tokens * top_k


def check_experts(where: Where) -> None:
    from quire.kernels.triton.experts import run_experts

    small = [(5, 3, 40, 24, (1, 7)), (2, 1, 32, 32, (120,)), (8, 2, 24, 16, (2,))]
    large = [(128, 8, 2048, 768, (1, 2, 8, 16, 100, 256, 1000, 4000)), (32, 4, 2880, 2880, (1, 8, 300)),
             (60, 4, 2048, 1408, (1, 33, 2000)), (4, 2, 4096, 14336, (1, 40)),
             (128, 8, 2816, 704, (1, 4, 16, 100, 1000))]  # fmt: skip
    for dtype in where.dtypes:
        for num, top_k, width, inner, token_counts in large if where.large else small:
            gate_up = where.normal(num, 2 * inner, width, dtype=dtype) * width**-0.5
            down = where.normal(num, width, inner, dtype=dtype) * inner**-0.5
            biases = where.normal(num, 2 * inner, dtype=dtype), where.normal(num, width, dtype=dtype)
            plain = ExpertWeights(gate_up, down)
            clamped = ExpertWeights(gate_up, down, *biases, GatedActivation(1.702, 1.0, 0.7))
            where.settle()
            kinds = (plain, clamped, replace(plain, activation=GELU))
            for tokens, experts in _pair(where, token_counts, kinds):
                _check_experts(where, dtype, experts, tokens, top_k, run_experts)


def check_scaled_experts(where: Where) -> None:
    """Experts in FP8, of few tokens and of many, by all kernels; sizes that fill no tile, and those of models."""
    from quire.kernels.triton.experts import run_experts, tune
    from quire.kernels.triton.experts_few import run_few

    small = [(3, 2, 144, 48, (1, 9))]
    large = [(128, 8, 2048, 768, (1, 3, 8, 100, 1000)), (32, 4, 2880, 2880, (1, 4, 8, 300, 3000)),
             (64, 6, 2048, 1408, (1, 30)), (16, 10, 2048, 512, (1, 20))]  # fmt: skip
    for dtype in where.dtypes:
        for num, top_k, width, inner, token_counts in large if where.large else small:
            gate_up, gate_up_scale = _scaled(where.normal(num, 2 * inner, width, dtype=dtype) * width**-0.5)
            down, down_scale = _scaled(where.normal(num, width, inner, dtype=dtype) * inner**-0.5)
            plain = ExpertWeights(gate_up, down, gate_up_scale=gate_up_scale, down_scale=down_scale)
            clamped = replace(
                plain, gate_up_bias=where.normal(num, 2 * inner, dtype=dtype),
                down_bias=where.normal(num, width, dtype=dtype), activation=GatedActivation(1.702, 1.0, 0.7),
            )  # fmt: skip
            where.settle()
            for tokens, experts in _pair(where, token_counts, (plain, clamped)):
                if tokens <= 4:
                    _check_experts(where, dtype, experts, tokens, top_k, run_few)
                many = partial(run_experts, tuning=tune(tokens * top_k, num, scaled=True))
                _check_experts(where, dtype, experts, tokens, top_k, many, rounds=True)


def check_few_experts(where: Where) -> None:
    """Tokens that share experts, and one alone; widths that fill no tile; more columns than a program holds at once."""
    from quire.kernels.triton.experts_few import gains, run_few

    for num, top_k, few in ((128, 8, 4), (256, 8, 4), (32, 4, 4), (16, 4, 2), (8, 2, 2), (8, 4, 1)):
        experts = ExpertWeights(torch.empty(num, 48, 16, device="meta"), torch.empty(num, 16, 24, device="meta"))
        made = [(torch.empty(n, 16, device="meta"), torch.empty(n, top_k, device="meta")) for n in range(1, 20)]
        assert [len(x) for x, chosen in made if gains(x, experts, chosen)] == list(range(1, few + 1))

    small = [(5, 3, 40, 24, (1, 4))]
    large = [(128, 8, 2048, 768, (1, 2, 8, 16)), (32, 4, 2880, 2880, (1, 8)), (12, 6, 7168, 2048, (1, 8)),
             (4, 2, 4096, 14336, (1, 2)), (128, 8, 2816, 704, (1, 4)), (16, 10, 2048, 512, (1,))]  # fmt: skip
    for dtype in where.dtypes:
        for num, top_k, width, inner, token_counts in large if where.large else small:
            gate_up = where.normal(num, 2 * inner, width, dtype=dtype) * width**-0.5
            down = where.normal(num, width, inner, dtype=dtype) * inner**-0.5
            biases = where.normal(num, 2 * inner, dtype=dtype), where.normal(num, width, dtype=dtype)
            plain = ExpertWeights(gate_up, down)
            clamped = ExpertWeights(gate_up, down, *biases, GatedActivation(1.702, 1.0, 0.7))
            where.settle()
            kinds = (plain, clamped, replace(plain, activation=GELU))
            for tokens, experts in _pair(where, token_counts, kinds):
                _check_experts(where, dtype, experts, tokens, top_k, run_few)


def _pair(where: Where, token_counts: tuple[int, ...], kinds: tuple[ExpertWeights, ...]) -> list[Any]:
    """Every kind with every count; under the interpreter, which takes its time, with one."""
    if where.large:
        return list(product(token_counts, kinds))
    return [(token_counts[place % len(token_counts)], kind) for place, kind in enumerate(kinds)]


def _check_experts(where, dtype, experts, tokens, top_k, run_experts, rounds=False):  # type: ignore[no-untyped-def]
    """`rounds`: what goes into a product is rounded to FP8, too. Some of what goes into the second lies nearly between
    two such numbers, and may be rounded to the other one."""
    num, width, inner = experts.down.shape
    x, residual = where.normal(tokens, width, dtype=dtype), where.normal(tokens, width, dtype=dtype)
    chosen = where.normal(tokens, num).topk(top_k).indices
    weights = torch.rand(tokens, top_k, device=where.device)
    where.poison()
    wide = ExpertWeights(
        _wide(experts.gate_up, experts.gate_up_scale),
        _wide(experts.down, experts.down_scale),
        None if experts.gate_up_bias is None else experts.gate_up_bias.double(),
        None if experts.down_bias is None else experts.down_bias.double(),
        experts.activation,
    )
    apply = partial(_apply_rounded, dtype) if rounds else reference_experts._apply_expert
    with patch.object(reference_experts, "_apply_expert", apply):
        expected = reference_experts.run_experts(x.double(), wide, chosen, weights.double(), residual.double())
    name = f"run_experts {num} of {width} x {inner} in {experts.down.dtype}, {tokens} tokens, {experts.activation}"
    for last in (residual, None) if where.large else (residual if experts.down_bias is None else None,):
        out = run_experts(x, experts, chosen.int(), weights, last)
        wanted = expected if last is not None else expected - residual.double()
        if rounds:
            off = float((out.double() - wanted).norm() / wanted.norm())
            assert off <= 0.02, f"{name}: {off:.4f} off"
        else:
            close(out, wanted, dtype, name)


def _apply_rounded(dtype, x, experts, expert):  # type: ignore[no-untyped-def]
    """As `reference_experts`."""
    biases = [None if bias is None else bias[expert] for bias in (experts.gate_up_bias, experts.down_bias)]
    inner = functional.linear(_rounded(x, dtype), experts.gate_up[expert], biases[0])
    inner = reference_experts.gated(inner, experts.activation)
    return functional.linear(_rounded(inner, dtype), experts.down[expert], biases[1])


def _rounded(x, dtype):  # type: ignore[no-untyped-def]
    from quire.kernels.triton.fp8 import quantize_rows

    values, scale = quantize_rows(x.to(dtype))
    return (values.double() * scale.double()[:, None])[:, : x.shape[1]]


def _scaled(matrices):  # type: ignore[no-untyped-def]
    """With rows of very different sizes: none can have another's scale."""
    sizes = 2.0 ** torch.randint(-4, 5, matrices.shape[:2], device=matrices.device)
    made = [quantize_matrix(matrix * size.unsqueeze(1)) for matrix, size in zip(matrices, sizes, strict=True)]
    return torch.stack([matrix for matrix, _ in made]), torch.stack([scales for _, scales in made])


def _wide(weight, scale):  # type: ignore[no-untyped-def]
    return weight.double() if scale is None else weight.double() * scale.double().unsqueeze(2)


CHECKS: dict[str, Callable[[Where], None]] = {
    "route": check_route,
    "sort": check_sort,
    "experts": check_experts,
    "experts of a few": check_few_experts,
    "experts in FP8": check_scaled_experts,
}
