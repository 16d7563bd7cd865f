"""Run the small kernel checks under Triton's interpreter and print a JSON object: name -> what went wrong, if anything.

`tests/cpu/test_triton_interpreter.py` starts this with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

from __future__ import annotations

import json
import sys
import traceback

import torch

from tests.gpu.checks import CHECKS
from tests.gpu.where import NotHere, Where, poisoned


def main() -> None:
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
