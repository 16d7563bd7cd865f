"""`quire bench kernels`: each GPU kernel's bandwidth and FLOP/s, as shares of the GPU's measured ceilings.

The ceilings (a large read, a large matrix product) are measured first, then every kernel with the shapes that dominate
a step, inside a captured CUDA graph, over inputs larger than the L2 cache. The module imports torch only in functions.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LAUNCHES = 20  # per graph
REPEATS = 7  # replays; the result is their median
MIN_INPUT_BYTES = 400_000_000  # of inputs, more than the L2 cache holds
PAGE_TOKENS = 64  # default of an engine on a GPU


@dataclass(frozen=True, slots=True)
class KernelResult:
    name: str
    shape: str
    us: float
    tb_s: float | None = None
    tflops: float | None = None
    ceiling_share: float | None = None  # the larger of the shares of both ceilings, memory and matrix units

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel on one shape; `launch(i)` launches it for the i-th time."""

    name: str
    shape: str
    launch: Callable[[int], object]
    num_bytes: int = 0
    flops: int = 0


def run(device: torch.device | str = "cuda", only: str = "") -> list[KernelResult]:
    """Time every kernel whose name contains `only`; the first two results are the ceilings."""
    import torch

    from quire.bench.kernels.experts import experts, latent
    from quire.bench.kernels.recurrent import recurrent_cases
    from quire.bench.kernels.sampling import sampling

    device = torch.device(device)
    results = [_measure(case, None, None) for case in _ceilings(device)]
    read, matmul = results[0].tb_s, results[1].tflops
    for make in (_small, _decode, _prefill, _products, sampling, experts, latent, recurrent_cases):
        for case in make(device):
            if only in case.name:
                results.append(_measure(case, read, matmul))
        torch.cuda.empty_cache()
    return results


def microseconds(launch: Callable[[int], object]) -> float:
    """Return the time of one launch, averaged over a CUDA graph of many, which excludes the host's time."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch(0)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(LAUNCHES):
                launch(index)
        graph.replay()
        torch.cuda.synchronize()
        times: list[float] = []
        for _ in range(REPEATS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / LAUNCHES)
    return statistics.median(times)


def _measure(case: KernelCase, read: float | None, matmul: float | None) -> KernelResult:
    us = microseconds(case.launch)
    tb_s = case.num_bytes / us / 1e6 if case.num_bytes else None
    tflops = case.flops / us / 1e6 if case.flops else None
    shares = [had / ceiling for had, ceiling in ((tb_s, read), (tflops, matmul)) if had and ceiling]
    return KernelResult(case.name, case.shape, us, tb_s, tflops, max(shares, default=None))


# ---------------------------------------------------------------------------------------------------------------------
# Cases


def _call(function: Callable[..., object], *args: object, **kwargs: object) -> Callable[[int], object]:
    """Launch with the same inputs each time; for inputs that are larger than the L2 cache or usually in it."""
    return lambda index: function(*args, **kwargs)


def _rotate(function: Callable[..., object], x: object, others: list[Any], **kwargs: object) -> Callable[[int], object]:
    """Launch with another weight each time, so that no weight stays in the L2 cache."""
    return lambda index: function(x, *others[index % len(others)], **kwargs)


def _ceilings(device: torch.device) -> Iterator[KernelCase]:
    import torch

    source = torch.randn(2**30, device=device)
    yield KernelCase("ceiling: read", "4 GiB", _call(source.amax), num_bytes=source.numel() * 4)
    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    yield KernelCase("ceiling: bf16 product", f"{n}³", _call(torch.mm, a, b), flops=2 * n**3)


def _small(device: torch.device) -> Iterator[KernelCase]:
    import torch

    from quire.kernels.angles import Angles
    from quire.kernels.triton.attention import rope_write
    from quire.kernels.triton.linear import norm

    bf16 = torch.bfloat16
    for rows in (1, 256, 8192):
        x = torch.randn(rows, 4096, device=device, dtype=bf16)
        weight = torch.ones(4096, device=device, dtype=bf16)
        yield KernelCase("rms_norm", f"{rows} × 4096", _call(norm.rms_norm, x, weight, 1e-6), num_bytes=rows * 4096 * 4)
        stream = torch.randn(rows, 4096, device=device, dtype=bf16)
        launch = _call(norm.norm_add, x, weight, 1e-6, stream, 1.0)
        yield KernelCase("norm_add", f"{rows} × 4096", launch, num_bytes=rows * 4096 * 6)
        launch = _call(norm.gate_mul, torch.randn(rows, 24576, device=device, dtype=bf16))
        yield KernelCase("gate_mul", f"{rows} × 12288", launch, num_bytes=rows * 12288 * 6)
        cache = _Cache([16] * rows, 8, bf16, device)
        qkv = torch.randn(rows, 48 * 128, device=device, dtype=bf16)
        slots = torch.randperm(rows * 16, device=device)[:rows]
        angles = Angles(torch.arange(rows, device=device), torch.rand(64, device=device))
        weight = torch.ones(128, device=device, dtype=bf16)
        launch = _call(rope_write.qk_norm_rope_write, qkv, weight, weight, 1e-6, angles, cache.k, cache.v, slots, 32)
        yield KernelCase("qk_norm_rope_write", f"{rows} tokens, 32/8 heads", launch, num_bytes=rows * 48 * 128 * 4)


class _Cache:
    """A KV cache with rows of the given lengths in scattered pages."""

    def __init__(self, lens: list[int], num_kv_heads: int, dtype: torch.dtype, device: torch.device):
        import torch

        need = [-(-n // PAGE_TOKENS) for n in lens]
        shape = (sum(need) + 1, PAGE_TOKENS, num_kv_heads, 128)
        self.k, self.v = (torch.randn(shape, device=device, dtype=torch.bfloat16).to(dtype) for _ in range(2))
        pages = torch.randperm(sum(need), dtype=torch.int32) + 1
        self.table = torch.zeros(len(lens), max(need), dtype=torch.int32)
        first = 0
        for row, count in enumerate(need):
            self.table[row, :count] = pages[first : first + count]
            first += count
        self.table = self.table.to(device)
        self.num_bytes = sum(lens) * num_kv_heads * 128 * 2 * self.k.element_size()


def _decode(device: torch.device) -> Iterator[KernelCase]:
    import torch

    from quire.kernels.triton.attention import paged

    ragged = torch.randint(100, 2048, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    shapes = [
        ([1024] * 256, 32, torch.bfloat16, "256 × 1024"),
        ([1024] * 256, 16, torch.bfloat16, "256 × 1024"),
        (ragged, 32, torch.bfloat16, "256 × 100…2048"),
        ([2048] * 64, 32, torch.bfloat16, "64 × 2048"),
        ([4096] * 16, 32, torch.bfloat16, "16 × 4096"),
        ([32768], 32, torch.bfloat16, "1 × 32768"),
        ([1024], 32, torch.bfloat16, "1 × 1024"),
        ([256], 32, torch.bfloat16, "1 × 256"),
        ([1024] * 256, 32, torch.float8_e4m3fn, "256 × 1024, FP8"),
    ]
    for lens, num_heads, dtype, shape in shapes:
        cache = _Cache(lens, 8, dtype, device)
        q = torch.randn(len(lens), num_heads, 128, device=device, dtype=torch.bfloat16)
        positions = torch.tensor(lens, device=device) - 1
        plan = paged.plan_attention(cache.table, positions, [1] * len(lens), lens, PAGE_TOKENS, None, torch.bfloat16)
        launch = _call(paged.paged_attention, q, cache.k, cache.v, plan, 0.09)
        yield KernelCase("decode attention", f"{shape}, {num_heads}/8 heads", launch, num_bytes=cache.num_bytes)


def _prefill(device: torch.device) -> Iterator[KernelCase]:
    """Prefill attention by the Triton kernel and by each installed library."""
    import torch

    from quire.kernels.explain import TYPICAL
    from quire.kernels.libraries.choose import judge
    from quire.kernels.libraries.cudnn import open_cudnn
    from quire.kernels.libraries.seam import with_library
    from quire.kernels.table import select_ops

    own = select_ops(device.type, strict=True)
    found = [verdict.kernel for verdict in judge(own, TYPICAL, device, "auto") if verdict.kernel is not None]
    found += open_cudnn(device)
    tables = {"prefill attention": own}
    tables |= {f"prefill: {kernel.name}": with_library(own, kernel) for kernel in found}
    for rows, length, num_heads in ((16, 1024, 32), (4, 4096, 32), (1, 32768, 32), (2, 4096, 16)):
        lens = [length] * rows
        cache = _Cache(lens, 8, torch.bfloat16, device)
        q = torch.randn(sum(lens), num_heads, 128, device=device, dtype=torch.bfloat16)
        positions = torch.arange(length, device=device).repeat(rows)
        flops = 2 * num_heads * 128 * length * length * rows  # causal: half of the full square
        for name, ops in tables.items():
            plan = ops.plan_attention(cache.table, positions, lens, lens, PAGE_TOKENS, None, torch.bfloat16)
            launch = _call(ops.paged_attention, q, cache.k, cache.v, plan, 0.09)
            yield KernelCase(name, f"{rows} × {length}, {num_heads}/8 heads", launch, flops=flops)


def _products(device: torch.device) -> Iterator[KernelCase]:
    """Each matrix product of a layer: the skinny and FP8 kernels, with norm and gate fused, beside plain cuBLAS."""
    import torch
    from torch.nn import functional

    from quire.kernels.triton.linear import fp8, skinny

    bf16 = torch.bfloat16
    layers = {"0.6B": (4096, 1024, 2048, 3072), "8B": (6144, 4096, 4096, 12288)}
    for model, (qkv, width, heads, inner) in layers.items():
        shapes = (("qkv", qkv, width), ("out", width, heads), ("gate-up", 2 * inner, width), ("down", width, inner))
        for name, out_features, in_features in shapes:
            num = max(2, min(40, MIN_INPUT_BYTES // (2 * out_features * in_features)))
            weights = [(torch.randn(out_features, in_features, device=device, dtype=bf16),) for _ in range(num)]
            small = [fp8.quantize_rows(weight) for (weight,) in weights]
            norm = torch.ones(in_features, device=device, dtype=bf16)
            for rows in (1, 8):
                x = torch.randn(rows, in_features, device=device, dtype=bf16)
                shape, size = f"{model} {name}, {rows} rows", 2 * out_features * in_features
                launch = _rotate(
                    skinny.skinny_linear,
                    x,
                    weights,
                    norm_weight=norm,
                    eps=1e-6,
                    gate="silu" if name == "gate-up" else None,
                )
                yield KernelCase("product: skinny", shape, launch, num_bytes=size)
                yield KernelCase("product: cuBLAS", shape, _rotate(functional.linear, x, weights), num_bytes=size)
                yield KernelCase("product: FP8", shape, _rotate(fp8.fp8_linear, x, small), num_bytes=size // 2)


def show(results: list[KernelResult]) -> str:
    """Return the results as a text table."""
    lines = [f"{'kernel':24} {'shape':28} {'µs':>10} {'TB/s':>6} {'TFLOP/s':>8} {'of ceiling':>10}"]
    for r in results:
        cells = (
            f"{r.tb_s:.2f}" if r.tb_s else "",
            f"{r.tflops:.0f}" if r.tflops else "",
            f"{r.ceiling_share:.0%}" if r.ceiling_share else "",
        )
        lines.append(f"{r.name:24} {r.shape:28} {r.us:10.2f} {cells[0]:>6} {cells[1]:>8} {cells[2]:>10}")
    return "\n".join(lines)
