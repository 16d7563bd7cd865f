"""Router and dispatch of a mixture of experts, on the device without synchronizing; implements
`reference.experts.route`.

`route` picks each token's experts. `sort_by_expert` then orders the (token, expert) pairs by expert and cuts each
expert's share into tiles of a maximum number of rows, so that products over tiles pad no expert to the longest one. The
host only knows a bound of the number of tiles; those past the end are empty."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.expert_types import Routing
from quire.kernels.reference.experts import router_logits
from quire.kernels.triton.launch import launch_options, let_next_start, wait_for_inputs
from quire.kernels.triton.linear.norm import rms_norm

TILE_FIELDS = 4  # expert (-1: an empty tile), begin, end, unused
BLOCK = 128  # pairs that a program places at a time
FEW_PAIRS = 512  # up to this, every program counts all pairs itself; beyond, a first kernel counts them by block
SIZES = (128, FEW_PAIRS)  # sizes that the first case is compiled for
MANY_PAIRS = 16384  # from this number of pairs on,
MANY_BLOCKS = 4  # a program places this many blocks
FEW_ROWS = 16  # up to this number of rows, norm and router are one kernel
MAX_WIDTH = 8192  # maximum width of a token for that kernel, which holds it at once
NUM_WRITTEN = 128  # tiles marked as empty at a time
TAKEN = tl.constexpr(-(2**31))


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    expert_scale_ptr,
    chosen_ptr,
    weights_ptr,
    logits_stride,
    scale,
    TOP_K: tl.constexpr,
    TOP_BLOCK: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    NUM_MEMBERS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALISE: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one token; experts are arranged as [groups, members]."""
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, MEMBERS)
    expert = group[:, None] * NUM_MEMBERS + member[None, :]
    there = (group < NUM_GROUPS)[:, None] & (member < NUM_MEMBERS)[None, :]
    wait_for_inputs(PDL)
    none = float("-inf")
    logits = tl.load(logits_ptr + token * logits_stride + expert, mask=there, other=none).to(tl.float32)
    if SOFTMAX:
        scores = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    else:
        scores = tl.sigmoid(logits)
    ranks = scores
    if BIAS:
        ranks = ranks + tl.load(bias_ptr + expert, mask=there, other=0.0)
    ranks = tl.where(there, ranks, none)
    if NUM_GROUPS > 1:
        quality = tl.zeros([GROUPS], tl.float32)
        rest = ranks
        for _ in tl.static_range(GROUP_BEST):
            best = tl.max(rest, 1)
            quality += best
            first = tl.min(tl.where(rest == best[:, None], member[None, :], MEMBERS), 1)
            rest = tl.where(member[None, :] == first[:, None], none, rest)
        quality = tl.where(group < NUM_GROUPS, quality, none)
        allowed = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            first = tl.min(tl.where(quality == tl.max(quality, 0), group, GROUPS), 0)
            allowed = allowed | (group == first)
            quality = tl.where(group == first, none, quality)
        ranks = tl.where(allowed[:, None], ranks, none)
    places = tl.arange(0, TOP_BLOCK)
    chosen = tl.zeros([TOP_BLOCK], tl.int32)
    weights = tl.zeros([TOP_BLOCK], tl.float32)
    total = 0.0
    # Floats as integers in the same order: a warp finds their maximum in one instruction. NaN becomes some number, so
    # such a token is routed somewhere, and its row is found bad when it is sampled.
    score_bits = scores.to(tl.int32, bitcast=True)
    keys = ranks.to(tl.int32, bitcast=True)
    keys = keys ^ ((keys >> 31) & 0x7FFFFFFF)
    for place in tl.static_range(TOP_K):
        best = tl.max(tl.max(keys, 1), 0)
        first = tl.min(tl.min(tl.where(keys == best, expert, GROUPS * MEMBERS), 1), 0)
        mine = expert == first
        bits = best
        if BIAS:
            bits = tl.sum(tl.sum(tl.where(mine, score_bits, 0), 1), 0)
        weight = bits.to(tl.float32, bitcast=True)  # scores are not negative, so their bits are unchanged
        total += weight
        chosen = tl.where(places == place, tl.where(first < NUM_GROUPS * NUM_MEMBERS, first, 0), chosen)
        weights = tl.where(places == place, weight, weights)
        keys = tl.where(mine, TAKEN, keys)
    if NORMALISE:
        weights = weights / total
    if SCALED:
        weights *= tl.load(expert_scale_ptr + chosen)
    chosen_ptr += token * (TOP_K + NUM_SHARED)
    weights_ptr += token * (TOP_K + NUM_SHARED)
    tl.store(chosen_ptr + places, chosen, mask=places < TOP_K)
    tl.store(weights_ptr + places, weights * scale, mask=places < TOP_K)
    if NUM_SHARED > 0:
        gate = 1.0
        if SHARED_GATED:
            gate = tl.sigmoid(tl.load(logits_ptr + token * logits_stride + NUM_GROUPS * NUM_MEMBERS).to(tl.float32))
        places = tl.arange(0, SHARED)
        tl.store(chosen_ptr + TOP_K + places, NUM_GROUPS * NUM_MEMBERS + places, mask=places < NUM_SHARED)
        tl.store(weights_ptr + TOP_K + places, tl.zeros([SHARED], tl.float32) + gate, mask=places < NUM_SHARED)


def route(
    logits: Tensor, bias: Tensor | None, routing: Routing, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Implements `reference.experts.route`, with experts as int32."""
    num_tokens = logits.shape[0]
    chosen = torch.empty(num_tokens, routing.num_sent, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, routing.num_sent, dtype=torch.float32, device=logits.device)
    members = routing.num_experts // routing.num_groups
    _route_kernel[(num_tokens,)](
        logits,
        bias,
        expert_scale,
        chosen,
        weights,
        logits.stride(0),
        routing.scale,
        TOP_K=routing.top_k,
        TOP_BLOCK=triton.next_power_of_2(routing.top_k),
        NUM_GROUPS=routing.num_groups,
        GROUPS=triton.next_power_of_2(routing.num_groups),
        NUM_MEMBERS=members,
        MEMBERS=triton.next_power_of_2(members),
        TOP_GROUPS=routing.top_groups,
        GROUP_BEST=routing.group_members,
        SOFTMAX=routing.score == "softmax",
        NORMALISE=routing.normalise,
        BIAS=bias is not None,
        SCALED=expert_scale is not None,
        NUM_SHARED=routing.num_shared,
        SHARED=triton.next_power_of_2(max(routing.num_shared, 1)),
        SHARED_GATED=routing.shared_gated,
        **launch_options(logits.device, num_warps=1),
    )
    return chosen, weights


@triton.jit
def _norm_router_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    normed_ptr,
    logits_ptr,
    x_stride,
    width,
    eps,
    NUM_LOGITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: a token's norm, which the token's first program also stores for the experts, and BLOCK of its
    logits."""
    let_next_start(PDL)
    experts = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, WIDTH)[None, :]
    inside = columns < width
    there = (experts < NUM_LOGITS)[:, None]
    weight = tl.load(weight_ptr + experts[:, None] * width + columns, mask=there & inside, other=0.0)
    norm = tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + token * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / width + eps) * norm
    if tl.program_id(0) == 0:
        tl.store(normed_ptr + token * width + columns, x.to(normed_ptr.dtype.element_ty), mask=inside)
    logits = tl.sum(weight.to(tl.float32) * x, 1)
    if BIAS:
        logits += tl.load(bias_ptr + experts, mask=experts < NUM_LOGITS, other=0.0).to(tl.float32)
    tl.store(logits_ptr + token * NUM_LOGITS + experts, logits, mask=experts < NUM_LOGITS)


def norm_route(
    stream: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    router: Tensor,
    router_bias: Tensor | None,
    choice_bias: Tensor | None,
    routing: Routing,
    expert_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implements `reference.experts.norm_route`, with experts as int32."""
    num_tokens, width = stream.shape
    if norm_weight is None or num_tokens > FEW_ROWS or width > MAX_WIDTH:
        x = stream if norm_weight is None else rms_norm(stream, norm_weight, eps)
        return x, *route(router_logits(x, router, router_bias, routing), choice_bias, routing, expert_scale)
    x = torch.empty_like(stream)
    logits = torch.empty(num_tokens, routing.num_logits, dtype=torch.float32, device=stream.device)
    block = 8 if width <= 2048 else 4
    _norm_router_kernel[(triton.cdiv(routing.num_logits, block), num_tokens)](
        stream,
        norm_weight,
        router,
        router_bias,
        x,
        logits,
        stream.stride(0),
        width,
        eps,
        NUM_LOGITS=routing.num_logits,
        BLOCK=block,
        WIDTH=triton.next_power_of_2(width),
        BIAS=router_bias is not None,
        **launch_options(stream.device, num_warps=4 if width <= 2048 else 8),
    )
    return x, *route(logits, choice_bias, routing, expert_scale)


# ---------------------------------------------------------------------------------------------------------------------
# Sorting


# Numbers that differ between steps are not specialized on, so that no kernel is compiled while requests wait.
@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(chosen_ptr, counts_ptr, num_pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: counts a block's pairs of each expert."""
    let_next_start(PDL)
    block = tl.program_id(0)
    pairs = block * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    experts = tl.load(chosen_ptr + pairs, mask=pairs < num_pairs, other=0)
    tl.store(counts_ptr + block * EXPERTS + tl.arange(0, EXPERTS), tl.histogram(experts, EXPERTS, pairs < num_pairs))


@triton.jit(do_not_specialize=["num_pairs", "num_programs", "num_tiles", "rows"])
def _place_kernel(
    chosen_ptr,
    counts_ptr,
    order_ptr,
    tiles_ptr,
    num_pairs,
    num_programs,
    num_tiles,
    rows,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ALL: tl.constexpr,
    COUNTS: tl.constexpr,
    COUNTED: tl.constexpr,
    WRITTEN: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: places BLOCKS blocks of pairs and describes some of the tiles. No tensor here is as large as a block
    times all experts: with hundreds of experts that takes the assembler many seconds."""
    let_next_start(PDL)
    program = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    wait_for_inputs(PDL)
    total = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)  # pairs in earlier blocks
    if COUNTED:
        for first_count in range(0, num_programs, COUNTS):
            counted = first_count + tl.arange(0, COUNTS)
            counts = tl.load(
                counts_ptr + counted[:, None] * EXPERTS + expert[None, :],
                mask=(counted < num_programs)[:, None],
                other=0,
            )
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where((counted < program)[:, None], counts, 0), 0)
    else:
        every = tl.arange(0, ALL)
        experts = tl.load(chosen_ptr + every, mask=every < num_pairs, other=0)
        total = tl.histogram(experts, EXPERTS, every < num_pairs)
        if program > 0:
            before = tl.histogram(experts, EXPERTS, every < tl.minimum(program * BLOCK * BLOCKS, num_pairs))
    ends = tl.cumsum(total, 0)
    starts = ends - total

    for block in range(BLOCKS):
        pairs = (program * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        mine = tl.load(chosen_ptr + pairs, mask=pairs < num_pairs, other=0)
        place = tl.gather(starts + before, mine, 0)
        others = (program * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        same = tl.load(chosen_ptr + others, mask=others < num_pairs, other=0)
        place += tl.sum(((mine[:, None] == same[None, :]) & (others[None, :] < pairs[:, None])).to(tl.int32), 1)
        tl.store(order_ptr + place, pairs, mask=pairs < num_pairs)
        if BLOCKS > 1:
            before += tl.histogram(mine, EXPERTS, pairs < num_pairs)

    own_tiles = (total + rows - 1) // rows
    tile_ends = tl.cumsum(own_tiles, 0)
    for nth in range(program, tl.max(own_tiles, 0), num_programs):  # the nth tile of each expert
        described = tiles_ptr + (tile_ends - own_tiles + nth) * TILE_FIELDS
        first = starts + nth * rows
        tl.store(described, expert, mask=nth < own_tiles)
        tl.store(described + 1, first, mask=nth < own_tiles)
        tl.store(described + 2, tl.minimum(first + rows, ends), mask=nth < own_tiles)
    num_described = tl.max(tile_ends, 0)
    for first_tile in range(program * WRITTEN, num_tiles, num_programs * WRITTEN):
        tile = first_tile + tl.arange(0, WRITTEN)
        tl.store(tiles_ptr + tile * TILE_FIELDS, -1, mask=(tile >= num_described) & (tile < num_tiles))


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs of tokens and experts in expert order, and the tiles they are cut into."""

    order: Tensor  # [pairs] int32: pairs (token * top_k + choice) in sorted order
    tiles: Tensor  # [num_tiles, TILE_FIELDS] int32
    num_tiles: int
    rows: int  # maximum rows of a tile


def sort_by_expert(chosen: Tensor, num_experts: int, rows: int) -> SortedPairs:
    """Sort the pairs of `chosen` [tokens, top_k] int32 by expert, and cut them into tiles of at most `rows`."""
    num_pairs, device = chosen.numel(), chosen.device
    num_tiles = min(num_pairs, num_pairs // rows + min(num_experts, num_pairs))
    counted = num_pairs > FEW_PAIRS
    blocks = MANY_BLOCKS if num_pairs > MANY_PAIRS else 1
    num_programs = triton.cdiv(num_pairs, BLOCK * blocks)
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    tiles = torch.empty(num_tiles, TILE_FIELDS, dtype=torch.int32, device=device)
    experts = triton.next_power_of_2(num_experts)
    counts = None
    if counted:
        counts = torch.empty(num_programs, experts, dtype=torch.int32, device=device)
        _count_kernel[(num_programs,)](
            chosen, counts, num_pairs, EXPERTS=experts, BLOCK=BLOCK * blocks, **launch_options(device, num_warps=4)
        )
    _place_kernel[(num_programs,)](
        chosen,
        counts,
        order,
        tiles,
        num_pairs,
        num_programs,
        num_tiles,
        rows,
        EXPERTS=experts,
        BLOCK=BLOCK,
        BLOCKS=blocks,
        ALL=next(size for size in SIZES if size >= min(num_pairs, FEW_PAIRS)),
        COUNTS=max(1, 4096 // experts),
        COUNTED=counted,
        WRITTEN=NUM_WRITTEN,
        TILE_FIELDS=TILE_FIELDS,
        **launch_options(device, num_warps=4),
    )
    return SortedPairs(order, tiles, num_tiles, rows)
