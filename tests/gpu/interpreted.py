"""Run the small kernel checks under Triton's interpreter and print a JSON object: name -> error or null.

`tests/cpu/test_triton_interpreter.py` starts this with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

from __future__ import annotations

import json
import sys
import traceback

import torch

from tests.gpu.checks import CHECKS
from tests.gpu.where import Where


def main() -> None:
    errors: dict[str, str | None] = {}
    for name, check in CHECKS.items():
        try:
            # bfloat16 is left out: the interpreter computes garbage in it.
            check(Where("cpu", False, (torch.float32, torch.float16), seed=0))
            errors[name] = None
        except Exception:
            errors[name] = traceback.format_exc()
    json.dump(errors, sys.stdout)


if __name__ == "__main__":
    main()
