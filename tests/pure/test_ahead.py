"""Compiling beside a start: when it is worth it, what becomes of each kernel, and that nothing which goes wrong there
keeps anybody waiting.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from quire.config import Config
from quire.config_build import override_config
from quire.machine import Machine
from quire.startup import compile_ahead as ahead
from quire.startup.compile_ahead import Compilers, count_workers, list_sources, stamp_path, start_compilers

GIB = 1 << 30
MACHINE = Machine("Linux", "a processor", 16, 16, 64 * GIB, 60 * GIB)
CARDS = ("NVIDIA H200",)


def key(name: str) -> ahead.Key:
    return ("m", name, "")


def end(compilers: Compilers) -> None:
    assert compilers._process.stdin is not None
    compilers._process.stdin.close()
    compilers.wait()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Compilers]:
    """With patience for a process that takes its time to start, as on a busy machine."""
    monkeypatch.setattr(ahead, "LIST_WAIT_SECONDS", 60.0)

    def start(num_workers: int = 2, **settings: Any) -> Compilers:
        settings["folder"] = str(tmp_path)
        return Compilers(settings, num_workers, tmp_path / "cache/stamp", dry_run="tests.pure.ahead_stand_in")

    return start


# ---------------------------------------------------------------------------------------------------------------------
# Whether to


@pytest.fixture
def worthwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A machine with a card, where nothing was compiled; what is started there."""
    started: list[Any] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(ahead, "may_have_gpu", lambda: True)
    monkeypatch.setattr(ahead, "read_machine", lambda: MACHINE)
    monkeypatch.setattr(ahead, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(ahead, "Compilers", lambda *args: started.append(args) or "started")
    return started


def test_kernels_are_compiled_beside_a_start_that_finds_none(worthwhile: list[Any]) -> None:
    config = override_config(Config(), {"model": "m", "hub_token": "secret"})
    assert start_compilers(config) == "started"
    ((settings, num_workers, stamp),) = worthwhile
    assert settings == {"model": "m"}
    assert num_workers == ahead.MAX_WORKERS
    stamp.parent.mkdir(parents=True)
    stamp.touch()
    assert start_compilers(config) is None


@pytest.mark.parametrize("settings", [{"device": "cpu"}, {"kernels": "torch"}])
def test_nothing_is_compiled_for_who_launches_no_kernels(worthwhile: list[Any], settings: dict[str, Any]) -> None:
    assert start_compilers(override_config(Config(), settings)) is None


@pytest.mark.parametrize("name, value", [
    ("may_have_gpu", lambda: False),
    ("find_spec", lambda name: None),
    ("read_machine", lambda: replace(MACHINE, num_usable_cores=3)),
])  # fmt: skip
def test_nothing_is_started_where_nothing_is_gained(worthwhile: list[Any], name: str, value: Any,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(ahead, name, value)
    assert start_compilers(Config()) is None
    assert not worthwhile


def test_nothing_is_started_where_nothing_can_be_kept(worthwhile: list[Any], tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert start_compilers(Config()) is None
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "not/there/yet"))
    assert start_compilers(Config()) is not None
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert start_compilers(Config()) is None


def test_a_start_goes_on_where_no_process_can_be_started(worthwhile: list[Any],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    def refuse(*args: Any) -> None:
        raise BlockingIOError("too many processes")

    monkeypatch.setattr(ahead, "Compilers", refuse)
    assert start_compilers(Config()) is None


@pytest.mark.parametrize("cores, available, expected", [
    (16, None, 12), (64, 500 * GIB, 12), (3, 60 * GIB, 0), (4, 60 * GIB, 2), (8, 60 * GIB, 6), (16, 4 * GIB, 4),
    (16, GIB, 0),
])  # fmt: skip
def test_workers_are_as_many_as_cores_and_memory_allow(cores: int, available: int | None, expected: int) -> None:
    assert count_workers(replace(MACHINE, num_usable_cores=cores, memory_available=available)) == expected


def test_a_stamp_is_for_one_kind_of_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = stamp_path(Config(), CARDS)
    assert stamp_path(override_config(Config(), {"hub_token": "t", "offline": True}), CARDS) == plain
    assert stamp_path(override_config(Config(), {"dtype": "float16"}), CARDS) != plain
    assert stamp_path(Config(), ("NVIDIA H100",)) != plain
    monkeypatch.setattr(ahead, "installed_version", lambda name: "0")
    assert stamp_path(Config(), CARDS) != plain
    monkeypatch.undo()
    (tmp_path / "linear").mkdir()
    (tmp_path / "linear/norm.py").touch()
    monkeypatch.setattr(ahead, "SOURCES", tmp_path)
    ours = stamp_path(Config(), CARDS)
    os.utime(tmp_path / "linear/norm.py", ns=(1, 1))
    assert len({plain, ours, stamp_path(Config(), CARDS)}) == 3


def test_sources_that_are_missing_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no Python source"):
        list_sources(tmp_path / "moved_elsewhere")


def test_a_stamp_lies_where_triton_keeps_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", "/here")
    assert stamp_path(Config(), CARDS).is_relative_to("/here/.triton/cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/there")
    assert stamp_path(Config(), CARDS).is_relative_to("/there")


# ---------------------------------------------------------------------------------------------------------------------
# What becomes of each kernel


def test_what_is_told_is_compiled_and_a_stamp_says_so(start: Callable[..., Compilers], tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("QUIRE_ADMIN_KEY", "secret")
    names = [f"kernel_{number}" for number in range(7)]
    compilers = start(tell=[*names, names[0]])
    compilers.wait()
    assert all((tmp_path / name).exists() for name in names)
    assert (tmp_path / "cache/stamp").exists()
    compilers.wait_for_kernel(key(names[0]))
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["settings"]["offline"] is True  # what is not here yet, the start itself fetches
    assert not {"HF_TOKEN", "QUIRE_ADMIN_KEY"} & set(seen["variables"])


def test_a_kernel_is_waited_for_until_it_is_there(start: Callable[..., Compilers], tmp_path: Path) -> None:
    compilers = start(tell=["kernel"], num_workers=1)
    compilers.wait_for_kernel(key("kernel"))  # not even told yet
    assert (tmp_path / "kernel").exists()


def test_a_kernel_that_nobody_has_begun_is_the_starts_own(start: Callable[..., Compilers], tmp_path: Path) -> None:
    compilers = start(tell=["long", "queued"], work="hang", num_workers=1)
    with compilers._changed:
        compilers._changed.wait_for(lambda: compilers._states.get(key("long")) is ahead.State.RUNNING)
    compilers.wait_for_kernel(key("queued"))
    assert compilers._states[key("queued")] is ahead.State.ENDED
    assert not (tmp_path / "queued").exists()
    end(compilers)


def test_kernels_the_rehearsal_did_not_tell_of_are_not_waited_for(start: Callable[..., Compilers]) -> None:
    compilers = start(tell=[])
    compilers.wait_for_kernel(key("another"))
    assert compilers._listed


def test_what_no_first_token_needs_is_compiled_and_kept_nobody_waiting(start: Callable[..., Compilers],
                                                                       tmp_path: Path) -> None:  # fmt: skip
    """The stamp says that what is needed is there, whatever becomes of the rest."""
    compilers = start(tell=["kernel"], later=["endless", "large"], endless="endless", end="hang")
    compilers.wait_for_kernel(key("another"))  # the list goes on, but not with what a start needs
    assert not compilers._listed
    with compilers._changed:
        done = [key("kernel"), key("large")]
        compilers._changed.wait_for(lambda: all(compilers._states.get(each) is ahead.State.ENDED for each in done))
    assert (tmp_path / "kernel").exists() and (tmp_path / "large").exists()
    assert (tmp_path / "cache/stamp").exists()
    end(compilers)


def test_what_does_not_compile_is_left_to_who_launches_it(start: Callable[..., Compilers], tmp_path: Path) -> None:
    compilers = start(tell=["kernel"], work="raise")
    compilers.wait_for_kernel(key("kernel"))
    compilers.wait()
    assert (tmp_path / "cache/stamp").exists()  # it would not the next time either


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


@pytest.mark.parametrize("num_workers", [2, 4])
def test_workers_that_die_are_not_waited_for(num_workers: int, start: Callable[..., Compilers],
                                             tmp_path: Path) -> None:  # fmt: skip
    compilers = start(tell=["one", "other", "third"], work="die", num_workers=num_workers)
    for name in ("one", "other", "third", "fourth"):
        compilers.wait_for_kernel(key(name))
    compilers.wait()
    assert not (tmp_path / "cache/stamp").exists()


@pytest.mark.parametrize("end", ["die", "babble"])
def test_a_rehearsal_that_dies_or_says_something_else_leaves_the_rest_to_the_start(
    end: str, start: Callable[..., Compilers], tmp_path: Path
) -> None:
    compilers = start(tell=["kernel"], end=end)
    for name in ("kernel", "another"):
        compilers.wait_for_kernel(key(name))
    compilers.wait()
    assert not (tmp_path / "cache/stamp").exists()


def test_a_module_that_can_not_be_run_changes_nothing(tmp_path: Path) -> None:
    compilers = Compilers({}, 2, tmp_path / "stamp", dry_run="tests.pure.no_such_module")
    compilers.wait_for_kernel(key("kernel"))
    compilers.wait()
    assert not (tmp_path / "stamp").exists()


def test_patience_with_a_rehearsal_is_spent_once(start: Callable[..., Compilers],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(ahead, "LIST_WAIT_SECONDS", 0.05)
    compilers = start(end="hang")
    compilers.wait_for_kernel(key("kernel"))
    assert not compilers._listed
    assert compilers._list_wait.left == 0
    compilers.wait_for_kernel(key("another"))
    end(compilers)


def test_a_worker_that_never_answers_is_given_up(start: Callable[..., Compilers],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(ahead, "COMPILE_WAIT_SECONDS", 0.05)
    compilers = start(tell=["kernel", "another"], work="hang")
    with compilers._changed:
        running = [ahead.State.RUNNING] * 2
        assert compilers._changed.wait_for(lambda: [*compilers._states.values()] == running, timeout=60)
    for name in ("kernel", "another"):
        compilers.wait_for_kernel(key(name))
    assert compilers._compile_wait.left == 0
    assert {*compilers._states.values()} == {ahead.State.RUNNING}
    end(compilers)


def test_whoever_is_killed_leaves_nobody_behind(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from quire.startup.compile_ahead import Compilers
compilers = Compilers({{"folder": {str(tmp_path)!r}, "tell": ["kernel"], "work": "hang", "end": "hang"}}, 2,
                      Path({str(tmp_path)!r}, "stamp"), dry_run="tests.pure.ahead_stand_in")
with compilers._changed:
    compilers._changed.wait_for(lambda: compilers._states)
print("begun", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        pids = json.loads((tmp_path / "seen.json").read_text())["pids"]
        ends = [os.pidfd_open(pid) for pid in pids]
        process.send_signal(signal.SIGKILL)
    for each in ends:
        assert select.select([each], [], [], 20)[0], f"one of {pids} is still there"
        os.close(each)


# ---------------------------------------------------------------------------------------------------------------------
# Triton's hook


class FakeTriton(ModuleType):
    def __init__(self, hook: Any):
        super().__init__("triton")
        self.knobs = SimpleNamespace(runtime=SimpleNamespace(jit_cache_hook=hook))

    def call(self, name: str) -> Any:
        info = SimpleNamespace(module="m", name=name)
        return self.knobs.runtime.jit_cache_hook(fn=info, compile={"specialization_data": ""}, key="k")


def test_whoever_had_the_hook_before_keeps_it(start: Callable[..., Compilers], tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    calls: list[dict[str, Any]] = []
    theirs = lambda **told: calls.append(told) or "theirs"  # noqa: E731
    triton = FakeTriton(theirs)
    monkeypatch.setitem(sys.modules, "triton", triton)
    compilers = start(tell=["kernel"], end="hang")
    compilers.attach()
    assert triton.knobs.runtime.jit_cache_hook is not theirs
    assert triton.call("kernel") == "theirs"
    assert (tmp_path / "kernel").exists()
    assert [told["key"] for told in calls] == ["k"]
    end(compilers)
    assert triton.knobs.runtime.jit_cache_hook is theirs
    compilers.attach()  # when all is over
    assert triton.knobs.runtime.jit_cache_hook is theirs


def test_a_hook_that_came_later_stays(start: Callable[..., Compilers], monkeypatch: pytest.MonkeyPatch) -> None:
    triton = FakeTriton(None)
    monkeypatch.setitem(sys.modules, "triton", triton)
    compilers = start(end="hang")
    compilers.attach()
    triton.knobs.runtime.jit_cache_hook = later = lambda **told: None
    end(compilers)
    assert triton.knobs.runtime.jit_cache_hook is later


def test_a_triton_that_calls_in_another_way_compiles_for_itself(start: Callable[..., Compilers],
                                                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    triton = FakeTriton(None)
    monkeypatch.setitem(sys.modules, "triton", triton)
    compilers = start(end="hang")
    compilers.attach()
    assert triton.knobs.runtime.jit_cache_hook(repr="kernel") is False
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    compilers.attach()
    monkeypatch.setitem(sys.modules, "triton", None)
    compilers.attach()
    end(compilers)
