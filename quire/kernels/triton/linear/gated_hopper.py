"""Product with a fused gate-up weight and its gated activation, for Hopper and many rows, in bfloat16 or float16.

Written in Gluon, warp-specialized and persistent: one warp copies with TMA, and two groups of four warps multiply, 64
rows each of a tile of 128 rows and 128 result columns, whose gate and up halves are one product 256 wide. One program
per multiprocessor walks over tiles. A tile's sums are rounded as in the plain path; their activation is computed while
the next tile's products are in flight. `validation.gated_trial` decides whether it is used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.activations import Curve
from quire.kernels.triton.gluon_names import thread_barrier
from quire.kernels.triton.launch import num_multiprocessors

CURVES: tuple[Curve, ...] = ("silu", "gelu_tanh")
STAGES = 4
GROUP = 16
MIN_WIDTH = 320  # columns of x: a tile's first iterations finish the preceding tile, so there must be enough of them


@gluon.jit
def _find(tile, num_row_tiles, num_column_tiles, GROUP: gl.constexpr):
    """Row and column of a tile. GROUP rows of tiles advance together from column to column, so that programs that run
    concurrently share rows and weights in L2."""
    group = tile // (GROUP * num_column_tiles)
    within = tile - group * (GROUP * num_column_tiles)
    height = gl.minimum(num_row_tiles - group * GROUP, GROUP)
    column = within // height
    return group * GROUP + (within - column * height), column


# ---------------------------------------------------------------------------------------------------------------------
# The copying warp


@gluon.jit
def _load_tiles(
    x_desc,
    weight_desc,
    x_tiles,
    weight_tiles,
    barriers,
    num_row_tiles,
    num_column_tiles,
    num_steps,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Load 64 columns of 128 rows, of 128 gates and of their 128 ups at a time."""
    done = 0
    for tile in range(gl.program_id(0), num_row_tiles * num_column_tiles, gl.num_programs(0)):
        row, column = _find(tile, num_row_tiles, num_column_tiles, GROUP)
        for k in range(num_steps):
            stage = done % STAGES
            full = barriers.index(stage)
            mbarrier.wait(barriers.index(STAGES + stage), (done // STAGES & 1) ^ 1)
            mbarrier.expect(full, 3 * 128 * 128)
            tma.async_copy_global_to_shared(x_desc, [row * 128, k * 64], full, x_tiles.index(stage))
            for part in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    weight_desc,
                    [(num_column_tiles * part + column) * 128, k * 64],
                    full,
                    weight_tiles.index(2 * stage + part),
                )
            done += 1


# ---------------------------------------------------------------------------------------------------------------------
# The two groups


@gluon.jit
def _halve(values):
    """Left and right half of the columns, in the threads that hold them."""
    return values.reshape([values.shape[0], 2, values.shape[1] // 2]).permute(0, 2, 1).split()


@gluon.jit
def _pack(sums, dtype: gl.constexpr):
    """Gate and up, rounded and packed into one word; as four parts, by columns."""
    gate, up = _halve(sums)
    if dtype == gl.bfloat16:
        words = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [gate, up], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        words = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [gate, up], dtype=gl.int32, is_pure=True, pack=1
        )
    left, right = _halve(words)
    first, second = _halve(left)
    third, fourth = _halve(right)
    return first, second, third, fourth


@gluon.jit
def _unpack(words, dtype: gl.constexpr):
    """Gate and up of a packed word, in float32."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=&r,=r,r",
            [words],
            dtype=(gl.float32, gl.float32),
            is_pure=True,
            pack=1,
        )
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.f32.f16 $0, low;
        cvt.f32.f16 $1, high;
        }
        """,
        "=f,=f,r",
        [words],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _gate_mul(words, dtype: gl.constexpr, CURVE: gl.constexpr):
    """Activation of packed gates times ups. The sigmoid takes five instructions; the compiler's exp and division take
    twice as many, for values that no gate has. GELU is a sigmoid of another argument (see `activations.gelu_tanh`)."""
    gate, up = _unpack(words, dtype)
    steep = gate
    if CURVE == "gelu_tanh":
        steep = gate * gl.fma(gate * gate, 1.5957691216057308 * 0.044715, 1.5957691216057308)
    result = gl.inline_asm_elementwise(
        """
        {
        .reg .f32 t;
        mul.f32 t, $3, 0fBFB8AA3B;
        ex2.approx.ftz.f32 t, t;
        add.f32 t, t, 0f3F800000;
        rcp.approx.ftz.f32 t, t;
        mul.f32 t, $1, t;
        mul.f32 $0, $2, t;
        }
        """,
        "=f,f,f,f",
        [gate, up, steep],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    return result.to(dtype)


@gluon.jit
def _finish(words, out_desc, out_tile, row, column, CURVE: gl.constexpr):
    """Compute and store a part of a tile: 64 rows, 32 columns."""
    out_tile.store(_gate_mul(words, out_tile.dtype, CURVE))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column], out_tile)


@gluon.jit
def _multiply(
    x_tiles,
    weight_tiles,
    out_tiles,
    barriers,
    out_desc,
    num_rows,
    num_row_tiles,
    num_column_tiles,
    num_steps,
    X: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    CURVE: gl.constexpr,
):
    """Group X: the upper or lower 64 rows of each tile."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    dtype: gl.constexpr = out_tiles.dtype
    nothing = gl.full([64, 256], 0.0, gl.float32, MMA)
    # The parts to finish. A virtual tile before the first lies outside the result, so it is not stored.
    parts = _pack(nothing, dtype)
    old_row = num_rows
    old_column = 0
    done = 0
    for tile in range(gl.program_id(0), num_row_tiles * num_column_tiles, gl.num_programs(0)):
        tma.store_wait(0)
        row, column = _find(tile, num_row_tiles, num_column_tiles, GROUP)
        stage = done % STAGES
        mbarrier.wait(barriers.index(stage), done // STAGES & 1)
        sums = warpgroup_mma(
            x_tiles.index(2 * stage + X),
            weight_tiles.index(stage).permute((1, 0)),
            nothing,
            use_acc=False,
            is_async=True,
        )
        done += 1
        for part in gl.static_range(4):
            stage = done % STAGES
            mbarrier.wait(barriers.index(stage), done // STAGES & 1)
            sums = warpgroup_mma(
                x_tiles.index(2 * stage + X), weight_tiles.index(stage).permute((1, 0)), sums, is_async=True
            )
            _finish(parts[part], out_desc, out_tiles.index(4 * X + part), old_row, old_column + part * 32, CURVE)
            sums = warpgroup_mma_wait(1, deps=[sums])
            mbarrier.arrive(barriers.index(STAGES + (done - 1) % STAGES), count=1)
            done += 1
        for _k in range(5, num_steps):
            stage = done % STAGES
            mbarrier.wait(barriers.index(stage), done // STAGES & 1)
            sums = warpgroup_mma(
                x_tiles.index(2 * stage + X), weight_tiles.index(stage).permute((1, 0)), sums, is_async=True
            )
            sums = warpgroup_mma_wait(1, deps=[sums])
            mbarrier.arrive(barriers.index(STAGES + (done - 1) % STAGES), count=1)
            done += 1
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(barriers.index(STAGES + (done - 1) % STAGES), count=1)
        parts = _pack(sums, dtype)
        old_row = row * 128 + X * 64
        old_column = column * 128
    tma.store_wait(0)
    for part in gl.static_range(4):
        _finish(parts[part], out_desc, out_tiles.index(4 * X + part), old_row, old_column + part * 32, CURVE)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "num_column_tiles", "num_steps"])
def _gated_hopper_kernel(
    x_desc,
    weight_desc,
    out_desc,
    num_rows,
    num_column_tiles,
    num_steps,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    CURVE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One program per multiprocessor: allocates shared memory and barriers, and starts the warp groups."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    OUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    dtype: gl.constexpr = x_desc.dtype
    weight_tiles = gl.allocate_shared_memory(dtype, [STAGES, 256, 64], SHARED)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, 128, 64], SHARED)
    out_tiles = gl.allocate_shared_memory(dtype, [8, 64, 32], OUT)
    barriers = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())  # full, then empty
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=1)
        mbarrier.init(barriers.index(STAGES + stage), count=2)
    fence_async_shared()
    thread_barrier()
    num_row_tiles = gl.cdiv(num_rows, 128)
    x_halves = x_tiles._reinterpret(dtype, [2 * STAGES, 64, 64], SHARED)
    weight_halves = weight_tiles._reinterpret(dtype, [2 * STAGES, 128, 64], SHARED)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    x_halves,
                    weight_tiles,
                    out_tiles,
                    barriers,
                    out_desc,
                    num_rows,
                    num_row_tiles,
                    num_column_tiles,
                    num_steps,
                    0,
                    STAGES,
                    GROUP,
                    CURVE,
                ),
            ),
            (
                _multiply,
                (
                    x_halves,
                    weight_tiles,
                    out_tiles,
                    barriers,
                    out_desc,
                    num_rows,
                    num_row_tiles,
                    num_column_tiles,
                    num_steps,
                    1,
                    STAGES,
                    GROUP,
                    CURVE,
                ),
            ),
            (
                _load_tiles,
                (
                    x_desc,
                    weight_desc,
                    x_tiles,
                    weight_halves,
                    barriers,
                    num_row_tiles,
                    num_column_tiles,
                    num_steps,
                    STAGES,
                    GROUP,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )


# ---------------------------------------------------------------------------------------------------------------------
# Launching it, and its row of the table


def fits(num_outputs: int, in_features: int, dtype: torch.dtype, curve: Curve) -> bool:
    """Whether the kernel supports a weight of [num_outputs (gates and ups), in_features] with this activation."""
    whole = num_outputs % 256 == 0 and in_features % 64 == 0 and curve in CURVES
    return whole and in_features >= MIN_WIDTH and dtype in (torch.bfloat16, torch.float16)


def gated_linear(x: Tensor, weight: Tensor, curve: Curve = "silu") -> Tensor:
    """x [rows, in_features] times weight [2 * width, in_features], gates first -> [rows, width]: `gate_mul` of the
    product. The weight `fits` with the activation, is contiguous and aligned to 16 bytes."""
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)  # `contiguous` would return a single row unchanged
    num_rows, num_columns = x.shape[0], weight.shape[0] // 2
    out = x.new_empty(num_rows, num_columns)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    narrow = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    num_tiles = -(-num_rows // 128) * (num_columns // 128)
    _gated_hopper_kernel[(min(num_multiprocessors(x.device.index), num_tiles),)](
        TensorDescriptor(x, list(x.shape), list(x.stride()), [128, 64], layout),
        TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [128, 64], layout),
        TensorDescriptor(out, list(out.shape), list(out.stride()), [64, 32], narrow),
        num_rows,
        num_columns // 128,
        x.shape[1] // 64,
        STAGES,
        GROUP,
        curve,
        num_warps=4,
    )
    return out


class GatedLinear:
    """Implements the ops table's `FusedLinear` for many rows and weights of the one shape and activation that was tried
    and timed."""

    MIN_ROWS = 1024  # with fewer, a partial last round of tiles leaves too much of the GPU idle

    def __init__(
        self,
        shape: tuple[int, int],
        curve: Curve,
        rms_norm: Callable[[Tensor, Tensor, float], Tensor],
        gate_mul: Callable[..., Tensor],
    ):
        self._shape = shape
        self._curve = curve
        self._rms_norm = rms_norm
        self._gate_mul = gate_mul

    def wins(self, num_rows: int, weight: Tensor, gate: Curve | None) -> bool:
        if gate != self._curve or num_rows < self.MIN_ROWS or weight.shape != self._shape:
            return False
        return weight.is_contiguous() and weight.data_ptr() % 16 == 0

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        eps: float,
        gate: Curve | None,
        residual: Tensor | None,
    ) -> Tensor:
        x = x if norm_weight is None else self._rms_norm(x, norm_weight, eps)
        if bias is None:
            out = gated_linear(x, weight, self._curve)
        else:  # another layer of the same shape, computed without the kernel
            out = self._gate_mul(functional.linear(x, weight, bias), self._curve)
        return out if residual is None else out.add_(residual)
