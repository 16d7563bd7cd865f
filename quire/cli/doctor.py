"""`quire doctor`: the machine, the packages, the model store, the effective settings, and a model's memory plan.

`examine` collects everything into one JSON object, which `--json` prints and the tables show. Nothing is fetched or
changed; a missing item is reported with the command that installs or fetches it.
"""

from __future__ import annotations

import platform
import shlex
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import quire
from quire.cli.doctor_formats import doctor_formats
from quire.cli.model_argument import add_positional_model, take_positional_model
from quire.cli.output import format_memory, waiting, write_json
from quire.config import Config, knobs
from quire.config_build import (
    ENGINE_TABLES,
    add_config_flags,
    config_from_args,
    describe_config,
    override_config,
)
from quire.machine import PACKAGES, has_nvidia_driver, installed_version, nvidia_driver_version, read_machine
from quire.types import QuireError

LIBRARIES = {"flash-attn-3": "FlashAttention-3", "flash-attn": "FlashAttention", "flashinfer-python": "FlashInfer"}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        usage="quire doctor [MODEL] [options]",
        help="show what this machine has and what is missing",
        description="Show the machine, packages, settings and memory plan. Fetches nothing.",
    )
    add_positional_model(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_flags(parser, groups=ENGINE_TABLES)


def run(args: Namespace) -> int:
    config = config_from_args(take_positional_model(args))
    with waiting("Examining the machine …"):
        report = examine(config)
    if args.json:
        write_json(report)
    else:
        draw(report)
    return 1 if any(item["required"] for item in report["missing"]) or _is_broken(report["model"]) else 0


# ---------------------------------------------------------------------------------------------------------------------
# Examination


def examine(config: Config) -> dict[str, Any]:
    machine = read_machine()
    packages = {package.name: installed_version(package.name) for package in PACKAGES}
    devices, device_trouble = examine_devices()
    report = {
        "versions": {"quire": quire.__version__, "python": platform.python_version(), **packages},
        "machine": asdict(machine),
        "devices": devices,
        "gpu": examine_gpu(config, devices),
        "cpu_kernels": examine_native(),
        "cache": examine_store(),
        "config": [setting._asdict() for setting in describe_config(config)],
        "model": doctor_model_plan(config),
        "formats": doctor_formats(config),
    }
    return {**report, "missing": list(find_missing(report, device_trouble))}


def examine_devices() -> tuple[list[dict[str, Any]], str]:
    """Return the devices torch can use, and an error text if they could not be listed."""
    try:
        import torch
    except Exception as error:  # a broken installation raises any error, and the report must still be made
        broken = installed_version("torch") is not None
        return [], f"torch is installed but can't be imported: {error}" if broken else ""
    devices: list[dict[str, Any]] = [{"device": "cpu", "threads": torch.get_num_threads()}]
    try:
        if torch.backends.mps.is_available():
            total = torch.mps.recommended_max_memory()
            free = total - torch.mps.driver_allocated_memory()
            named = {"device": "mps", "name": "Apple GPU", "capability": "Metal"}
            devices.append({**named, "memory_total": total, "memory_free": free})
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            free, total = torch.cuda.mem_get_info(index)
            major, minor = torch.cuda.get_device_capability(index)
            name = torch.cuda.get_device_name(index)
            facts = {"name": name, "capability": f"{major}.{minor}", "memory_total": total, "memory_free": free}
            devices.append({"device": f"cuda:{index}", **facts})
    except RuntimeError as error:
        return devices, f"torch can't query the GPU: {error}"
    return devices, ""


def examine_gpu(config: Config, devices: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the GPU's driver, libraries, problems, and the kernel of each op; None on a machine without a GPU."""
    has_gpu = any(device["device"].startswith("cuda") for device in devices)
    if not has_gpu and not has_nvidia_driver():
        return None
    found: dict[str, Any] = {"driver": nvidia_driver_version(), "cuda": None, "trouble": None, "kernels": []}
    found["triton"] = installed_version("triton")
    versions = {name: installed_version(package) for package, name in LIBRARIES.items()}
    found["libraries"] = [{"name": name, "installed": version, "why": "not used"} for name, version in versions.items()]
    try:
        import torch

        from quire.kernels.explain import explain_libraries, explain_ops
        from quire.kernels.table import LIBRARY_NAMES
        from quire.startup.defaults import cuda_trouble

        found["cuda"] = torch.version.cuda
        found["trouble"] = cuda_trouble()
        if found["trouble"] is None:
            found["kernels"] = explain_ops(torch.device("cuda", 0), config.engine.kernels, config.engine.deterministic)
            if any(versions.values()) or config.engine.kernels in LIBRARY_NAMES:
                found["libraries"] = explain_libraries(torch.device("cuda", 0), config.engine.kernels)
            torch.cuda.empty_cache()  # the memory plan comes next and counts torch's cached memory as used
    except Exception as error:  # a broken driver raises any error, and the report must still be made
        found["trouble"] = f"{type(error).__name__}: {error}"
    return found


def examine_native() -> dict[str, Any]:
    """Return the instruction set of the native CPU kernels, or why they can't be used."""
    from quire.kernels.native.library import NotBuilt, open_native

    try:
        return {"isa": open_native(None, 1).isa, "trouble": ""}
    except NotBuilt as error:
        return {"isa": None, "trouble": str(error)}


def examine_store() -> dict[str, Any]:
    from quire.files.store import cache_dir

    try:
        folder = cache_dir()
    except QuireError as error:
        return {"path": None, "trouble": str(error), "models": []}
    return {"path": str(folder), "models": list(_stored_models(folder))}


def _stored_models(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield one entry per built-in file and per hub model, unfinished downloads included."""
    from quire.files.store import file_sizes

    for path in sorted([*folder.glob("builtin/*"), *folder.glob("hub/*")]):
        if path.suffix == ".stamp":
            continue
        sizes = file_sizes(path)
        complete = bool(sizes) and not any(file.suffix == ".part" for file in sizes)
        yield {"name": str(path.relative_to(folder)), "bytes": sum(sizes.values()), "complete": complete}


def doctor_model_plan(config: Config) -> dict[str, Any]:
    """Return the memory plan of the model in `config`, or why there is none. Uses no network."""
    name = config.model.model
    try:
        from quire.startup.cache_plan import memory_report

        report = memory_report(override_config(config, {"offline": True}))
        return {"name": name, "ok": True, "lines": report.lines(), "plan": report.to_json()}
    except QuireError as error:
        code, why, hint = error.code, error.what, error.hint
    except ImportError as error:
        code, why, hint = "missing_package", f"{error}.", ""
    except Exception as error:  # one failed part must not cost the rest of the report
        code, why, hint = "failed", f"{type(error).__name__}: {error}.", ""
    if code == "offline" and not config.model.offline:  # this function set offline, not the user
        why, hint = f"{name} is not on this machine yet.", f"`quire pull {name}` fetches it."
    return {"name": name, "ok": False, "code": code, "why": why, "hint": hint}


def find_missing(report: Mapping[str, Any], device_trouble: str) -> Iterator[dict[str, Any]]:
    """Yield each missing item with the command that installs it; `required` items stop every model."""
    versions = report["versions"]
    has_gpu = any(device["device"].startswith("cuda") for device in report["devices"])
    for package in PACKAGES:
        if versions[package.name] is None and (package.required or has_gpu):
            what = f"Python package {package.name} ({package.why})"
            yield _missing(what, f"pip install {shlex.quote(package.install)}", required=package.required)
    if device_trouble:
        yield _missing(device_trouble, f"pip install --force-reinstall {shlex.quote(PACKAGES[0].install)}")
    if has_nvidia_driver() and not has_gpu and versions["torch"] is not None and not device_trouble:
        yield _missing("a torch that can use this machine's NVIDIA GPU", "install a CUDA build of torch")
    kernels = report.get("cpu_kernels", {"isa": "unknown"})
    if kernels["isa"] is None:
        from quire.kernels.native.library import HOW_TO_BUILD

        what = f"the native CPU kernels (plain torch runs without them): {kernels['trouble']}"
        yield _missing(what, HOW_TO_BUILD)
    model = report["model"]
    if not model["ok"] and model["code"] == "offline":
        yield _missing(f"the model {model['name']}", f"quire pull {shlex.quote(model['name'])}")


def _is_broken(model: Mapping[str, Any]) -> bool:
    """Return whether the model can't start. A model that only has to be fetched is not broken."""
    return not model["ok"] and model["code"] != "offline"


def _missing(what: str, how: str, required: bool = False) -> dict[str, Any]:
    return {"what": what, "how": how, "required": required}


# ---------------------------------------------------------------------------------------------------------------------
# Tables


@dataclass(frozen=True, slots=True)
class Section:
    """A titled table of the report."""

    title: str
    rows: list[tuple[str, ...]] = field(default_factory=list)
    alarming: bool = False


def sections(report: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the report as sections of rows."""
    yield Section("Machine", _machine_rows(report))
    if report["gpu"] is not None:
        yield Section("GPU", _gpu_rows(report["gpu"]))
    yield Section("Versions", [(name, version or "—") for name, version in report["versions"].items()])
    yield Section(f"Models in {report['cache']['path']}", _store_rows(report["cache"]))
    yield Section("Settings", [(s["name"], _shown(s), s["source"]) for s in report["config"]])
    model = report["model"]
    if model["ok"]:
        yield Section(f"Memory plan for {model['name']}", [(line,) for line in model["lines"]])
    else:
        reasons: list[tuple[str, ...]] = [(line,) for line in (model["why"], model["hint"]) if line]
        yield Section(f"No memory plan for {model['name']}", reasons, alarming=_is_broken(model))
    if report["formats"]["ok"]:
        yield Section("Formats of the chat template", [(note,) for note in report["formats"]["notes"]])
    if report["missing"]:
        yield Section("Missing", [(item["what"], item["how"]) for item in report["missing"]], alarming=True)
    elif model["ok"]:
        yield Section("Nothing is missing")


def draw(report: Mapping[str, Any]) -> None:
    """Print the sections with rich, or as plain text where rich is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        for section in sections(report):
            print(section.title, *("   " + "  ".join(row) for row in section.rows), "", sep="\n")
        return
    console = Console(highlight=False)
    for section in sections(report):
        grid = Table.grid(padding=(0, 2))
        grid.add_column(width=1)
        for row in section.rows:
            styles = ["cyan"] if len(row) > 1 else []
            cells = [Text(cell, style, overflow="fold") for cell, style in zip_longest(row, styles, fillvalue="")]
            grid.add_row("", *cells, style="dim" if row[-1] == "default" else "")
        console.print(Text(section.title, "bold yellow" if section.alarming else "bold"))
        console.print(grid)
        console.print()


def _machine_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    machine = report["machine"]
    cores = f"{machine['num_usable_cores']} usable"
    if machine["num_cores"] != machine["num_usable_cores"]:
        cores += f" of {machine['num_cores']}"
    rows: list[tuple[str, ...]] = [("system", machine["system"]), ("processor", machine["cpu"]), ("cores", cores)]
    if machine["memory_total"] is not None and machine["memory_available"] is not None:
        free, total = format_memory(machine["memory_available"]), format_memory(machine["memory_total"])
        rows.append(("memory", f"{free} available of {total}"))
    rows.append(("CPU kernels", report["cpu_kernels"]["isa"] or "plain torch"))
    gpus = [device for device in report["devices"] if device["device"] != "cpu"]
    for gpu in gpus:
        free, total = format_memory(gpu["memory_free"]), format_memory(gpu["memory_total"])
        rows.append((gpu["device"], f"{gpu['name']} ({gpu['capability']}), {free} free of {total}"))
    if not gpus:
        rows.append(("GPU", "none that torch can use" if report["devices"] else "unknown without torch"))
    return rows


def _gpu_rows(gpu: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("driver", gpu["driver"] or "none found"),
        ("CUDA of torch", gpu["cuda"] or "none"),
        ("Triton", gpu["triton"] or "not installed"),
    ]
    if gpu["trouble"]:
        rows.append(("not usable", gpu["trouble"]))
    rows += [(f"op: {kernel['op']}", kernel["implementation"], kernel["why"]) for kernel in gpu["kernels"]]
    for library in gpu["libraries"]:
        shown = "not installed" if library["installed"] is None else f"{library['installed']}, {library['why']}"
        rows.append((library["name"], shown))
    return rows


def _store_rows(store: Mapping[str, Any]) -> list[tuple[str, ...]]:
    if store["path"] is None:
        return [("none", store["trouble"])]
    rows: list[tuple[str, ...]] = []
    for model in store["models"]:
        rows.append((model["name"], format_memory(model["bytes"]) + ("" if model["complete"] else ", incomplete")))
    return rows or [("none yet", "the first `quire run` fetches its model")]


def _shown(setting: Mapping[str, Any]) -> str:
    value = setting["value"]
    if value is None:
        return knobs()[setting["name"]].none_word or ""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
