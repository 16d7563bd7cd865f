"""What a start begins before torch is imported: the card is opened and let go again, whatever the driver says, the
collector rests meanwhile, and who uses no card is left alone."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config import Config
from quire.config_build import override_config
from quire.startup import early_init as beginning
from quire.startup.early_init import gc_paused, gpu_opened, hash_triton, may_launch_kernels


class Driver:
    """Notes what it is asked; `fails`: what it can't do."""

    def __init__(self, fails: str = ""):
        self.asked: list[str] = []
        self.held, self.let_go = threading.Event(), threading.Event()
        self._fails = fails

    def __getattr__(self, name: str) -> Callable[..., int]:
        def answer(*args: Any) -> int:
            self.asked.append(name)
            if "Retain" in name:
                self.held.set()
            if "Release" in name:
                self.let_go.set()
            return 100 if name == self._fails else 0

        return answer


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(beginning, "may_have_gpu", lambda: True)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: found)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    return found


def config(**settings: Any) -> Config:
    return override_config(Config(), settings)


def test_the_card_is_held_inside_and_let_go_behind(driver: Driver) -> None:
    with gpu_opened(config()):
        assert driver.held.wait(10)
        assert driver.asked == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    assert driver.let_go.wait(10)
    with pytest.raises(RuntimeError), gpu_opened(config()):
        driver.let_go.clear()
        raise RuntimeError("a bad config")
    assert driver.let_go.wait(10), "also when the start fails"


@pytest.mark.parametrize("fails", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_a_driver_that_can_not_is_asked_no_more(fails: str, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_fails", fails)
    end = threading.Event()
    end.set()
    beginning._hold_gpu(end, 0)
    assert driver.asked[-1] == fails


def test_a_driver_that_is_not_there_is_nobodys_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beginning, "may_have_gpu", lambda: True)
    monkeypatch.setattr(beginning, "DRIVER", "libno-such-driver.so.1")
    threads: list[threading.Thread] = []
    plain = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (threads.append(self), plain(self))[1])
    with gpu_opened(config()):
        for thread in threads:
            thread.join(10)
    assert len(threads) == 1 and not threads[0].is_alive()


def test_who_wants_a_cpu_or_has_no_card_opens_none(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beginning, "_in_thread", lambda what: pytest.fail("it is"))
    with gpu_opened(config(device="cpu")):
        pass
    assert not may_launch_kernels(config(device="cpu")) and not may_launch_kernels(config(kernels="torch"))
    assert may_launch_kernels(config())
    monkeypatch.setattr(beginning, "may_have_gpu", lambda: False)
    with gpu_opened(config()):
        pass
    assert not may_launch_kernels(config())


def test_the_collector_rests_while_modules_are_imported() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError), gc_paused():
        assert not gc.isenabled()
        raise ImportError("torch")
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled(), "who had it off keeps it off"
    finally:
        gc.enable()


@pytest.mark.parametrize("found", [ImportError("no Triton"), RuntimeError("a broken one"), SimpleNamespace()])
def test_a_triton_that_can_not_be_hashed_is_left_to_who_needs_it(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(name: str) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(beginning, "import_module", look_up)
    assert hash_triton() is None


def test_tritons_hash_is_taken_in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[threading.Thread] = []
    cache = SimpleNamespace(triton_key=lambda: hashed.append(threading.current_thread()))
    monkeypatch.setattr(beginning, "import_module", lambda name: {"triton.runtime.cache": cache}[name])
    hashing = hash_triton()
    assert hashing is not None
    hashing.join(10)
    assert hashed == [hashing]


def test_nothing_of_it_needs_torch() -> None:
    code = "import sys, quire.llm, quire.async_llm, quire.startup.trial_notes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
