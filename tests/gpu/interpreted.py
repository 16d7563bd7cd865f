"""Run the small kernel checks under Triton's interpreter and print a JSON object: name -> what went wrong, if anything.

`tests/cpu/test_triton_interpreter.py` starts this with TRITON_INTERPRET=1, which Triton reads when it is imported. What
is to have the same bits wherever it stands in a tile has them on a GPU, but not by every processor's BLAS, so products
are summed in float64 here.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import numpy as np
import torch

from tests.gpu.checks import CHECKS
from tests.gpu.where import NotHere, Where, poisoned


def sum_in_float64() -> None:
    multiply = np.matmul

    def matmul(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
        return multiply(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    np.matmul = matmul  # type: ignore[assignment]  # which Triton's interpreter asks for each product


def main() -> None:
    sum_in_float64()
    outcomes: dict[str, dict[str, str]] = {}
    for name, check in CHECKS.items():
        try:
            # bfloat16 is left out: the interpreter computes garbage in it.
            with poisoned():
                check(Where("cpu", False, (torch.float32, torch.float16), seed=0))
            outcomes[name] = {}
        except NotHere as why:
            outcomes[name] = {"skipped": str(why)}
        except Exception:
            outcomes[name] = {"error": traceback.format_exc()}
    json.dump(outcomes, sys.stdout)


if __name__ == "__main__":
    main()
