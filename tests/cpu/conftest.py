"""Fixtures of the tests that need torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire.kernels.native.library import ISAS, Native
from tests.cpu.native_isas import open_or_skip


@pytest.fixture(params=ISAS)
def native(request: pytest.FixtureRequest) -> Native:
    """The native kernels of each instruction set this machine can run."""
    return open_or_skip(request.param)


@pytest.fixture(autouse=True, scope="module")
def _torch_has_one_thread() -> None:
    """As beside the native kernels, so that it does not depend on whether a test before made an engine. Two workers'
    threads get in each other's way, and tensors as small as the tests' are not worth a second one."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _inference_mode_ends_with_its_test() -> Iterator[None]:
    """Left on, it would change what later tests of the process see."""
    yield
    assert not torch.is_inference_mode_enabled(), "this test left inference mode on"
