"""Trials of the ops table's kernels on small problems of a model's own shape, before the model is built with them.

A kernel that does not compile, fails to run, or disagrees with the reference is replaced by the reference, which is
slower and always available. `models.loading.kernel_trials` lists a model's trials and calls `settle_ops`. Trials
compile only what the first request would compile anyway. This file has the trials of dense models; `expert_trials`,
`latent_trials` and `recurrent_trials` have the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.kernels.activations import Curve
from quire.kernels.table import REFERENCE, Ops
from quire.kernels.validation.failures import reason, report_unusable
from quire.kernels.validation.trial_results import Findings

TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
FP8_TOLERANCE = 0.15
NUM_TOKENS = 84  # prompt length of attention trials: more than a GPU's page of 64, so that a second page is read
EXACT = 1e-12  # limit for results that must be exact
FEW_TOKENS = 16  # tokens of trials that run the kernels for small batches, which every request needs


@dataclass(frozen=True, slots=True)
class KernelTrial:
    """One trial: ops that are tried together and replaced together."""

    name: str
    attempt: Callable[[Ops], None]  # runs the trial; raises if it fails
    fallback: Callable[[Ops], Ops] | None  # returns the table with the fallback in place; None: there is no fallback


def settle_ops(ops: Ops, rows: Iterable[KernelTrial], *, strict: bool, findings: Findings | None = None) -> Ops:
    """Returns the table with a fallback for each failed trial, and warns about each; `strict`: raise `kernel_failed`
    instead."""
    findings = findings or Findings()
    for row in rows:
        error = failure(ops, row, findings)
        if error is not None:
            report_unusable(row.name, reason(error), refuse=strict or row.fallback is None)
            assert row.fallback is not None
            ops = row.fallback(ops)
    return ops


def failure(ops: Ops, row: KernelTrial, findings: Findings | None = None) -> Exception | None:
    return (findings or Findings()).error_of(lambda: row.attempt(ops))


def reference_for(*names: str, captured: bool = False, **adapted: Callable[..., Any]) -> Callable[[Ops], Ops]:
    """Returns a function that replaces these ops of a table by the reference, and those in `adapted` by the given
    functions, whose outputs suit the remaining kernels.

    `captured`: the reference also works in CUDA graphs. If not (it synchronizes for sizes, or writes the slots of
    padding rows), the table no longer captures steps."""
    others = () if captured else ("captures", "captured_work")
    rows: dict[str, Any] = {name: getattr(REFERENCE, name) for name in (*names, *others)} | adapted
    return lambda ops: replace(ops, **rows)


def contiguous(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps a reference op to return contiguous tensors, which kernels require, instead of views."""
    return lambda *args: op(*args).contiguous()


def reference_route(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The reference's `norm_route` with int32 expert numbers, as kernels read them; the reference's own `run_experts`
    takes both dtypes."""
    x, chosen, weights = REFERENCE.norm_route(*args)
    return x, chosen.int(), weights


# ---------------------------------------------------------------------------------------------------------------------
# Norms and products


def norm_trial(width: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device) -> KernelTrial:
    def attempt(ops: Ops) -> None:
        x, weight = normal(device, dtype, NUM_TOKENS, width), normal(device, weight_dtype, width)
        finish_writes(device)
        compare(ops.rms_norm(x, weight, 1e-6), lambda: _plain_norm(x, weight), dtype)

    return KernelTrial("norm", attempt, _without_norm)


def _plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return REFERENCE.rms_norm(x.float(), weight.float(), 1e-6)


def _without_norm(ops: Ops) -> Ops:
    """Replaces the norm kernel and all kernels that launch it for some numbers of rows."""
    return replace(ops, rms_norm=REFERENCE.rms_norm, norm_route=reference_route, fused_linear=None)


def norm_add_trial(width: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device) -> KernelTrial:
    def attempt(ops: Ops) -> None:
        if ops.norm_add is None:
            return
        x, weight = normal(device, dtype, NUM_TOKENS, width), normal(device, weight_dtype, width)
        stream = normal(device, dtype, NUM_TOKENS, width)
        before = stream.clone()
        finish_writes(device)
        compare(ops.norm_add(x, weight, 1e-6, stream, 0.5), lambda: before + 0.5 * _plain_norm(x, weight), dtype)

    return KernelTrial("norm of what is added", attempt, lambda ops: replace(ops, norm_add=None))


def gate_mul_trial(inner_width: int, curve: Curve, dtype: torch.dtype, device: torch.device) -> KernelTrial:
    def attempt(ops: Ops) -> None:
        x = normal(device, dtype, NUM_TOKENS, 2 * inner_width)
        finish_writes(device)
        compare(ops.gate_mul(x, curve), lambda: REFERENCE.gate_mul(x, curve), dtype)

    return KernelTrial("gate_mul", attempt, reference_for("gate_mul", captured=True))


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer with its fused operations: a norm and a gate, or the residual addition."""

    in_features: int
    out_features: int
    dtype: torch.dtype
    norm_dtype: torch.dtype | None = None  # dtype of the norm's weight; None: no norm
    bias: bool = False
    gate: Curve | None = None
    residual: bool = False


def product_trial(product: Product, device: torch.device) -> KernelTrial:
    return KernelTrial("fused product", lambda ops: _try_product(ops, product, device), _without_fused)


def _without_fused(ops: Ops) -> Ops:
    return replace(ops, fused_linear=None)


def _try_product(ops: Ops, product: Product, device: torch.device) -> None:
    if ops.fused_linear is None:
        return
    width, dtype = product.in_features, product.dtype
    weight = normal(device, dtype, product.out_features, width) * width**-0.5
    norm = None if product.norm_dtype is None else normal(device, product.norm_dtype, width)
    bias = normal(device, dtype, product.out_features) if product.bias else None
    for num_rows in (1,) if product.gate is None else (1, 8):
        x = normal(device, dtype, num_rows, width)
        residual = normal(device, dtype, num_rows, product.out_features) if product.residual else None
        if ops.fused_linear.wins(num_rows, weight, product.gate):
            stream = None if residual is None else residual.clone()  # the op may overwrite `residual`
            finish_writes(device)
            got = ops.fused_linear.run(x, weight, bias, norm, 1e-6, product.gate, residual)
            compare(got, partial(_plain_product, product, x, weight, bias, norm, stream), dtype)


def _plain_product(
    product: Product, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, residual: Tensor | None
) -> Tensor:
    normed = x if norm is None else REFERENCE.rms_norm(x, norm, 1e-6)
    out = functional.linear(normed, weight, bias)
    out = out if product.gate is None else REFERENCE.gate_mul(out, product.gate)
    return out if residual is None else out + residual


# ---------------------------------------------------------------------------------------------------------------------
# Attention


@dataclass(frozen=True, slots=True)
class TrialShape:
    """The properties of a model's attention layers that decide which kernels are compiled for them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    window: int | None
    qk_norm: bool
    dtype: torch.dtype
    cache_dtype: torch.dtype
    max_len: int = 2048
    qk_dtype: torch.dtype | None = None  # dtype of the QK norm weights; None: `dtype`
    softcap: float | None = None
    sinks: bool = False


def dense_trials(shape: TrialShape, device: torch.device) -> list[KernelTrial]:
    """Returns the trials of a dense model whose widths follow from its attention shape."""
    width, dtype = shape.num_heads * shape.head_dim, shape.dtype
    inner_width = 3 * width
    return [
        norm_trial(width, dtype, dtype, device),
        gate_mul_trial(inner_width, "silu", dtype, device),
        rope_trial(shape, device),
        attention_trial(shape, device),
        product_trial(Product(width, 2 * inner_width, dtype, norm_dtype=dtype, gate="silu"), device),
    ]


def rope_trial(shape: TrialShape, device: torch.device) -> KernelTrial:
    fallback = reference_for("plan_angles", qk_norm_rope_write=contiguous(REFERENCE.qk_norm_rope_write))
    return KernelTrial(
        "rope", lambda ops: _try_rope(ops, shape, device), None if is_fp8(shape.cache_dtype) else fallback
    )


def attention_trial(shape: TrialShape, device: torch.device) -> KernelTrial:
    # Latent attention takes the same plan, so it falls back as well.
    rows = ("plan_attention", "paged_attention", "latent_attention")
    fallback = None if is_fp8(shape.cache_dtype) else reference_for(*rows)
    return KernelTrial("attention", lambda ops: try_attention(ops, shape, device), fallback)


def _try_rope(ops: Ops, shape: TrialShape, device: torch.device) -> None:
    heads = shape.num_heads + 2 * shape.num_kv_heads
    qkv = normal(device, shape.dtype, FEW_TOKENS, heads * shape.head_dim)
    weight_dtype = shape.qk_dtype or shape.dtype
    q_weight, k_weight = (normal(device, weight_dtype, shape.head_dim) if shape.qk_norm else None for _ in range(2))
    positions = torch.arange(FEW_TOKENS, device=device) + NUM_TOKENS
    frequencies = rope_frequencies(shape.head_dim, device)
    boundary = (1 + FEW_TOKENS // shape.page_tokens) * shape.page_tokens
    slots = boundary - FEW_TOKENS // 2 + torch.arange(FEW_TOKENS, device=device)  # across a page boundary

    def run(table: Ops, cache_dtype: torch.dtype) -> tuple[Tensor, ...]:
        k_cache, v_cache = (torch.zeros(_cache_shape(shape), dtype=cache_dtype, device=device) for _ in range(2))
        finish_writes(device)
        angles = table.plan_angles(positions, frequencies, 1.0, shape.dtype)
        q = table.qk_norm_rope_write(qkv, q_weight, k_weight, 1e-6, angles, k_cache, v_cache, slots, shape.num_heads)
        return q, k_cache, v_cache

    compare(run(ops, shape.cache_dtype), lambda: run(REFERENCE, shape.dtype), shape.dtype)


def try_attention(ops: Ops, shape: TrialShape, device: torch.device, counts: Iterable[int] = (NUM_TOKENS, 1)) -> None:
    """Compares a prefill and a decode, each in a step of its own as for a first request, with the reference; raises if
    they disagree."""
    caches = [normal(device, shape.dtype, *_cache_shape(shape)).to(shape.cache_dtype) for _ in range(2)]
    num_pages = -(-max(shape.max_len, NUM_TOKENS) // shape.page_tokens) + 1
    table = torch.zeros(1, num_pages, dtype=torch.int32, device=device)
    pages = torch.arange(1, _cache_shape(shape)[0], dtype=torch.int32, device=device)[: table.shape[1]]
    table[0, : len(pages)] = pages
    sinks = normal(device, shape.dtype, shape.num_heads) if shape.sinks else None

    def run(rows: Ops, q: Tensor, dtype: torch.dtype) -> Tensor:
        count = len(q)
        positions = torch.arange(NUM_TOKENS - count, NUM_TOKENS, device=device)
        plan = rows.plan_attention(table, positions, [count], [NUM_TOKENS], shape.page_tokens, shape.window, dtype)
        k_cache, v_cache = (cache.to(dtype) for cache in caches)
        finish_writes(device)
        return rows.paged_attention(q, k_cache, v_cache, plan, shape.head_dim**-0.5, shape.softcap, sinks)

    for count in counts:
        q = normal(device, shape.dtype, count, shape.num_heads, shape.head_dim)
        compare(run(ops, q, shape.cache_dtype), partial(run, REFERENCE, q, shape.dtype), shape.dtype)


def _cache_shape(shape: TrialShape) -> tuple[int, ...]:
    num_pages = 2 + -(-NUM_TOKENS // shape.page_tokens)
    return num_pages, shape.page_tokens, shape.num_kv_heads, shape.head_dim


# ---------------------------------------------------------------------------------------------------------------------
# Helpers of all trials


def normal(device: torch.device, dtype: torch.dtype, *size: int) -> Tensor:
    return torch.randn(size, device=device).to(dtype)


def rope_frequencies(dim: int, device: torch.device) -> Tensor:
    """Returns rope frequencies, [dim / 2]."""
    return 1.0 / 10000.0 ** (torch.arange(0, dim, 2, device=device) / dim)


def is_fp8(cache_dtype: torch.dtype) -> bool:
    """Whether the cache is FP8, which the reference can't read."""
    return cache_dtype == torch.float8_e4m3fn


def finish_writes(device: torch.device) -> None:
    """Waits until tensors have been written. With programmatic launch a kernel may read its weights before the kernel
    launched before it has ended; in a trial that kernel may have written them."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Result = Tensor | tuple[Tensor, ...]


def compare(
    got: Result, expected: Result | Callable[[], Result], dtype: torch.dtype, limit: float | None = None
) -> None:
    """Raises ArithmeticError if `got` differs from `expected`, which is the reference's result or a function that
    computes it. Returns at once in a dry run, whose tensors are meta."""
    parts = got if isinstance(got, tuple) else (got,)
    if parts[0].is_meta:
        return
    # A library would spend a second on planning and compiling attention for a shape that is used once.
    with sdpa_kernel(SDPBackend.MATH):
        reference = expected() if callable(expected) else expected
    for part, true in zip(parts, reference if isinstance(reference, tuple) else (reference,), strict=True):
        _compare_part(part, true, limit or (FP8_TOLERANCE if is_fp8(part.dtype) else TOLERANCE[dtype]))


def _compare_part(got: Tensor, expected: Tensor, limit: float) -> None:
    wide, true = got.float(), expected.float()
    error = ((wide - true).norm() / true.norm().clamp(min=1e-30)).item()
    if not error <= limit:  # NaN too
        raise ArithmeticError(f"its results differ from the reference by {error:.1%}")
