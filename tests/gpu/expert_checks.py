"""The kernels of a mixture of experts against their reference in float64; run as `kernel_checks` are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.expert_types import LARGEST_FP8, ExpertWeights, GatedActivation, Routing, quantize_matrix
from quire.kernels.reference import experts as reference_experts
from quire.kernels.reference import small_ops as reference
from tests.gpu.where import Where, close

GELU = GatedActivation(curve="gelu_tanh")
UNITS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # most that rounding changes
ROUTINGS = (
    Routing(8, 2),
    Routing(60, 4, normalise=False),
    Routing(160, 6, num_groups=8, top_groups=3, scale=16.0, normalise=False),
    Routing(32, 5, "sigmoid", True, 2.5, 4, 2, 2),
    Routing(256, 8, "sigmoid", True, 2.5, 8, 4, 2, num_shared=2),
    Routing(16, 3, num_shared=1, shared_gated=True),
)


def check_route(where: Where) -> None:
    from quire.kernels.triton.experts import route

    num_tokens = num_settled = 0
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
                # By what the kernel normed itself, so that only the logits' sums may be others.
                logits = x.double() @ router.double().T
                logits = logits if router_bias is None else logits + router_bias.double()
                want, want_weights = reference_experts.route(logits, bias, routing, scale)
                settled = _settled(where, logits, bias, routing, want)
                same = (chosen.long() == want).all(1)
                assert same[settled].all(), f"{routing}: other experts for {int((settled & ~same).sum())} of {tokens}"
                close(weights[same], want_weights[same], torch.float32, f"{routing}: weights")
                num_tokens, num_settled = num_tokens + tokens, num_settled + int(settled.sum())
                assert tokens < 1000 or settled.float().mean() >= 0.95, f"{routing}: hardly any token is settled"
    assert num_settled >= 0.9 * num_tokens, f"only {num_settled} of {num_tokens} tokens are settled"


def _settled(where: Where, logits: Tensor, bias: Tensor | None, routing: Routing, chosen: Tensor) -> Tensor:
    """Which tokens the reference sends to the same experts, in the same order, when their logits and their scores are a
    little others, [tokens] bool: by more than sums in another order make them, or a sigmoid near one that keeps few
    bits of its logit. Noise is added and subtracted: if it leaves two that are as good as each other in their order,
    its opposite does not."""
    settled = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    for _ in range(4):
        of_logits = 2e-5 * logits.abs().amax(1, keepdim=True) * where.normal(*logits.shape)
        of_scores = 5e-7 * where.normal(len(logits), routing.num_experts)
        for sign in (1, -1):
            ranks = sign * of_scores if bias is None else bias + sign * of_scores
            settled &= (reference_experts.route(logits + sign * of_logits, ranks, routing)[0] == chosen).all(1)
    return settled


def check_sort(where: Where) -> None:
    """Every pair once, expert by expert, in tiles that hold pairs of one expert only."""
    from quire.kernels.triton.experts import route

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
    from quire.kernels.triton.experts.experts import run_experts

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
                check_weights(where, dtype, experts, tokens, top_k, run_experts)


def check_scaled_experts(where: Where) -> None:
    """Experts in FP8, of few tokens and of many, by all kernels; sizes that fill no tile, and those of models.
    Some have a second matrix that gives out what the first made, one number at a time: among others, which differ in
    size by powers of two, most would not show when they are wrong."""
    from quire.kernels.triton.experts.experts import run_experts, tune
    from quire.kernels.triton.experts.few_tokens import run_few

    small = [(3, 2, 144, 48, (1, 9, 5))]
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
            picked, picked_scale = _scaled(_pick(where, num, width, inner).to(dtype))
            picking = replace(plain, down=picked, down_scale=picked_scale)
            where.settle()
            for tokens, (experts, sent) in _pair(where, token_counts, ((plain, top_k), (clamped, top_k), (picking, 1))):
                if tokens <= 4:
                    check_weights(where, dtype, experts, tokens, sent, run_few)
                many = partial(run_experts, tuning=tune(tokens * sent, num, scaled=True))
                check_weights(where, dtype, experts, tokens, sent, many, rounds=True)


def check_few_experts(where: Where) -> None:
    """Tokens that share experts, and one alone; widths that fill no tile; more columns than a program holds at once."""
    from quire.kernels.triton.experts.few_tokens import is_preferred, run_few

    for num, top_k, few in ((128, 8, 4), (256, 8, 4), (32, 4, 4), (16, 4, 2), (8, 2, 2), (8, 4, 1)):
        experts = ExpertWeights(torch.empty(num, 48, 16, device="meta"), torch.empty(num, 16, 24, device="meta"))
        made = [(torch.empty(n, 16, device="meta"), torch.empty(n, top_k, device="meta")) for n in range(1, 20)]
        assert [len(x) for x, chosen in made if is_preferred(x, experts, chosen)] == list(range(1, few + 1))

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
                check_weights(where, dtype, experts, tokens, top_k, run_few)


def _pair(where: Where, token_counts: tuple[int, ...], kinds: tuple[Any, ...]) -> list[Any]:
    """Every kind with every count; under the interpreter, which takes its time, with one."""
    if where.large:
        return list(product(token_counts, kinds))
    return [(token_counts[place % len(token_counts)], kind) for place, kind in enumerate(kinds)]


def check_weights(where, dtype, experts, tokens, top_k, run_experts, rounds=False):  # type: ignore[no-untyped-def]
    """One kernel over these experts. `rounds`: what goes into a product is rounded to FP8, too."""
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
    if rounds:
        expected, slack = _expect_rounded(where, x, wide, chosen, weights.double())
    else:
        expected = reference_experts.run_experts(x.double(), wide, chosen, weights.double())
    sizes = f"{top_k} of {num}, {width} x {inner} in {experts.down.dtype}"
    name = f"run_experts {sizes}, {tokens} tokens, {experts.activation}"
    for last in (residual, None) if where.large else (residual if experts.down_bias is None else None,):
        wanted = expected if last is None else expected + last.double()
        out = run_experts(x, experts, chosen.int(), weights, last)
        if rounds:
            _within(out, wanted, slack + UNITS[dtype] * wanted.abs() + _least(dtype), f"{name} from {dtype}")
        else:
            close(out, wanted, dtype, name)


def _within(out: Tensor, expected: Tensor, slack: Tensor, what: str) -> None:
    """Element by element, so that a row of a matrix is held to its own size and not to the largest one's."""
    assert out.shape == expected.shape, f"{what}: shape {tuple(out.shape)}, not {tuple(expected.shape)}"
    error = (out.double() - expected).abs()
    bad = ~(error <= slack)  # NaN is bad
    assert not bad.any(), f"{what}: {int(bad.sum())} off, by up to {(error / slack)[bad].max():.2f} of what they may be"


def _expect_rounded(where: Where, x: Tensor, experts: ExpertWeights, chosen: Tensor,
                    weights: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What experts give if what goes into both products is rounded to FP8, and how far from it a right kernel's results
    may be, before they are rounded themselves; both [tokens, width] float64.

    What goes into the second product is made by the kernel: what lies nearly between two numbers may be rounded to the
    other one, and if it is large, that moves all results by a lot. How much is known for each. It is not more than all
    such moves together, and not more than four times the root of their squares: few of them happen, to either side."""
    value, parts, size, moves, moves_squared = torch.zeros(5, *x.shape, dtype=torch.float64, device=x.device)
    values, scale = _quantized(x)
    rounded = values * scale
    unit, least = UNITS[x.dtype], _least(x.dtype)
    sums = 2 * _sum_error(where, experts.down.shape[2])  # nothing else here leaves room, as bounds of roundings do
    for expert in chosen.unique().tolist():
        tokens, choices = (chosen == expert).nonzero(as_tuple=True)
        share = weights[tokens, choices].unsqueeze(1)
        inner, spread, shift = _rounded_inner(where, x.dtype, rounded[tokens], experts, expert)
        down = experts.down[expert]
        y = functional.linear(inner, down, None if experts.down_bias is None else experts.down_bias[expert]) * share
        value.index_add_(0, tokens, y)
        loose = sums + shift + 2 * unit
        spread *= 1 + loose
        parts.index_add_(0, tokens, y.abs() * loose + least)
        size.index_add_(0, tokens, (inner.square() @ down.square().T) * share.square())
        moves.index_add_(0, tokens, spread @ down.abs().T * share)
        moves_squared.index_add_(0, tokens, (spread.square() @ down.square().T) * share.square())
    return value, torch.minimum(moves, 4 * moves_squared.sqrt()) + sums * size.sqrt() + parts


def _rounded_inner(where: Where, dtype: torch.dtype, x: Tensor, experts: ExpertWeights,
                   expert: int) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What goes into one expert's second product, rounded, and how far apart its roundings may lie, both [n, inner];
    and how much larger or smaller a whole row may be, [n, 1], as its scale is that of its largest number."""
    weight, bias = experts.gate_up[expert], None if experts.gate_up_bias is None else experts.gate_up_bias[expert]
    gate_up = functional.linear(x, weight, bias)
    error = _sum_error(where, x.shape[1]) * (gate_up.abs() + (x.square() @ weight.square().T).sqrt())
    inner = reference_experts.gated(gate_up, experts.activation)
    low, high = _bounds(gate_up, error, experts.activation)
    values, scale = _quantized(inner.to(dtype))
    largest = inner.abs().amax(1, keepdim=True)
    shift = torch.maximum(high, -low).amax(1, keepdim=True) / largest - 1 + 2 * UNITS[dtype]
    beside = inner.abs() * (shift + UNITS[dtype]) + _least(dtype)
    spread = _to_fp8((high + beside) / scale) - _to_fp8((low - beside) / scale)
    return values * scale, spread * scale, shift


def _bounds(gate_up: Tensor, error: Tensor, activation: GatedActivation) -> tuple[Tensor, Tensor]:
    """The least and the most that gates and ups give together if each is off by at most `error`."""
    (gate, up), (of_gate, of_up) = gate_up.chunk(2, dim=-1), error.chunk(2, dim=-1)
    moved = [
        reference_experts.join_halves(gate + by * of_gate, up + also_by * of_up, activation)
        for by, also_by in product((-1, 0, 1), repeat=2)
    ]
    return torch.stack(moved).amin(0), torch.stack(moved).amax(0)


def _sum_error(where: Where, columns: int) -> float:
    """Of a sum of so many products of FP8 numbers, as a part of its size and that of what it adds up. A Hopper's matrix
    units cut every product off some thirteen bits below the sum so far; the interpreter sums in float64."""
    return columns**0.5 * 2.0 ** (-13 if where.device == "cuda" else -20)


def _least(dtype: torch.dtype) -> float:
    """What rounding changes at most where numbers are so small that they have fewer bits."""
    return torch.finfo(dtype).tiny * UNITS[dtype]


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """As the kernels do it, which has checks of its own: values [rows, columns] and scales [rows, 1], in float64."""
    from quire.kernels.triton.linear.fp8 import quantize_rows

    values, scale = quantize_rows(x)
    return values.double()[:, : x.shape[1]], scale.double().unsqueeze(1)


def _to_fp8(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST_FP8, LARGEST_FP8).float().to(torch.float8_e4m3fn).double()


def _pick(where: Where, num: int, width: int, inner: int) -> Tensor:
    """Matrices with one number in each row, [num, width, inner]; in another column for every expert."""
    columns = (torch.arange(width, device=where.device) + torch.arange(num, device=where.device)[:, None]) % inner
    made = torch.zeros(num, width, inner, device=where.device)
    return made.scatter_(2, columns.unsqueeze(2), where.normal(num, width, 1) / 16)  # float16 has to hold the results


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
