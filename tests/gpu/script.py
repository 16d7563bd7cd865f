"""Lets a file of GPU tests also run as a script, where pytest is not installed: `python -m tests.gpu.test_engine`.

`DEVICE` is where they run; QUIRE_TEST_DEVICE=cpu tries the tests themselves on a machine without a GPU.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

DEVICE = torch.device(os.environ.get("QUIRE_TEST_DEVICE", "cuda"))
if DEVICE.type == "cuda":
    DEVICE = torch.device("cuda", 0)
ON_GPU = DEVICE.type == "cuda"


def marks() -> Any:
    """`pytestmark` of a file: skipped without the device. Nothing where there is no pytest."""
    try:
        import pytest
    except ImportError:
        return []
    return pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="needs a CUDA GPU")


def skip(why: str) -> None:
    """For a test that returns then: where there is no pytest, nothing stops it."""
    try:
        import pytest
    except ImportError:
        print(f"skipped: {why}")
    else:
        pytest.skip(why)


def run_file(tests: dict[str, Any], only: str = "") -> None:
    """Every function of the module whose name begins with test_ and contains `only`; exits 1 if one fails."""
    failed = 0
    found: list[tuple[str, Callable[[], None]]] = [(n, t) for n, t in tests.items() if n.startswith("test_")]
    for name, test in found:
        if only not in name:
            continue
        begin = time.perf_counter()
        try:
            test()
            verdict = "ok"
        except Exception:
            traceback.print_exc()
            failed, verdict = failed + 1, "FAILED"
        print(f"{verdict:6} {name} ({time.perf_counter() - begin:.1f} s)", flush=True)
    sys.exit(1 if failed else 0)
