"""FlashAttention and FlashInfer behind the ops table, where installed; also as `python -m tests.gpu.test_libraries`.

`QUIRE_FLASHINFER=compile` lets FlashInfer compile what it has not yet, minutes for each of two kinds of kernels.
"""

from __future__ import annotations

import os

import torch

from quire.kernels.libraries.choose import LIBRARIES
from quire.kernels.table import select_ops
from tests.gpu.library_checks import check_kernel
from tests.gpu.script import DEVICE, marks, run_file
from tests.gpu.where import Where

pytestmark = marks()


def check_library(name: str, head_dims: tuple[int, ...] = (64, 128)) -> None:
    library = next(library for library in LIBRARIES if library.name == name)
    if library.installed() is None:
        return skip(f"{name} is not installed")
    kernels = library.open(DEVICE)
    if not kernels:
        return skip(f"{name} has no kernel for this GPU")
    seed = torch.seed() % 2**31
    print(f"{name} {library.installed()}, seed {seed}")
    for kernel in kernels:
        where = Where("cuda", True, (torch.bfloat16,), seed)
        check_kernel(select_ops("cuda", strict=True), kernel, where, head_dims)


def skip(why: str) -> None:
    try:
        import pytest
    except ImportError:
        print(f"skipped: {why}")
    else:
        pytest.skip(why)


def test_flash_attention_3() -> None:
    check_library("FlashAttention-3")


def test_flash_attention_2() -> None:
    check_library("FlashAttention")


def test_flashinfer() -> None:
    if os.environ.get("QUIRE_FLASHINFER") != "compile":
        return skip("QUIRE_FLASHINFER=compile is not set")
    check_library("FlashInfer", head_dims=(128,))


if __name__ == "__main__":
    run_file(globals())
