"""Tries each row of the ops table on a small problem of a model's own shape before the model is built with it.

A kernel that does not compile here, does not run, or computes something else than the reference gives way to the
reference, which is slower and always there. The loader calls `settle_ops`; what it tries is what the first request
would have had to compile anyway.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.table import REFERENCE, Ops
from quire.types import QuireError

TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
FP8_TOLERANCE = 0.15
NUM_TOKENS = 84  # of the prompt that is tried: a GPU's page of 64 and a bit, so that a second page is looked up


@dataclass(frozen=True, slots=True)
class TrialShape:
    """What decides which kernels a model's attention layers get compiled."""

    width: int
    inner_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    window: int | None
    qk_norm: bool
    dtype: torch.dtype
    cache_dtype: torch.dtype
    max_len: int = 2048


def settle_ops(ops: Ops, shape: TrialShape, device: torch.device, *, strict: bool) -> Ops:
    """The table with the rows that failed replaced by the reference's, each with a line that says so; `strict`: refuse
    instead."""
    for row, error in failing_rows(ops, shape, device):
        why = str(error).strip().splitlines()
        line = f"The {row.name} kernel can't be used here ({type(error).__name__}: {why[0] if why else ''})"
        if strict or (shape.cache_dtype == torch.float8_e4m3fn and row.name in ("rope", "attention")):
            raise QuireError("kernel_failed", f"{line}.", "Leave strict_kernels and FP8 out, or see `quire doctor`.")
        warnings.warn(f"{line}; plain torch does its work, more slowly.", stacklevel=2)
        ops = row.give_up(ops)
    return ops


def failing_rows(ops: Ops, shape: TrialShape, device: torch.device) -> Iterator[tuple[Row, Exception]]:
    for row in ROWS:
        try:
            row.attempt(ops, shape, device)
        except torch.OutOfMemoryError:
            continue  # no fault of the kernel's, and whoever needs the memory next will say so
        except Exception as error:  # whatever a compiler, a driver or a kernel may say
            yield row, error


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    attempt: Callable[[Ops, TrialShape, torch.device], None]  # raises if it fails
    give_up: Callable[[Ops], Ops]


def _try_norm(ops: Ops, shape: TrialShape, device: torch.device) -> None:
    x, weight = _random(device, shape.dtype, NUM_TOKENS, shape.width), _random(device, shape.dtype, shape.width)
    finish_writes(device)
    compare(ops.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6), shape.dtype)


def _try_silu_mul(ops: Ops, shape: TrialShape, device: torch.device) -> None:
    x = _random(device, shape.dtype, NUM_TOKENS, 2 * shape.width)
    finish_writes(device)
    compare(ops.silu_mul(x), REFERENCE.silu_mul(x), shape.dtype)


def _try_linear(ops: Ops, shape: TrialShape, device: torch.device) -> None:
    if ops.fused_linear is None:
        return
    weight = _random(device, shape.dtype, 2 * shape.inner_width, shape.width) * shape.width**-0.5
    norm = _random(device, shape.dtype, shape.width)
    for num_rows in (1, 8):
        x = _random(device, shape.dtype, num_rows, shape.width)
        finish_writes(device)
        if ops.fused_linear.wins(num_rows, weight, True):
            got = ops.fused_linear.run(x, weight, None, norm, 1e-6, True, None)
            product = REFERENCE.rms_norm(x, norm, 1e-6) @ weight.t()
            compare(got, REFERENCE.silu_mul(product), shape.dtype)


def _try_rope(ops: Ops, shape: TrialShape, device: torch.device) -> None:
    heads = shape.num_heads + 2 * shape.num_kv_heads
    qkv = _random(device, shape.dtype, NUM_TOKENS, heads * shape.head_dim)
    q_weight, k_weight = (_random(device, shape.dtype, shape.head_dim) if shape.qk_norm else None for _ in range(2))
    positions = torch.arange(NUM_TOKENS, device=device)
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim)
    slots = shape.page_tokens + positions
    results = []
    for table, cache_dtype in ((ops, shape.cache_dtype), (REFERENCE, shape.dtype)):
        k_cache, v_cache = (torch.zeros(_cache_shape(shape), dtype=cache_dtype, device=device) for _ in range(2))
        finish_writes(device)
        angles = table.plan_angles(positions, frequencies, 1.0, shape.dtype)
        q = table.qk_norm_rope_write(qkv, q_weight, k_weight, 1e-6, angles, k_cache, v_cache, slots, shape.num_heads)
        results.append((q, k_cache, v_cache))
    for got, expected in zip(*results, strict=True):
        compare(got, expected, shape.dtype)


def _try_attention(ops: Ops, shape: TrialShape, device: torch.device) -> None:
    """A prompt and a decode, each alone: the kernels that the first request needs."""
    caches = [_random(device, shape.dtype, *_cache_shape(shape)).to(shape.cache_dtype) for _ in range(2)]
    num_pages = -(-max(shape.max_len, NUM_TOKENS) // shape.page_tokens) + 1
    table = torch.zeros(1, num_pages, dtype=torch.int32, device=device)
    pages = torch.arange(1, _cache_shape(shape)[0], dtype=torch.int32, device=device)[: table.shape[1]]
    table[0, : len(pages)] = pages
    for count in (NUM_TOKENS, 1):
        q = _random(device, shape.dtype, count, shape.num_heads, shape.head_dim)
        positions = torch.arange(NUM_TOKENS - count, NUM_TOKENS, device=device)
        results = []
        for rows, dtype in ((ops, shape.cache_dtype), (REFERENCE, shape.dtype)):
            plan = rows.plan_attention(table, positions, [count], [NUM_TOKENS], shape.page_tokens, shape.window, dtype)
            k_cache, v_cache = (cache.to(dtype) for cache in caches)
            finish_writes(device)
            results.append(rows.paged_attention(q, k_cache, v_cache, plan, shape.head_dim**-0.5))
        compare(results[0], results[1], shape.dtype)


ROWS = (
    Row("norm", _try_norm, lambda ops: replace(ops, rms_norm=REFERENCE.rms_norm)),
    Row("silu_mul", _try_silu_mul, lambda ops: replace(ops, silu_mul=REFERENCE.silu_mul)),
    Row(
        "rope",
        _try_rope,
        lambda ops: replace(ops, plan_angles=REFERENCE.plan_angles, qk_norm_rope_write=REFERENCE.qk_norm_rope_write),
    ),
    Row(
        "attention",
        _try_attention,
        lambda ops: replace(
            ops,
            plan_attention=REFERENCE.plan_attention,
            paged_attention=REFERENCE.paged_attention,
            latent_attention=REFERENCE.latent_attention,  # it goes by the same plan
            captures=REFERENCE.captures,
            captured_work=REFERENCE.captured_work,
        ),
    ),
    Row("fused product", _try_linear, lambda ops: replace(ops, fused_linear=None)),
)


def _cache_shape(shape: TrialShape) -> tuple[int, ...]:
    num_pages = 2 + -(-NUM_TOKENS // shape.page_tokens)
    return num_pages, shape.page_tokens, shape.num_kv_heads, shape.head_dim


def _random(device: torch.device, dtype: torch.dtype, *size: int) -> Tensor:
    return torch.randn(size, device=device).to(dtype)


def finish_writes(device: torch.device) -> None:
    """Kernels may read weights before the kernel launched just before them has ended: weights are not supposed to be
    new, as they are here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    limit = FP8_TOLERANCE if got.dtype == torch.float8_e4m3fn else TOLERANCE[dtype]
    wide, true = got.float(), expected.float()
    error = ((wide - true).norm() / true.norm().clamp(min=1e-30)).item()
    if not error <= limit:  # NaN too
        raise ArithmeticError(f"its results are off by {error:.1%}")
