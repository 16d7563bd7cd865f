"""The gated delta net on Hopper, as a row of the ops table. Prefill rows go through `chunks`, which prepares all chunks
of all rows at once, and `delta_kernel`, which walks over them.

Unsupported shapes (see `supports`) go through `recurrent.recurrent`, so this row can replace that one in the table;
decode rows use the same kernel in both.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, float32
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.recurrent_types import DeltaWeights, RecurrentShape
from quire.kernels.triton.launch import num_multiprocessors
from quire.kernels.triton.recurrent import recurrent
from quire.kernels.triton.recurrent.hopper.chunks import _ready_kernel
from quire.kernels.triton.recurrent.hopper.delta_kernel import _walk_hopper_kernel
from quire.kernels.triton.recurrent.recurrent import TritonRecurrentPlan
from quire.kernels.triton.recurrent.scan import fits_delta_walk

BOX = [64, 64]  # a TMA box: a chunk's tokens, as many columns as the swizzle allows
PREPARE_REGISTERS = 128  # per thread: four programs of the preparing kernel fit on a multiprocessor


@dataclass(frozen=True, slots=True)
class PreparedChunks:
    """Inputs of the walk: the prepared chunks of all prefill rows."""

    keys: Tensor  # [chunks, 2 groups, 64, 128]: queries, then keys, normalized
    values: Tensor  # [chunks, heads, 64, 128]
    # [chunks, heads, 4, 64] float32: each token's decay since the chunk began and until it ends, and two lines in
    # which the walk's programs exchange the sums for their norm.
    gates: Tensor
    t: Tensor  # [chunks, heads, 64, 64]: columns times beta
    scores: Tensor  # [chunks, heads, 64, 64]


def supports(x: Tensor, shape: RecurrentShape, state: Tensor) -> bool:
    """Whether the kernels support the inputs; else use `recurrent.recurrent`."""
    return fits_delta_walk(shape, x.dtype) and supports_tma(x, state)


def supports_tma(x: Tensor, state: Tensor) -> bool:
    """Whether x can be read in place by TMA, which needs rows aligned to 16 bytes."""
    rows = x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return rows and state.stride(1) == 1


def gated_delta_net(
    x: Tensor, weights: DeltaWeights, shape: RecurrentShape, state: Tensor, plan: TritonRecurrentPlan
) -> Tensor:
    """Implements `reference.recurrent.gated_delta_net`."""
    if not supports(x, shape, state):
        return recurrent.gated_delta_net(x, weights, shape, state, plan)
    return recurrent.run_delta_net(x, weights, shape, state, plan, scan)


def scan(
    x: Tensor,
    weights: DeltaWeights,
    shape: RecurrentShape,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: Tensor,
    tiles: Tensor,
    out: Tensor,
    chunk: int,
) -> None:
    """Compute the prefill rows, as `recurrent.scan.delta_scan` but with norm and gate."""
    chunks = prepare_chunks(x, weights, shape, state, slots, positions, tiles)
    walk(x, weights, shape, state, slots, positions, rows, chunks, out)


def prepare_chunks(
    x: Tensor,
    weights: DeltaWeights,
    shape: RecurrentShape,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    tiles: Tensor,
) -> PreparedChunks:
    """Prepare the chunks of all prefill rows of the step. Tokens behind a row's end are zeros."""
    num_tiles, groups, heads = len(tiles), shape.num_groups, shape.num_heads
    chunks = PreparedChunks(
        x.new_empty(num_tiles, 2 * groups, 64, 128),
        x.new_empty(num_tiles, heads, 64, 128),
        x.new_empty(num_tiles, heads, 4, 64, dtype=float32),
        x.new_empty(num_tiles, heads, 64, 64),
        x.new_empty(num_tiles, heads, 64, 64),
    )
    sharing = 2 if heads // groups % 2 == 0 else 1  # heads per program, which share a key and query
    _ready_kernel[(heads // sharing, num_tiles)](
        x,
        token_descriptor(x, 64),
        token_descriptor(x, 4),
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        state,
        chunks.keys,
        chunks.values,
        chunks.gates,
        tile_descriptor(chunks.t),
        tile_descriptor(chunks.scores),
        slots,
        positions,
        tiles,
        x.stride(0) // 8,
        state.stride(0),
        shape.key_dim**-0.5,
        HEADS=heads,
        GROUPS=groups,
        SHARING=sharing,
        TAPS=shape.conv_len,
        num_warps=4,
        maxnreg=PREPARE_REGISTERS,
    )
    return chunks


def walk(
    x: Tensor,
    weights: DeltaWeights,
    shape: RecurrentShape,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: Tensor,
    chunks: PreparedChunks,
    out: Tensor,
) -> None:
    """Walk over `chunks`, those of the rows of `rows` in order. Consumes them: chunks can be walked over once."""
    halves = halves_per_program(shape.num_heads * len(rows), num_multiprocessors(x.device.index))
    _walk_hopper_kernel[(shape.num_heads * 2 // halves, len(rows))](
        x,
        tile_descriptor(x),
        tile_descriptor(chunks.keys),
        tile_descriptor(chunks.values),
        tile_descriptor(chunks.t),
        tile_descriptor(chunks.scores),
        line_descriptor(chunks.gates),
        chunks.gates,
        weights.norm,
        state,
        out,
        slots,
        positions,
        rows,
        x.stride(0),
        state.stride(0),
        weights.eps,
        HALVES=halves,
        HEADS=shape.num_heads,
        GROUPS=shape.num_groups,
        TAPS=shape.conv_len,
        num_warps=4,
        launch_pdl=True,
    )


def halves_per_program(num_heads: int, num_processors: int) -> int:
    """Halves of a head per program, for `num_heads` heads of all rows together. A head's walk is a chain of products,
    which is shorter for half a head. But two programs read their shared inputs twice, and take longer than one where a
    multiprocessor has to run both."""
    return 1 if 2 * num_heads <= num_processors else 2


def tile_descriptor(part: Tensor) -> TensorDescriptor:
    """TMA descriptor of `part` as rows of its last dimension."""
    width, stride = part.shape[-1], part.stride(-2)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(part, [part.numel() // width, width], [stride, 1], BOX, layout)


def token_descriptor(x: Tensor, num_tokens: int, channels: int = 128) -> TensorDescriptor:
    """TMA descriptor of x in boxes of `num_tokens` tokens and `channels` channels, unswizzled."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [num_tokens, channels], layout)


def line_descriptor(gates: Tensor) -> TensorDescriptor:
    """TMA descriptor of the first two lines of a head and chunk."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(gates, [gates.numel() // 64, 64], [64, 1], [2, 64], layout)
