"""The gated delta net on Hopper: the row of the ops table whose catch-ups go through `recurrent_hopper`'s walk.

What that kernel does not do (see `supports`) goes to `recurrent`, so this row can stand in the table in its place; rows
of one token are the same kernel's in both.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.recurrent import DeltaWeights, RecurrentShape
from quire.kernels.triton import recurrent
from quire.kernels.triton.recurrent import TritonRecurrentPlan
from quire.kernels.triton.recurrent_conv import convolve
from quire.kernels.triton.recurrent_hopper import _walk_hopper_kernel
from quire.kernels.triton.recurrent_scan import fits_walk, solve_chunks

BOX = [64, 64]  # what the copy engine takes at a time: a chunk's tokens, as many columns as its swizzle allows


def supports(x: Tensor, shape: RecurrentShape, state: Tensor) -> bool:
    """Whether the kernel can do it; `recurrent` does the rest. The copy engine reads x where it lies: by 16 bytes."""
    return (
        fits_walk(shape, x.dtype)
        and x.stride(1) == 1
        and x.stride(0) * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0
        and state.stride(1) == 1
    )


def gated_delta_net(x: Tensor, weights: DeltaWeights, shape: RecurrentShape, state: Tensor,
                    plan: TritonRecurrentPlan) -> Tensor:  # fmt: skip
    """Like `reference_recurrent.gated_delta_net`."""
    if not supports(x, shape, state):
        return recurrent.gated_delta_net(x, weights, shape, state, plan)
    return recurrent.run_delta_net(x, weights, shape, state, plan, scan)


def scan(x: Tensor, weights: DeltaWeights, shape: RecurrentShape, state: Tensor, slots: Tensor, positions: Tensor,
         rows: Tensor, tiles: Tensor, out: Tensor, chunk: int) -> None:  # fmt: skip
    """Like `recurrent_scan.delta_scan`, norm and gate included."""
    chunks = convolve(x, weights.conv, None, weights.a_log, weights.dt_bias, 0.0, 0.0, shape, state, slots, positions,
                      tiles, chunk, delta=True)  # fmt: skip
    t, scores = solve_chunks(chunks, shape)
    # Not launched ahead of its turn: it needs a whole multiprocessor's shared memory, which is not free before.
    _walk_hopper_kernel[(shape.num_heads, len(rows))](
        x, _boxes(x), _boxes(chunks.keys), _boxes(chunks.values), _boxes(t), _boxes(scores), chunks.gates, weights.norm,
        state, out, slots, positions, rows, x.stride(0), state.stride(0), weights.eps, HEADS=shape.num_heads,
        GROUPS=shape.num_groups, TAPS=shape.conv_len, num_warps=4,
    )  # fmt: skip


def _boxes(part: Tensor) -> TensorDescriptor:
    """How the copy engine sees it: rows below each other, whatever they are."""
    width, stride = part.shape[-1], part.stride(-2)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(part, [part.numel() // width, width], [stride, 1], BOX, layout)
