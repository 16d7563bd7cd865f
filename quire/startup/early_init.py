"""Builds an engine from a config, and uses the seconds in which torch is imported for slow work that needs no torch.

`LLM`, `AsyncLLM` and the engine process call `open_engine`. During the import, other processes compile missing kernels
(`compile_ahead`), one thread opens the GPU, and another lets Triton compute the hash of itself that is part of its
cache keys. This work is optional: what fails here fails again where it is needed, and is reported there.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.config import Config
from quire.files.progress import Progress
from quire.machine import may_have_gpu
from quire.startup.compile_ahead import start_compilers

if TYPE_CHECKING:
    from quire.startup.assemble import Assembly

DRIVER = "libcuda.so.1"


def open_engine(config: Config, progress: Progress | None = None) -> Assembly:
    """Returns a running engine. Imports torch."""
    compilers = start_compilers(config)
    with gpu_opened(config):
        with gc_paused():
            hashing = hash_triton() if may_launch_kernels(config) else None
            from quire.startup.assemble import assemble
        if hashing is not None:
            hashing.join()  # a caller that needs the hash earlier would compute it again
        return assemble(config, progress, compilers)


def may_launch_kernels(config: Config) -> bool:
    """Whether this config may launch Triton kernels."""
    return config.engine.device != "cpu" and config.engine.kernels != "torch" and may_have_gpu()


@contextmanager
def gpu_opened(config: Config) -> Iterator[None]:
    """Opens the GPU in a thread, as torch will do, which hides half a second behind the import of torch.

    Inside the block torch shares the context. On exit this reference is released, so that an engine on the CPU holds
    no GPU context.
    """
    end = threading.Event()
    if config.engine.device != "cpu" and may_have_gpu():
        number = int(config.engine.device.partition(":")[2] or 0)
        _in_thread(lambda: _hold_gpu(end, number))
    try:
        yield
    finally:
        end.set()


def _hold_gpu(end: threading.Event, number: int) -> None:
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # the value that torch sets; CUDA reads it only once
    driver = ctypes.CDLL(DRIVER)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), number):
        return
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0:
        end.wait()
        driver.cuDevicePrimaryCtxRelease_v2(device)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disables garbage collection in a block of imports, whose objects stay and would be scanned again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def hash_triton() -> threading.Thread | None:
    """Lets Triton compute and cache the hash of its 400 MB, which takes half a second. Returns the thread."""
    try:
        key: Callable[[], Any] = import_module("triton.runtime.cache").triton_key
    except Exception:  # missing or broken: the code that needs Triton reports it
        return None
    return _in_thread(key)


def _in_thread(what: Callable[[], Any]) -> threading.Thread:
    def run() -> None:
        with suppress(Exception):
            what()

    thread = threading.Thread(target=run, name="quire early init", daemon=True)
    thread.start()
    return thread
