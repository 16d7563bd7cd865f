"""Opens the native kernels for a test; it is skipped where they were not built or the machine can't run them."""

from __future__ import annotations

import pytest

from quire.kernels.native.library import Native, NotBuilt, open_native

THREADS = 2


def open_or_skip(isa: str) -> Native:
    try:
        return open_native(isa, THREADS)
    except NotBuilt as error:
        pytest.skip(str(error))
