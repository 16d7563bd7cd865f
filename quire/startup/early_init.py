"""From a config to an engine, with all that takes long and needs no torch begun before torch is imported, which takes
seconds. `LLM`, `AsyncLLM` and the engine process call `open_engine`.

Beside the import, other processes compile what was never compiled (`compilers`), one thread opens the card, and another
has Triton hash itself, by which it names its kernels on disk. None of it decides anything: what fails here fails again
where it is needed, and is said there.
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
    compilers = start_compilers(config)
    with card_opened(config):
        with collections_paused():
            hashing = hash_triton() if launches_kernels(config) else None
            from quire.startup.assemble import assemble
        if hashing is not None:
            hashing.join()  # whoever needs the hash before it is there would begin anew
        return assemble(config, progress, compilers)


def launches_kernels(config: Config) -> bool:
    return config.engine.device != "cpu" and config.engine.kernels != "torch" and may_have_gpu()


@contextmanager
def card_opened(config: Config) -> Iterator[None]:
    """The first card is opened meanwhile, as torch will open it: half a second that its import covers. Inside, torch
    takes the same context as its own; then ours is let go, so that who ends up on the CPU keeps no card open."""
    end = threading.Event()
    if config.engine.device != "cpu" and may_have_gpu():
        _in_thread(lambda: _hold_card(end))
    try:
        yield
    finally:
        end.set()


def _hold_card(end: threading.Event) -> None:
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch sets it, and read but once
    driver = ctypes.CDLL(DRIVER)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0:
        end.wait()
        driver.cuDevicePrimaryCtxRelease_v2(device)


@contextmanager
def collections_paused() -> Iterator[None]:
    """What is imported stays: the collector would walk over ever more of it, and find nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def hash_triton() -> threading.Thread | None:
    """Imports Triton, which needs no torch and is needed anyway; the hash of its 400 MB, half a second, it keeps."""
    try:
        key: Callable[[], Any] = import_module("triton.runtime.cache").triton_key
    except Exception:  # not installed, or broken: who needs it will say so
        return None
    return _in_thread(key)


def _in_thread(what: Callable[[], Any]) -> threading.Thread:
    def run() -> None:
        with suppress(Exception):
            what()

    thread = threading.Thread(target=run, name="quire beginning", daemon=True)
    thread.start()
    return thread
