"""The Triton kernels on small shapes under Triton's interpreter, so that a machine without a GPU guards them too.

In a process of its own: Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.gpu.checks import CHECKS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, str]]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.interpreted"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, dict[str, str]] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, outcomes: dict[str, dict[str, str]]) -> None:
    if "skipped" in outcomes[name]:
        pytest.skip(outcomes[name]["skipped"])
    assert "error" not in outcomes[name], outcomes[name]["error"]
