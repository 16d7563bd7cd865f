"""Expert products of a few tokens, which are bound by reading the weights; used by `experts`.

Plain arithmetic units, no sorting. A program of the first product computes some outputs of one expert over all columns,
for every token that chose it, so no weight is read twice. A program of the second computes some outputs of one token
over all its experts and adds them. The second product loads its weights while the first one still runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.expert_types import ExpertWeights, GatedActivation
from quire.kernels.triton.activations import gelu_tanh
from quire.kernels.triton.launch import launch_options, let_next_start, wait_for_inputs

MAX_TOKENS = 4  # tokens share experts more often than by chance; with eight, tiles are faster
MAX_PAIRS = 128  # (token, expert) pairs: every program of the first product scans all of them
MAX_WIDTH = 8192  # a program holds whole rows of a weight in registers,
MAX_INNER = 16384  # or its tiles in flight
MAX_TILES = 24  # tiles of the second product per program
AHEAD = 12  # tiles loaded before the first product has ended; with two bytes per element, all that registers hold
AHEAD_WIDE = 4  # the same for tiles of four times as many columns
NO_LIMIT = 3.0e38


@triton.jit
def _weight_tile(weight_ptr, outs, columns, in_features, num_outs, EVEN: tl.constexpr):
    places = weight_ptr + outs[:, None] * in_features + columns[None, :]
    if EVEN:
        return tl.load(places)
    return tl.load(places, mask=(outs < num_outs)[:, None] & (columns < in_features)[None, :], other=0.0)


@triton.jit
def _input_tile(x_ptr, columns, in_features):
    """Input columns as one row of a tile, so that they are in the threads that hold the weight's columns."""
    columns = columns[None, :]
    return tl.load(x_ptr + columns, mask=columns < in_features, other=0.0).to(tl.float32)


@triton.jit
def _products(weight, x, OUT: tl.constexpr, IN: tl.constexpr):
    """Partial sums of products: eight neighbours, held by one thread, are added at once, which saves registers."""
    return tl.sum(tl.reshape(weight.to(tl.float32) * x, [OUT, IN // 8, 8]), 2)


@triton.jit
def gated(gate, up, alpha, shift, limit, LIMITED: tl.constexpr, GELU: tl.constexpr):
    """Gated activation: gate and up, clamped if LIMITED, combined."""
    if LIMITED:
        gate = tl.minimum(gate, limit)
        up = tl.clamp(up, -limit, limit)
    if GELU:
        gate = gelu_tanh(gate)
    else:
        gate *= tl.sigmoid(alpha * gate)
    return gate * (up + shift)


@triton.jit(do_not_specialize=["num_pairs"])
def _few_gate_up_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    chosen_ptr,
    out_ptr,
    in_features,
    num_outs,
    num_pairs,
    alpha,
    shift,
    limit,
    TOP_K: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
    ALONE: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    LIMITED: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_OUT gates and ups of a pair's expert, with all CHUNKS times BLOCK_IN columns in registers, for
    all pairs of that expert; the program of the first such pair computes, the others return. ALONE: there is one token,
    whose experts are all different."""
    wait_for_inputs(PDL)
    let_next_start(PDL)  # not earlier: the next kernel reads, before it waits, what was written before this kernel
    pair = tl.program_id(0)
    outs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inside = outs < num_outs
    columns = tl.arange(0, BLOCK_IN)
    expert = tl.load(chosen_ptr + pair)
    first = pair
    if not ALONE:
        index = tl.arange(0, PAIRS)
        same = tl.load(chosen_ptr + index, mask=index < num_pairs, other=-1) == expert
        first = tl.min(tl.where(same, index, PAIRS), 0)
    if first == pair:
        gate_ptr = weight_ptr + expert.to(tl.int64) * 2 * num_outs * in_features
        up_ptr = gate_ptr + num_outs * in_features
        gates = ()
        ups = ()
        for chunk in tl.static_range(CHUNKS):
            here = chunk * BLOCK_IN + columns
            gate_tile = _weight_tile(gate_ptr, outs, here, in_features, num_outs, EVEN)
            up_tile = _weight_tile(up_ptr, outs, here, in_features, num_outs, EVEN)
            gates = gates + (gate_tile,)  # type: ignore[assignment]  # noqa: RUF005
            ups = ups + (up_tile,)  # type: ignore[assignment]  # noqa: RUF005
        while pair < num_pairs:
            row = x_ptr + pair // TOP_K * in_features
            gate_sums = tl.zeros([BLOCK_OUT, BLOCK_IN // 8], tl.float32)
            up_sums = tl.zeros([BLOCK_OUT, BLOCK_IN // 8], tl.float32)
            for chunk in tl.static_range(CHUNKS):
                x = _input_tile(row, chunk * BLOCK_IN + columns, in_features)
                gate_sums += _products(gates[chunk], x, BLOCK_OUT, BLOCK_IN)
                up_sums += _products(ups[chunk], x, BLOCK_OUT, BLOCK_IN)
            gate = tl.sum(gate_sums, 1)
            up = tl.sum(up_sums, 1)
            if SCALED:
                scale = scale_ptr + expert * 2 * num_outs + outs
                gate *= tl.load(scale, mask=inside, other=0.0)
                up *= tl.load(scale + num_outs, mask=inside, other=0.0)
            if BIAS:
                bias = bias_ptr + expert * 2 * num_outs + outs
                gate += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
                up += tl.load(bias + num_outs, mask=inside, other=0.0).to(tl.float32)
            out = gated(gate, up, alpha, shift, limit, LIMITED, GELU)
            tl.store(out_ptr + pair * num_outs + outs, out.to(out_ptr.dtype.element_ty), mask=inside)
            if ALONE:
                pair = num_pairs
            else:
                pair = tl.min(tl.where(same & (index > pair), index, num_pairs), 0)


@triton.jit
def _down_tile(
    weight_ptr,
    experts,
    outs,
    columns,
    in_features,
    num_outs,
    TILE: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Load tile TILE of the second product; tiles are numbered expert by expert."""
    start = experts[TILE // CHUNKS] * num_outs * in_features
    return _weight_tile(weight_ptr + start, outs, TILE % CHUNKS * BLOCK_IN + columns, in_features, num_outs, EVEN)


@triton.jit
def _few_down_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    chosen_ptr,
    shares_ptr,
    residual_ptr,
    out_ptr,
    in_features,
    num_outs,
    TOP_K: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    CHUNKS: tl.constexpr,
    AHEAD: tl.constexpr,
    EVEN: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_OUT outputs of a token, from CHUNKS times BLOCK_IN columns of each of its experts. AHEAD:
    number of tiles in flight."""
    let_next_start(PDL)
    token = tl.program_id(0)
    outs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inside = outs < num_outs
    columns = tl.arange(0, BLOCK_IN)
    # The choice of experts is older than the preceding kernel, which let this one start only after it had waited
    # itself: weights are loaded before that kernel's results exist.
    experts = ()
    for choice in tl.static_range(TOP_K):
        expert = tl.load(chosen_ptr + token * TOP_K + choice, cache_modifier=".cg")
        experts = experts + (expert.to(tl.int64),)  # type: ignore[assignment]  # noqa: RUF005
    tiles = ()
    for tile in tl.static_range(AHEAD):
        weight = _down_tile(weight_ptr, experts, outs, columns, in_features, num_outs, tile, CHUNKS, BLOCK_IN, EVEN)
        tiles = tiles + (weight,)  # type: ignore[assignment]  # noqa: RUF005
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_OUT, BLOCK_IN // 8], tl.float32)
    bias = tl.zeros([BLOCK_OUT], tl.float32)
    for tile in tl.static_range(TOP_K * CHUNKS):
        if tile + AHEAD < TOP_K * CHUNKS:
            weight = _down_tile(
                weight_ptr, experts, outs, columns, in_features, num_outs, tile + AHEAD, CHUNKS, BLOCK_IN, EVEN
            )
            tiles = tiles + (weight,)  # type: ignore[assignment]  # noqa: RUF005
        pair = token * TOP_K + tile // CHUNKS
        share = tl.load(shares_ptr + pair)
        x = _input_tile(x_ptr + pair * in_features, tile % CHUNKS * BLOCK_IN + columns, in_features)
        place = experts[tile // CHUNKS] * num_outs + outs
        if SCALED:
            scale = share * tl.load(scale_ptr + place, mask=inside, other=0.0)
            acc += _products(tiles[tile], x, BLOCK_OUT, BLOCK_IN) * scale[:, None]
        else:
            acc += _products(tiles[tile], x * share, BLOCK_OUT, BLOCK_IN)
        if BIAS and tile % CHUNKS == 0:
            bias += share * tl.load(bias_ptr + place, mask=inside, other=0.0).to(tl.float32)
    out = tl.sum(acc, 1) + bias
    if RESIDUAL:
        out += tl.load(residual_ptr + token * num_outs + outs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * num_outs + outs, out.to(out_ptr.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------------------------------------------------------------
# Choosing and launching


@dataclass(frozen=True, slots=True)
class FewProductTuning:
    """Tile sizes and launch options of one product of a few tokens."""

    block_out: int
    block_in: int  # maximum columns of a tile
    num_warps: int
    ahead: int = 0  # tiles loaded before the preceding kernel has ended; the first product always loads all


@dataclass(frozen=True, slots=True)
class FewTuning:
    """Tunings of both products."""

    gate_up: FewProductTuning
    down: FewProductTuning


def tune(num_tokens: int, width: int, inner: int, top_k: int, element_size: int = 2) -> FewTuning:
    """Choose tilings by measurement on an H200. One token: experts of six models, from 2048 x 512 with ten per token to
    4096 x 14336 with two. A few tokens: Qwen3-30B-A3B (2048 x 768), and as many bytes in flight for others. FP8: one
    token of Qwen3-30B-A3B and of gpt-oss-20b."""
    if element_size == 1:
        return FewTuning(FewProductTuning(1, 1024, 1), _tune_fp8_down(inner, top_k))
    if num_tokens == 1:
        return FewTuning(_tune_one_up(width), _tune_one_down(inner, top_k, element_size))
    down_columns = _down_columns(256, inner, top_k)
    down_warps, ahead = min(16, down_columns // 256), 2 * AHEAD // element_size
    columns = 2048 if width % 2048 == 0 else 1024
    return FewTuning(FewProductTuning(1, columns, 4), FewProductTuning(4, down_columns, down_warps, ahead))


def _tune_one_up(width: int) -> FewProductTuning:
    if width % 1024:  # two halves waste less time past the end than many parts
        return FewProductTuning(2, 2048, 4 if width <= 4096 else 8)
    return FewProductTuning(1, 1024, 2 if width <= 4096 else 4)


def _tune_one_down(inner: int, top_k: int, element_size: int) -> FewProductTuning:
    if inner <= 512:  # tiles of whole rows would be too few to keep loads in flight
        columns = _down_columns(256, inner, top_k)
        return FewProductTuning(2, columns, min(16, columns // 256), 2 * AHEAD // element_size)
    columns = _down_columns(1024, inner, top_k)
    return FewProductTuning(4, columns, min(16, columns // 256), 2 * AHEAD_WIDE // element_size)


def _tune_fp8_down(inner: int, top_k: int) -> FewProductTuning:
    if inner <= 1024:
        return FewProductTuning(4, 1024, 2, 4)
    columns = _down_columns(512, inner, top_k)
    return FewProductTuning(2, columns, min(16, columns // 256), 4)


def _down_columns(least: int, inner: int, top_k: int) -> int:
    """Columns of a tile of the second product, at least `least`, such that a program has at most MAX_TILES tiles."""
    while top_k * triton.cdiv(inner, least) > MAX_TILES:
        least *= 2
    return least


def is_preferred(x: Tensor, experts: ExpertWeights, chosen: Tensor) -> bool:
    """Whether the shapes are supported and this path is faster. One token's experts are all different. Several tokens
    may share one, whose second product is then computed once per token, while tiles share it. In FP8 tiles are faster
    even if no expert is shared, because conversion costs more than reading. Within a model, the number of tokens
    decides."""
    num_experts, width, inner = experts.down.shape
    num_tokens, top_k = chosen.shape
    most = MAX_TOKENS if experts.down_scale is None else 1
    few = num_tokens == 1 or (num_tokens <= most and 2 * chosen.numel() <= num_experts)
    fits = chosen.numel() <= MAX_PAIRS and top_k <= MAX_TILES and width <= MAX_WIDTH and inner <= MAX_INNER
    return few and fits and width % 8 == 0 and inner % 8 == 0 and x.is_contiguous()


def activation_args(activation: GatedActivation | None) -> tuple[float, float, float]:
    """Alpha, shift and limit for `gated`."""
    if activation is None:
        return 1.0, 0.0, NO_LIMIT
    return activation.alpha, activation.shift, NO_LIMIT if activation.limit is None else activation.limit


def activation_options(activation: GatedActivation | None) -> dict[str, bool]:
    """Compile-time options of `gated`."""
    return {
        "LIMITED": activation is not None and activation.limit is not None,
        "GELU": activation is not None and activation.curve == "gelu_tanh",
    }


def run_few(
    x: Tensor,
    experts: ExpertWeights,
    chosen: Tensor,
    weights: Tensor,
    residual: Tensor | None,
    tuning: FewTuning | None = None,
) -> Tensor:
    """Implements `reference.experts.run_experts`; `chosen` int32 and `weights` float32, all contiguous."""
    _, width, inner = experts.down.shape
    tuning = tuning or tune(len(x), width, inner, chosen.shape[1], experts.down.element_size())
    return down(gate_up(x, experts, chosen, tuning.gate_up), experts, chosen, weights, residual, tuning.down)


def gate_up(x: Tensor, experts: ExpertWeights, chosen: Tensor, tuning: FewProductTuning) -> Tensor:
    """First product and gated activation: [pairs, inner]."""
    _, width, inner = experts.down.shape
    num_pairs = chosen.numel()
    joined = x.new_empty(num_pairs, inner)
    block_in, block_out = _tile_columns(width, tuning.block_in), tuning.block_out
    _few_gate_up_kernel[(num_pairs, triton.cdiv(inner, block_out))](
        x,
        experts.gate_up,
        experts.gate_up_scale,
        experts.gate_up_bias,
        chosen,
        joined,
        width,
        inner,
        num_pairs,
        *activation_args(experts.activation),
        TOP_K=chosen.shape[1],
        PAIRS=MAX_PAIRS,
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        CHUNKS=triton.cdiv(width, block_in),
        EVEN=inner % block_out == 0 and width % block_in == 0,
        ALONE=len(x) == 1,
        SCALED=experts.gate_up_scale is not None,
        BIAS=experts.gate_up_bias is not None,
        **activation_options(experts.activation),
        **launch_options(x.device, tuning.num_warps),
    )
    return joined


def down(
    joined: Tensor,
    experts: ExpertWeights,
    chosen: Tensor,
    weights: Tensor,
    residual: Tensor | None,
    tuning: FewProductTuning,
) -> Tensor:
    """Second product, with the experts' results weighted and added. Must be launched right after `gate_up`."""
    _, width, inner = experts.down.shape
    num_tokens, top_k = chosen.shape
    out = joined.new_empty(num_tokens, width)
    block_in, block_out = _tile_columns(inner, tuning.block_in), tuning.block_out
    chunks = triton.cdiv(inner, block_in)
    _few_down_kernel[(num_tokens, triton.cdiv(width, block_out))](
        joined,
        experts.down,
        experts.down_scale,
        experts.down_bias,
        chosen,
        weights,
        residual,
        out,
        inner,
        width,
        TOP_K=top_k,
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        CHUNKS=chunks,
        AHEAD=min(tuning.ahead, top_k * chunks),
        EVEN=inner % block_in == 0 and width % block_out == 0,
        SCALED=experts.down_scale is not None,
        BIAS=experts.down_bias is not None,
        RESIDUAL=residual is not None,
        **launch_options(joined.device, tuning.num_warps),
    )
    return out


def _tile_columns(num_columns: int, most: int) -> int:
    return min(most, max(16, triton.next_power_of_2(num_columns)))
