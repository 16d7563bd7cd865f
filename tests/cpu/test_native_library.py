"""The library itself: it is there where a compiler is, it is that of these sources, and nothing breaks without it."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from quire.kernels.native import building, library
from quire.kernels.native.library import NotBuilt, load_library, open_native
from quire.kernels.native.matrix import PackedLinear, pack_floats
from quire.kernels.table import REFERENCE, select_choice, select_ops
from quire.types import QuireError


def test_where_there_is_a_compiler_there_is_a_library() -> None:
    """A source tree beside an installed package uses the package's; one whose sources changed needs `make native`."""
    if building.find_compiler() is None:
        pytest.skip("no C++ compiler here")
    assert load_library().quire_sources().decode() == building.source_digest()
    assert open_native("portable", 1).lanes == 8
    ops = select_ops("cpu")
    assert ops.native is not None and select_choice("cpu") is not None


def test_without_a_library_plain_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise NotBuilt("there is no library")

    monkeypatch.setattr(library, "load_library", nothing)
    open_native.cache_clear()
    try:
        assert select_ops("cpu") is REFERENCE and select_choice("cpu") is None
        with pytest.raises(QuireError, match="kernels=avx2 can't be used: there is no library"):
            select_ops("cpu", "avx2")
    finally:
        open_native.cache_clear()


def test_torch_is_a_choice() -> None:
    assert select_ops("cpu", "torch") is REFERENCE and select_choice("cpu", "torch") is None


def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "source_digest", lambda: "something else")
    load_library.cache_clear()
    try:
        with pytest.raises(NotBuilt):
            load_library()
    finally:
        load_library.cache_clear()


def test_a_build_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(building, "find_compiler", lambda: None)
    with pytest.raises(building.BuildError, match="no C\\+\\+ compiler"):
        building.build(tmp_path / "lib.so")


def test_a_build_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(building, "FLAGS", ["--no-such-flag"])
    if building.find_compiler() is None:
        pytest.skip("no C++ compiler here")
    with pytest.raises(building.BuildError, match="no-such-flag"):
        building.build(tmp_path / "lib.so")


def _products(linear: PackedLinear, x: torch.Tensor, want: torch.Tensor, wrong: list[int]) -> None:
    for _ in range(50):
        if not torch.equal(linear(x), want):
            wrong.append(1)


def _in_child(queue: multiprocessing.Queue) -> None:
    queue.put(_small_product())


def _small_product() -> float:
    native = open_native(None, 2)
    ones = torch.ones(300, 64)
    matrix = pack_floats(native, "F32", 300, 64, lambda first, count: ones[first : first + count])
    return PackedLinear([matrix])(torch.ones(1, 64)).sum().item()


def test_threads_share_one_pool() -> None:
    """Callers take turns; every one gets its own result."""
    try:
        native = open_native(None, 3)
    except NotBuilt as error:
        pytest.skip(str(error))
    dense = torch.randn(700, 128)
    linear = PackedLinear([pack_floats(native, "Q8_0", 700, 128, lambda first, count: dense[first : first + count])])
    wrong: list[int] = []
    jobs = []
    for rows in (1, 3, 9):
        x = torch.randn(rows, 128)
        jobs.append(threading.Thread(target=_products, args=(linear, x, linear(x), wrong)))
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert not wrong


def test_a_forked_process_works_alone() -> None:
    """The pool's threads do not survive a fork; the child must not wait for them."""
    try:
        assert _small_product() == 300 * 64
    except NotBuilt as error:
        pytest.skip(str(error))
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == 300 * 64
    child.join()


NO_MEMORY = """
import resource, torch
from quire.kernels.native.library import open_native
from quire.kernels.native.matrix import PackedLinear, pack_floats

native = open_native(None, 1)
ones = torch.ones(16, 8192)
linear = PackedLinear([pack_floats(native, "Q8_0", 16, 8192, lambda first, count: ones[first : first + count])])
x, small = torch.ones(4000, 8192), torch.ones(1, 8192)
with open("/proc/self/statm") as file:
    held = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (24 << 20), resource.RLIM_INFINITY))
try:
    linear(x)
except MemoryError as error:
    print(error)
print(round(float(linear(small).mean()) / 8192, 2))  # with what it has it works on
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(round(float(linear(x)[-1].mean()) / 8192, 2))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs a system that can limit and tell memory")
def test_no_memory_to_work_in_is_an_error_and_not_the_end() -> None:
    try:
        load_library()
    except NotBuilt as error:
        pytest.skip(str(error))
    done = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n") == ["the native kernels could not allocate memory", "1.0", "1.0", ""], done.stderr
