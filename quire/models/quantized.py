"""Finds the matrices that `--quant` can't quantize. The loader refuses a model without any that it can, and notes the
others in one line, which `quire doctor` shows, too.
"""

from __future__ import annotations

from typing import Any

from quire.kernels.native.library import BLOCK
from quire.layers.quant.blocks import Unquantized, find_unquantized
from quire.layers.weights import iter_weights
from quire.types import QuireError

_FLOATS = {"F32": "float32", "F16": "float16"}


def check_quantized(model: Any, quant: str) -> None:
    """Raises if no matrix of the model (a module, still on meta) fits `quant`."""
    left = _find(model)
    if left is not None and left.is_all:
        what = (
            f"quant={quant} would change nothing: all {left.num_matrices} matrices of this model have {_widths(left)}."
        )
        raise QuireError("invalid_parameter", what, "Leave --quant out, or use --dtype float16.", param="quant")


def list_unquantized(model: Any, quant: str) -> list[str]:
    """Returns a note that names the matrices which stay floats and says why, if there are any."""
    left = _find(model)
    if left is None:
        return []
    shown = ", ".join(left.names[:2]) + (", …" if len(left.names) > 2 else "")
    return [
        f"{len(left.names)} of {left.num_matrices} matrices stay {_FLOATS[left.form]} with quant={quant}, "
        f"since they have {_widths(left)}: {shown}"
    ]


def _find(model: Any) -> Unquantized | None:
    return find_unquantized(weight for _, _, weight in iter_weights(model))


def _widths(left: Unquantized) -> str:
    words = "rows of " + ", ".join(map(str, left.widths[:4])) + (", …" if len(left.widths) > 4 else "")
    return f"{words} elements, not a multiple of {BLOCK}"
