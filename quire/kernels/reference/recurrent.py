"""Recurrent layers in plain torch over a ragged batch: the CPU path, and the oracle for faster implementations.

All kinds share one recurrence per head, with a state S [value_dim, key_dim], a decay, a key, a query and a value:

    S = S exp(decay);   u = beta (value - S key), or just the value;   S = S + u key';   out = S query

The first u is the delta rule (gated delta net), the second is Mamba2. A decay is one number per head, or one per key
channel, which is a column of S (Kimi Delta Attention). `exact_scan` runs token by token; `chunk_scan` computes the same
with matrix products over chunks; decode rows run through `single_step` in one batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.recurrent_types import ConvShape, ConvWeights, DeltaWeights, MambaWeights, RecurrentShape

CHUNK = 32  # tokens; measured best on a CPU, where the triangular solve costs the square of it
LARGE_STATE = 1 << 16  # elements of a row's state, from which it is updated in place
L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class RecurrentPlan:
    """The plan that all recurrent layers share in one step."""

    num_tokens: int
    slots: Tensor  # [rows] int64
    positions: Tensor  # [tokens] int64
    decode_rows: Tensor | None  # [rows] int64: indices of the decode rows; None: all rows are
    decode_tokens: Tensor | None  # [rows] int64: indices of their tokens in the step
    prefills: tuple[tuple[int, int, int], ...]  # (row, first token, count) of the prefill rows


def plan_recurrent(slots: Tensor, positions: Tensor, counts: list[int]) -> RecurrentPlan:
    """Splits a step's rows into decode and prefill rows. `slots` [rows] and `positions` [tokens] are int64 on the
    device; `counts` are per row on the host."""
    if all(count == 1 for count in counts):
        return RecurrentPlan(len(counts), slots, positions, None, None, ())
    firsts, first = [], 0
    for count in counts:
        firsts.append(first)
        first += count
    decode_rows = [row for row, count in enumerate(counts) if count == 1]
    places = torch.tensor([decode_rows, [firsts[row] for row in decode_rows]], dtype=torch.int64, device=slots.device)
    prefills = tuple((row, firsts[row], count) for row, count in enumerate(counts) if count > 1)
    return RecurrentPlan(first, slots, positions, places[0], places[1], prefills)


# ---------------------------------------------------------------------------------------------------------------------
# Layers: everything between the input projection and the output projection


def gated_delta_net(
    x: Tensor, weights: DeltaWeights, shape: RecurrentShape, state: Tensor, plan: RecurrentPlan
) -> Tensor:
    """Gated delta net between its input and output projections. x [tokens, channels + values + 2 heads] holds queries,
    keys and values before the convolution, the output gate, and the inputs of beta and decay per head. `state` [slots,
    slot_elements] is updated. Returns [tokens, values]."""
    mixed, gate, beta, a = x.split((shape.channels, shape.values, shape.num_heads, shape.num_heads), dim=1)
    mixed = functional.silu(causal_conv(mixed, weights.conv, None, shape, state, plan), inplace=True)
    q, k, v = _wide(mixed).split((shape.keys, shape.keys, shape.values), dim=1)
    q, k = (_l2_norm(part.unflatten(1, (shape.num_groups, shape.key_dim))) for part in (q, k))
    decay = -_wide(weights.a_log).exp() * functional.softplus(_wide(a) + _wide(weights.dt_bias))  # [tokens, heads]
    heads = RecurrentInputs(
        q * shape.key_dim**-0.5,
        k,
        v.unflatten(1, (shape.num_heads, -1)),
        decay.unsqueeze(2),
        _wide(beta).sigmoid() * shape.beta_top,
    )
    out = recurrence(heads, shape, state, plan)  # [tokens, heads, value_dim]
    out = functional.rms_norm(out, (shape.value_dim,), _wide(weights.norm), weights.eps)
    return (out.flatten(1) * functional.silu(_wide(gate))).to(x.dtype)


def channel_delta_net(
    x: Tensor,
    forget: Tensor,
    gate: Tensor,
    weights: DeltaWeights,
    shape: RecurrentShape,
    state: Tensor,
    plan: RecurrentPlan,
) -> Tensor:
    """Kimi Delta Attention between its projections. x [tokens, channels + heads] holds queries, keys and values before
    the convolution, then the input of beta per head; `forget` [tokens, keys] is the input of each channel's decay;
    `gate` [tokens, values] is the output gate. Every head has a key and a query of its own. `state` [slots,
    slot_elements] is updated. Returns [tokens, values]."""
    mixed, beta = x.split((shape.channels, shape.num_heads), dim=1)
    mixed = functional.silu(causal_conv(mixed, weights.conv, None, shape, state, plan), inplace=True)
    by_head = (shape.num_heads, -1)
    q, k, v = (part.unflatten(1, by_head) for part in _wide(mixed).split((shape.keys, shape.keys, shape.values), dim=1))
    decay = functional.softplus(_wide(forget) + _wide(weights.dt_bias)).unflatten(1, by_head)
    decay = -_wide(weights.a_log).exp().unsqueeze(1) * decay  # [tokens, heads, key_dim]
    heads = RecurrentInputs(
        _l2_norm(q) * shape.key_dim**-0.5, _l2_norm(k), v, decay, _wide(beta).sigmoid() * shape.beta_top
    )
    out = recurrence(heads, shape, state, plan)  # [tokens, heads, value_dim]
    out = functional.rms_norm(out, (shape.value_dim,), _wide(weights.norm), weights.eps)
    return (out.flatten(1) * _wide(gate).sigmoid()).to(x.dtype)


def mamba2(x: Tensor, weights: MambaWeights, shape: RecurrentShape, state: Tensor, plan: RecurrentPlan) -> Tensor:
    """Mamba2 between its projections. x [tokens, values + channels + heads] holds the output gate, then values, keys
    and queries before the convolution, then the input of the time step per head. `state` [slots, slot_elements] is
    updated. Returns [tokens, values]."""
    gate, mixed, dt = x.split((shape.values, shape.channels, shape.num_heads), dim=1)
    mixed = functional.silu(causal_conv(mixed, weights.conv, weights.conv_bias, shape, state, plan), inplace=True)
    v, k, q = _wide(mixed).split((shape.values, shape.keys, shape.keys), dim=1)
    q, k = (part.unflatten(1, (shape.num_groups, shape.key_dim)) for part in (q, k))
    v = v.unflatten(1, (shape.num_heads, shape.value_dim))
    dt = functional.softplus(_wide(dt) + _wide(weights.dt_bias)).clamp(weights.dt_low, weights.dt_high)
    decay = -_wide(weights.a_log).exp() * dt  # [tokens, heads]
    heads = RecurrentInputs(q, k, v * dt.unsqueeze(2), decay.unsqueeze(2), None)
    out = recurrence(heads, shape, state, plan) + _wide(weights.skip).unsqueeze(1) * v
    return _gate_and_norm(out.flatten(1), functional.silu(_wide(gate)), weights).to(x.dtype)


def _gate_and_norm(out: Tensor, gate: Tensor, weights: MambaWeights) -> Tensor:
    """Gates and norms the output; `out` and `gate` are [tokens, values]."""
    if weights.norm is None:
        return out * gate
    parts = (out * gate if weights.gate_first else out).unflatten(1, (weights.norm_groups, -1))
    normed = functional.rms_norm(parts, parts.shape[2:], None, weights.eps).flatten(1) * _wide(weights.norm)
    return normed if weights.gate_first else normed * gate


def short_conv(x: Tensor, weights: ConvWeights, shape: ConvShape, state: Tensor, plan: RecurrentPlan) -> Tensor:
    """Gated short convolution. x [tokens, 3 channels] holds the input gate, the output gate and the convolution's
    input; neither gate has an activation. `state` [slots, slot_elements] is updated. Returns [tokens, channels]."""
    gate, out_gate, value = x.chunk(3, dim=1)
    return causal_conv(gate * value, weights.conv, weights.bias, shape, state, plan).mul_(out_gate)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: RecurrentShape | ConvShape,
    state: Tensor,
    plan: RecurrentPlan,
) -> Tensor:
    """Convolves each channel with its last inputs and updates the rings in `state`. Returns [tokens, channels]."""
    rings = shape.rings(state)
    taps = weight[:, 0].t().to(x.dtype)  # [conv_len, channels], the token itself last
    slots, places, num_taps = plan.slots, plan.positions, shape.conv_len
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    decode_inputs = x
    if plan.decode_rows is not None and plan.decode_tokens is not None:
        decode_inputs, places = x[plan.decode_tokens], places[plan.decode_tokens]
        slots = slots[plan.decode_rows]
    if len(decode_inputs):
        rings[slots, places % num_taps] = decode_inputs.to(rings.dtype)
        age = torch.arange(num_taps - 1, -1, -1, device=x.device)
        history = rings[slots.unsqueeze(1), (places.unsqueeze(1) - age) % num_taps]  # [rows, conv_len, channels]
        convolved = (history.to(x.dtype) * taps).sum(1)
        if plan.decode_tokens is None:
            out = convolved
        else:
            out[plan.decode_tokens] = convolved
    for row, first, count in plan.prefills:
        slot, start = plan.slots[row], plan.positions[first]
        before = torch.arange(1 - num_taps, 0, device=x.device)
        history = rings[slot, (start + before) % num_taps].to(x.dtype)
        chunk = x[first : first + count]
        padded = torch.cat((history, chunk))  # [conv_len - 1 + count, channels]
        convolved = torch.mul(padded[:count], taps[0], out=out[first : first + count])
        for tap in range(1, num_taps):
            convolved.addcmul_(padded[tap : tap + count], taps[tap])
        kept = min(count, num_taps)
        last = plan.positions[first + count - kept : first + count]
        rings[slot, last % num_taps] = chunk[-kept:].to(rings.dtype)
    return out if bias is None else out.add_(bias)


# ---------------------------------------------------------------------------------------------------------------------
# The recurrence


@dataclass(frozen=True, slots=True)
class RecurrentInputs:
    q: Tensor  # [tokens, groups, key_dim], float32 like all of them
    k: Tensor  # [tokens, groups, key_dim]
    v: Tensor  # [tokens, heads, value_dim]
    decay: Tensor  # [tokens, heads, 1 or key_dim]: the logarithm, 0 or below
    beta: Tensor | None  # [tokens, heads]; None: no delta rule

    def expanded(self, span: slice | Tensor) -> RecurrentInputs:
        """Returns the inputs of these tokens, with keys and queries repeated for every head."""
        q, k = self.q[span], self.k[span]
        if (times := self.v.shape[1] // self.k.shape[1]) > 1:
            q, k = q.repeat_interleave(times, dim=1), k.repeat_interleave(times, dim=1)
        return RecurrentInputs(q, k, self.v[span], self.decay[span], None if self.beta is None else self.beta[span])


def recurrence(inputs: RecurrentInputs, shape: RecurrentShape, state: Tensor, plan: RecurrentPlan) -> Tensor:
    """Runs the recurrence over all rows of the step; each reads and updates its slot. Returns [tokens, heads,
    value_dim]."""
    matrices = shape.matrices(state)
    if plan.decode_rows is None or plan.decode_tokens is None:
        return _decode_rows(inputs.expanded(slice(None)), matrices, plan.slots)
    out = torch.empty_like(inputs.v)
    if len(plan.decode_rows):
        slots = plan.slots[plan.decode_rows]
        out[plan.decode_tokens] = _decode_rows(inputs.expanded(plan.decode_tokens), matrices, slots)
    for row, first, count in plan.prefills:
        span = slice(first, first + count)
        slot = plan.slots[row]
        out[span], matrices[slot] = chunk_scan(inputs.expanded(span), matrices[slot])
    return out


def _decode_rows(inputs: RecurrentInputs, matrices: Tensor, slots: Tensor) -> Tensor:
    """Computes one token of each row. Large states are updated in place row by row, since copying would cost more."""
    if matrices[0].numel() < LARGE_STATE:
        states = matrices[slots]
        out = single_step(inputs, states)
        matrices[slots] = states
        return out
    out = torch.empty_like(inputs.v)
    for row, slot in enumerate(slots.tolist()):
        out[row : row + 1] = single_step(inputs.expanded(slice(row, row + 1)), matrices[slot : slot + 1])
    return out


def single_step(inputs: RecurrentInputs, state: Tensor) -> Tensor:
    """Computes one token of each row. Updates `state` [rows, heads, value_dim, key_dim] and returns [rows, heads,
    value_dim]."""
    state.mul_(inputs.decay.exp().unsqueeze(2))
    update = inputs.v
    if inputs.beta is not None:
        update = (update - (state @ inputs.k.unsqueeze(3)).squeeze(3)) * inputs.beta.unsqueeze(2)
    state.addcmul_(update.unsqueeze(3), inputs.k.unsqueeze(2))
    return (state @ inputs.q.unsqueeze(3)).squeeze(3)


def exact_scan(inputs: RecurrentInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes one row token by token: state [heads, value_dim, key_dim] -> ([tokens, heads, value_dim], new state)."""
    moving = state.unsqueeze(0).clone()
    tokens = [slice(token, token + 1) for token in range(len(inputs.v))]
    return torch.cat([single_step(inputs.expanded(token), moving) for token in tokens]), moving[0]


def chunk_scan(inputs: RecurrentInputs, state: Tensor, chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Computes the result of `exact_scan` chunk by chunk."""
    out = torch.empty_like(inputs.v)
    for first in range(0, len(inputs.v), chunk):
        span = slice(first, first + chunk)
        out[span], state = _scan_chunk(inputs.expanded(span), state)
    return out, state


def _scan_chunk(inputs: RecurrentInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Computes one chunk. With G the running sum of the decays, the updates u solve a unit lower triangular system:

    u_i + beta_i sum_{j<i} (k_i exp(G_i - G_j) k_j) u_j = beta_i (v_i - S exp(G_i) k_i)
    """
    q, k, v, decay = (part.transpose(0, 1) for part in (inputs.q, inputs.k, inputs.v, inputs.decay))
    total = decay.cumsum(1)  # [heads, tokens, 1 or key_dim]
    fade = total.exp()
    update = v
    if inputs.beta is None:
        (scores,) = faded_products((q,), k, total)
    else:
        scores, system = faded_products((q, k), k, total)
        beta = inputs.beta.t().unsqueeze(2)
        wanted = (v - (k * fade) @ state.transpose(1, 2)) * beta
        update = torch.linalg.solve_triangular(system.mul_(beta), wanted, upper=False, unitriangular=True)
    out = (q * fade) @ state.transpose(1, 2) + scores @ update
    last = total[:, -1:]
    state = last.exp() * state + update.transpose(1, 2) @ (k * (last - total).exp())
    return out.transpose(0, 1), state


def faded_products(readers: tuple[Tensor, ...], k: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    """Computes the causal decayed products, sum over channels of q_i exp(G_i - G_j) k_j for j <= i and 0 otherwise.

    Each q in `readers` and k are [heads, tokens, key_dim]; `total` is G, [heads, tokens, 1 or key_dim]. Returns
    [heads, tokens, tokens] for each q."""
    size = k.shape[1]
    if total.shape[2] == 1:
        between = total - total.transpose(1, 2)
        seen = torch.ones(size, size, dtype=torch.bool, device=k.device).tril_()
        between.masked_fill_(~seen, -torch.inf).exp_()  # masked before exp, which may overflow
        return tuple((q @ k.transpose(1, 2)).mul_(between) for q in readers)
    # Per-channel decay would need exp(-G_j), which overflows. Instead, consider the highest bit in which the indices of
    # j < i differ: above it both lie in the same block, j in its first half and i in its second. With R the total at
    # the end of the first half, exp(G_i - R) exp(R - G_j) has no exponent above 0, and all blocks of one size are one
    # matrix product.
    products = tuple(torch.diag_embed((q * k).sum(2)) for q in readers)
    places = torch.arange(size, device=k.device)
    for level in range((size - 1).bit_length()):
        block, second = places >> (level + 1), (places >> level & 1).bool()
        middle = total[:, ((block << (level + 1)) + (1 << level) - 1).clamp_(max=size - 1)]  # [heads, tokens, key_dim]
        fade = torch.where(second.unsqueeze(1), total - middle, middle - total).exp_()
        parted = (block.unsqueeze(1) == block) & second.unsqueeze(1) & ~second
        right = (k * fade).transpose(1, 2)
        for sums, q in zip(products, readers, strict=True):
            sums += ((q * fade) @ right).mul_(parted)
    return products


def _wide(x: Tensor) -> Tensor:
    """Returns x in at least float32, which sums over a whole sequence need."""
    return x.float() if x.dtype.itemsize < 4 else x


def _l2_norm(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()
