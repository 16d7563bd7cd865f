"""The look at the ops before the first request: every row of the table passes, and one wrong op is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.kernels.table import DETERMINISTIC, REFERENCE
from quire.kernels.validation import self_test as selftest
from quire.types import QuireError

CPU = torch.device("cpu")


@pytest.mark.parametrize("ops", [REFERENCE, DETERMINISTIC], ids=["reference", "fixed"])
def test_every_row_passes(ops: Any) -> None:
    selftest.check_ops(ops, CPU)


@pytest.mark.parametrize("name", ["rms_norm", "gate_mul", "paged_attention", "qk_norm_rope_write"])
def test_an_op_that_is_off_is_named(name: str) -> None:
    real = getattr(REFERENCE, name)
    broken = replace(REFERENCE, **{name: lambda *args: real(*args) * 1.001})
    named = {"paged_attention": "attention", "qk_norm_rope_write": "rope"}.get(name, name)
    with pytest.raises(QuireError, match=f"The op {named}"):
        selftest.check_ops(broken, CPU)
    nan = replace(REFERENCE, **{name: lambda *args: real(*args) * float("nan")})
    with pytest.raises(QuireError, match="wrong results"):
        selftest.check_ops(nan, CPU)
