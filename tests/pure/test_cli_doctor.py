"""`quire doctor`: what it finds on a made-up machine, what it says is missing, and that it never fetches."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from argparse import ArgumentParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import quire
from quire.cli import doctor
from quire.config import Config
from quire.machine import PACKAGES, nvidia_driver_version, read_machine
from quire.types import QuireError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty store, and no torch: it is slow to import and not what is tested."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "torch", None)


def install_report(monkeypatch: pytest.MonkeyPatch, memory_report: Any) -> None:
    module: Any = ModuleType("quire.startup.cache_plan")
    module.memory_report = memory_report
    monkeypatch.setitem(sys.modules, "quire.startup.cache_plan", module)


class Report:
    def lines(self) -> list[str]:
        return ["weights  98 MiB", "cache    1 GiB"]

    def to_json(self) -> dict[str, int]:
        return {"weights": 98}


def run_doctor(*argv: str) -> int:
    parser = ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    return doctor.run(parser.parse_args(["doctor", *argv]))


def test_json_is_one_object_with_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    install_report(monkeypatch, lambda config: Report())
    (tmp_path / "quire" / "builtin").mkdir(parents=True)
    (tmp_path / "quire" / "builtin" / "a.gguf").write_bytes(b"12345")
    (tmp_path / "quire" / "builtin" / "a.gguf.stamp").write_bytes(b"x")
    (tmp_path / "quire" / "hub" / "o--n" / "c0ffee").mkdir(parents=True)
    (tmp_path / "quire" / "hub" / "o--n" / "c0ffee" / "w.safetensors.part").write_bytes(b"12")
    run_doctor("--json", "--depth", "2", "--hub-token", "s3cret")
    out = capsys.readouterr().out
    report = json.loads(out)
    parts = {"versions", "machine", "devices", "gpu", "cpu_kernels", "cache", "config", "formats", "model", "missing"}
    assert set(report) == parts
    assert report["versions"]["quire"] == quire.__version__
    assert report["machine"]["num_usable_cores"] >= 1
    assert report["cache"]["models"] == [
        {"name": os.path.join("builtin", "a.gguf"), "bytes": 5, "complete": True},
        {"name": os.path.join("hub", "o--n"), "bytes": 2, "complete": False},
    ]
    assert {"name": "depth", "value": 2, "source": "--depth"} in report["config"]
    assert report["model"] == {"name": "smollm2", "ok": True, "lines": Report().lines(), "plan": {"weights": 98}}
    assert "s3cret" not in out


def test_the_model_is_never_fetched(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def memory_report(config: Config) -> None:
        assert config.model.offline
        raise QuireError("offline", "smollm2 is not on this machine yet.", "Run `quire pull smollm2`.")

    install_report(monkeypatch, memory_report)
    run_doctor()
    out = capsys.readouterr().out
    assert "smollm2 is not on this machine yet." in out
    assert "Run `quire" not in out
    assert "quire pull smollm2" in out.partition("Missing")[2]


def test_missing_packages_are_named_with_the_command_that_brings_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "quire.llm", None)
    monkeypatch.setattr(doctor, "installed_version", lambda name: None if name == "torch" else "1.0")
    assert run_doctor() == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "unknown without torch" in text
    assert "No memory plan for smollm2" in text
    assert "pip install 'torch>=2.11,<=2.13.0'" in text


def test_a_broken_torch_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda name: "1.0")
    devices, trouble = doctor.examine_devices()
    assert devices == [] and "can't be imported" in trouble


def test_nothing_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install_report(monkeypatch, lambda config: Report())
    monkeypatch.setattr(doctor, "installed_version", lambda name: "1.0")
    monkeypatch.setattr(doctor, "has_nvidia_driver", lambda: False)
    monkeypatch.setattr(doctor, "examine_devices", lambda: ([{"device": "cpu", "threads": 2}], ""))
    assert run_doctor() == 0
    out = capsys.readouterr().out
    assert "Nothing is missing" in out
    assert "cache    1 GiB" in out


def test_a_model_that_is_nowhere_is_no_good_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def memory_report(config: Config) -> None:
        raise QuireError("unknown_model", "There is no model named 'nodir'.", "Give a folder.")

    install_report(monkeypatch, memory_report)
    assert run_doctor("--model", "nodir") == 1
    out = capsys.readouterr().out
    assert "There is no model named 'nodir'." in out and "Nothing is missing" not in out


def test_a_gpu_wants_triton_and_a_driver_wants_a_cuda_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_nvidia_driver", lambda: True)
    versions = {package.name: "1.0" for package in PACKAGES} | {"triton": None}
    report = {"versions": versions, "devices": [{"device": "cpu"}], "model": {"ok": True}}
    assert ["CUDA build" in item["how"] for item in doctor.find_missing(report, "")] == [True]
    report["devices"] = [{"device": "cuda:0"}]
    assert [item["how"] for item in doctor.find_missing(report, "")] == ["pip install triton"]


def test_package_ranges_are_those_of_the_project() -> None:
    project = tomllib.loads((Path(quire.__file__).parent.parent / "pyproject.toml").read_text())["project"]
    ours = [package.install for package in PACKAGES if package.required or package.name == "uvloop"]
    assert ours == [requirement.partition(";")[0] for requirement in project["dependencies"]]
    assert "uvloop>=0.21; sys_platform != 'win32'" in project["dependencies"]


def test_a_plan_that_fails_does_not_end_the_doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def memory_report(config: Config) -> None:
        raise RuntimeError("surprise")

    install_report(monkeypatch, memory_report)
    run_doctor()
    assert "RuntimeError: surprise." in capsys.readouterr().out


def test_it_draws_without_rich_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install_report(monkeypatch, lambda config: Report())
    report = doctor.examine(Config())
    for name in ("rich", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    doctor.draw(report)
    out = capsys.readouterr().out
    assert "\nSettings\n   model  smollm2  default\n" in out
    assert "weights  98 MiB" in out


# -- the machine


def make_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MEMINFO = "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  800 kB\n"


def test_a_plain_machine(tmp_path: Path) -> None:
    make_files(tmp_path, {"proc/cpuinfo": "processor : 0\nmodel name\t: Fast One\n", "proc/meminfo": MEMINFO})
    machine = read_machine(tmp_path)
    assert (machine.cpu, machine.memory_total, machine.memory_available) == ("Fast One", 1_024_000, 819_200)
    assert 1 <= machine.num_usable_cores <= machine.num_cores


def test_the_tightest_limit_of_nested_groups_holds(tmp_path: Path) -> None:
    make_files(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/cpu.max": "100000 100000\n",
            "sys/fs/cgroup/outer/inner/cpu.max": "max 100000\n",
            "sys/fs/cgroup/outer/memory.max": "500000\n",
            "sys/fs/cgroup/outer/memory.current": "300000\n",
            "sys/fs/cgroup/outer/memory.stat": "anon 1\ninactive_file 100000\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/inner/memory.current": "1\n",
        },
    )
    machine = read_machine(tmp_path)
    assert machine.num_usable_cores == 1
    assert (machine.memory_total, machine.memory_available) == (500_000, 300_000)


def test_limits_of_the_older_kind(tmp_path: Path) -> None:
    make_files(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "600000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "100000\n",
        },
    )
    machine = read_machine(tmp_path)
    assert machine.num_usable_cores == 1
    assert (machine.memory_total, machine.memory_available) == (600_000, 500_000)


def test_a_system_without_such_files(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert machine.memory_total is None and machine.cpu


NVIDIA = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)\n"


def test_the_driver_version_is_read(tmp_path: Path) -> None:
    assert nvidia_driver_version(tmp_path) is None
    place = tmp_path / "proc/driver/nvidia"
    place.mkdir(parents=True)
    (place / "version").write_text(NVIDIA)
    assert nvidia_driver_version(tmp_path) == "580.95.05"


def test_a_gpu_without_torch_is_shown_with_what_is_in_the_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install_report(monkeypatch, lambda config: Report())
    assert doctor.examine_gpu(Config(), []) is None, "no GPU, no section"
    monkeypatch.setattr(doctor, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(doctor, "nvidia_driver_version", lambda: "470.1")
    run_doctor()
    shown = capsys.readouterr().out
    assert "470.1" in shown and "not usable" in shown and "FlashAttention" in shown


def test_kernels_are_shown_with_their_reasons() -> None:
    kernels = [
        {"op": "norm", "implementation": "triton", "why": "trial passed"},
        {"op": "attention", "implementation": "torch", "why": "the Triton kernel failed (PTXASError)"},
    ]
    libraries = [
        {"name": "FlashAttention", "installed": "2.8.3", "why": "not used for prefill (400 TFLOP/s, our own 530)"},
        {"name": "FlashInfer", "installed": None, "why": "not used: not installed"},
    ]
    gpu = {"driver": "580", "cuda": "13.0", "triton": "3.6.0", "trouble": None, "kernels": kernels,
           "libraries": libraries}  # fmt: skip
    rows = doctor._gpu_rows(gpu)
    assert ("op: attention", "torch", "the Triton kernel failed (PTXASError)") in rows
    assert ("FlashAttention", "2.8.3, not used for prefill (400 TFLOP/s, our own 530)") in rows
    assert ("FlashInfer", "not installed") in rows


def test_missing_cpu_kernels_are_named_with_a_way_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine_native", lambda: {"isa": None, "trouble": "they were not built"})
    install_report(monkeypatch, lambda config: Report())
    run_doctor("--json")
    missing = json.loads(capsys.readouterr().out)["missing"]
    found = next(item for item in missing if "native CPU kernels" in item["what"])
    assert "they were not built" in found["what"] and "g++" in found["how"] and not found["required"]
