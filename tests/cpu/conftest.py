"""Fixtures of the tests that need torch."""

from __future__ import annotations

import pytest

from quire.kernels.native.library import ISAS, Native
from tests.cpu.native_isas import open_or_skip


@pytest.fixture(params=ISAS)
def native(request: pytest.FixtureRequest) -> Native:
    """The native kernels of each instruction set this machine can run."""
    return open_or_skip(request.param)
