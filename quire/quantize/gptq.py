"""GPTQ: rounds a matrix column by column, and spreads each column's error over the columns that are still to come.

What a matrix is multiplied with decides how: `products` are the sums of products of each pair of input columns, over a
calibration text. Layers are done in order, and each sees what the rounded layers before it compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.kernels.formats.packed_encode import integer_scales
from quire.layers.weights import RowOrder
from quire.quantize.calibration import FloatModel, Inputs, collect
from quire.quantize.compressed_output import group_of, pack_int4
from quire.types import QuireError

BITS = 4
DAMPING = 0.01  # of the mean square of a column, added to every column's
BLOCK_COLUMNS = 128  # whose errors are spread over the rest of the matrix at once
PRODUCT_BYTES = 1 << 30  # of the products that are collected in one pass over the text


def round_matrix(matrix: Tensor, products: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Returns four-bit integers, [rows, columns] int8, and their scales, [rows, groups] float32.

    matrix [rows, columns] float32; products [columns, columns] float32: of the columns that the matrix is multiplied
    with. Columns with larger inputs are rounded first, when there is most left to make up for them.
    """
    squares = products.diag()
    scales = integer_scales(matrix, BITS, group, squares.clamp_min(1e-12)).bfloat16().float()
    order = squares.argsort(descending=True, stable=True)
    left = _inverse_factor(products[order][:, order])  # upper triangular
    rest = matrix[:, order].clone()
    of_column = scales.repeat_interleave(group, 1)[:, order]  # [rows, columns]
    numbers = torch.empty_like(rest)
    most = (1 << (BITS - 1)) - 1
    columns = rest.shape[1]
    for start in range(0, columns, BLOCK_COLUMNS):
        stop = min(start + BLOCK_COLUMNS, columns)
        errors = torch.empty(len(rest), stop - start)
        for column in range(start, stop):
            scale = of_column[:, column]
            numbers[:, column] = (rest[:, column] / scale).round().clamp_(-most - 1, most)
            error = (rest[:, column] - numbers[:, column] * scale) / left[column, column]
            rest[:, column:stop] -= error.unsqueeze(1) * left[column, column:stop]
            errors[:, column - start] = error
        rest[:, stop:] -= errors @ left[start:stop, stop:]
    return numbers[:, order.argsort()].to(torch.int8), scales


def _inverse_factor(products: Tensor) -> Tensor:
    """Returns the upper triangular factor of the inverse: how much a column's error is to move each later column."""
    columns = len(products)
    mean = products.diag().mean().clamp_min(1e-12)
    damping = DAMPING
    for _ in range(6):
        damped = products + torch.eye(columns) * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        damping *= 10
    raise QuireError("bad_weights", "The calibration text's activations are not finite.", "Check the checkpoint.")


def round_model(
    source: FloatModel,
    stretches: Sequence[Sequence[int]],
    wants: Callable[[str], bool],
    on_matrix: Callable[[str], None] = lambda name: None,
) -> dict[str, dict[str, Tensor]]:
    """Returns the rounded tensors of the matrices that are wanted, by tensor name. Changes the model's weights to what
    the rounded ones stand for.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for names in _passes(source, wants):
        inputs = collect(source, stretches, wants=names.__contains__, products=True)
        for linear, parts in source.linears:
            for part in parts:
                if part.name not in names:
                    continue
                weight: Tensor = linear.weight.data
                rows = _in_checkpoint_order(weight[part.start : part.stop], part.form)
                numbers, scales = round_matrix(rows, _products(inputs[part.name]), group_of(rows.shape[1]))
                found[part.name] = pack_int4(numbers, scales.bfloat16())
                decoded = numbers.float() * scales.repeat_interleave(rows.shape[1] // scales.shape[1], 1)
                shaped = decoded if part.form is None else part.form(decoded)
                weight[part.start : part.stop] = shaped
                on_matrix(part.name)
    return found


def _products(inputs: Inputs) -> Tensor:
    assert inputs.products is not None
    return inputs.products / max(1, inputs.num_tokens)


def _in_checkpoint_order(rows: Tensor, form: object) -> Tensor:
    """Returns a weight's rows as the checkpoint has them."""
    if not isinstance(form, RowOrder):
        return rows.clone()
    back = torch.empty_like(rows)
    back[form.order(len(rows))] = rows
    return back


def _passes(source: FloatModel, wants: Callable[[str], bool]) -> list[set[str]]:
    """Returns the matrices of each pass over the text: as many layers as fit, in order."""
    passes: list[set[str]] = [set()]
    num_bytes = 0
    for linear, parts in source.linears:
        names = {part.name for part in parts if wants(part.name)}
        if any(part.form is not None and not isinstance(part.form, RowOrder) for part in parts) or not names:
            continue
        size = 4 * linear.in_features**2
        if passes[-1] and num_bytes + size > PRODUCT_BYTES:
            passes.append(set())
            num_bytes = 0
        passes[-1] |= names
        num_bytes += size
    return passes if passes[0] else []
