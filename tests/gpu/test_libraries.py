"""cuDNN, FlashAttention and FlashInfer behind the ops table, where installed: `python -m tests.gpu.test_libraries`.

FlashInfer is tried with what it has compiled. `QUIRE_FLASHINFER=compile` lets it compile what it has not, minutes for
each of two kinds of kernels.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from quire.kernels.libraries.choose import LIBRARIES
from quire.kernels.libraries.cudnn import CudnnAttention
from quire.kernels.table import select_ops
from tests.gpu.library_checks import check_fresh, check_kernel
from tests.gpu.script import DEVICE, marks, run_file, skip
from tests.gpu.where import Where

pytestmark = marks()


def check_library(
    name: str, head_dims: tuple[int, ...] = (64, 128), windowed: tuple[bool, ...] = (False, True)
) -> None:
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
        check_kernel(select_ops("cuda", strict=True), kernel, where, head_dims, windowed)


def test_flash_attention_3() -> None:
    check_library("FlashAttention-3")


def test_flash_attention_2() -> None:
    check_library("FlashAttention")


def test_cudnn() -> None:
    seed = torch.seed() % 2**31
    print(f"cuDNN {torch.backends.cudnn.version()}, seed {seed}")
    ops = select_ops("cuda", strict=True)
    check_fresh(ops, CudnnAttention(), Where("cuda", True, (torch.bfloat16, torch.float16), seed))


def test_flashinfer() -> None:
    if find_spec("flashinfer") is None:
        return skip("FlashInfer is not installed")
    from flashinfer.jit.core import jit_spec_registry  # type: ignore[import-not-found]

    from quire.kernels.libraries.flashinfer import ModuleKind, backend_for, is_compiled

    kinds = {windowed: ModuleKind(backend_for(DEVICE), torch.bfloat16, 128, windowed) for windowed in (False, True)}
    may_compile = os.environ.get("QUIRE_FLASHINFER") == "compile"
    ready = [windowed for windowed, kind in kinds.items() if may_compile or is_compiled(kind)]
    if not ready:
        return skip("FlashInfer has compiled nothing yet and QUIRE_FLASHINFER=compile is not set")
    for windowed in ready:
        check_library("FlashInfer", head_dims=(128,), windowed=(windowed,))
        assert is_compiled(kinds[windowed])
    asked = set(jit_spec_registry.get_all_specs())
    assert asked == {kind.module().name for kind in kinds.values()}, "its wrapper asked for another kind"


if __name__ == "__main__":
    run_file(globals())
