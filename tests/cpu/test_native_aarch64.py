"""The native library on Arm: cross-compiled, run in an emulator, and compared with its portable code there.

Needs Debian's g++-aarch64-linux-gnu and qemu-user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.kernels.formats.gguf_blocks import FORMATS
from quire.kernels.formats.random_blocks import random_blocks
from quire.kernels.native.building import SOURCES, build
from quire.kernels.native.library import BYTE_FORMS, FLOAT_FORMS, FORMS

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
ROOT = "/usr/aarch64-linux-gnu"
SEED = int(os.environ.get("TEST_SEED", "3"))
ROWS, COLUMNS = 13, 512

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None or EMULATOR is None, reason="no compiler or emulator of aarch64"),
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command line of a program that calls the library in the emulator."""
    folder = tmp_path_factory.mktemp("aarch64")
    build(folder / "libquire.so", COMPILER, "aarch64")
    source = Path(__file__).with_name("aarch64_driver.cpp")
    command = [
        str(COMPILER),
        "-std=c++17",
        "-O1",
        f"-I{SOURCES}",
        str(source),
        "-o",
        str(folder / "driver"),
        f"-L{folder}",
        "-lquire",
        f"-Wl,-rpath,{folder}",
        "-pthread",
    ]
    subprocess.run(command, check=True, timeout=600)
    return [str(EMULATOR), "-cpu", "max", "-L", ROOT, str(folder / "driver")]


def run(driver: list[str], tmp_path: Path, what: str, sizes: list[int], *data: np.ndarray) -> list[np.ndarray]:
    given, out = tmp_path / "in", tmp_path / "out"
    given.write_bytes(b"".join(part.tobytes() for part in (np.array(sizes, np.int32), *data)))
    subprocess.run([*driver, what, str(given), str(out)], check=True, timeout=600)
    return np.split(np.fromfile(out, np.float32), 3)


@pytest.mark.parametrize("form", FORMS)
def test_products_are_those_of_the_portable_code(driver: list[str], tmp_path: Path, form: str) -> None:
    generator = torch.Generator().manual_seed(SEED)
    if form in FLOAT_FORMS:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[form]
        weights = torch.randn(ROWS * COLUMNS, generator=generator).to(dtype).view(torch.uint8)
    elif form in BYTE_FORMS:
        numbers = torch.randint(-127, 128, (ROWS, COLUMNS), generator=generator, dtype=torch.int8)
        scales = torch.rand(ROWS, 1, generator=generator)
        weights = torch.cat((numbers.view(torch.uint8), scales.view(torch.uint8)), 1).view(-1)
    else:
        weights = random_blocks(form, ROWS * COLUMNS // FORMATS[form].elements, generator)
    for tokens in (1, 2, 11):
        x = torch.randn(tokens, COLUMNS, generator=generator).numpy()
        sizes = [FORMS[form], ROWS, COLUMNS, tokens]
        portable, dotprod, i8mm = run(driver, tmp_path, "product", sizes, weights.numpy(), x)
        assert np.isfinite(portable).all() and np.abs(portable).max() > 0
        np.testing.assert_allclose(dotprod, portable, rtol=1e-4, atol=1e-5 * np.abs(portable).max())
        assert np.array_equal(i8mm, dotprod), "whole numbers, however they are multiplied"


@pytest.mark.parametrize("form", [0, 1, 2, 3])
def test_attention_is_that_of_the_portable_code(driver: list[str], tmp_path: Path, form: int) -> None:
    tokens, heads, kv_heads, dim = 150, 6, 2, 64
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=torch.Generator().manual_seed(SEED)).numpy()
    portable, dotprod, i8mm = run(driver, tmp_path, "attend", [form, tokens, heads, kv_heads, dim], qkv)
    # A number of a packed cache may fall to the other side of a rounding edge.
    near = np.abs(dotprod - portable) <= 1e-4 if form == 0 else np.abs(dotprod - portable) <= 2e-2
    assert near.all() and np.mean(np.abs(dotprod - portable) > 1e-4) < 0.05
    assert np.array_equal(i8mm, dotprod)
