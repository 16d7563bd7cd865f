"""Compiles the C++ kernels into one shared library: in `setup.py` for a package build, in `make native` in place.

It also runs as a script (`python quire/kernels/native/building.py`) and imports nothing of the package, so that a build
needs only a C++ compiler. Each instruction set is a source file in `src/isa` with its own flags; one is chosen when the
library is opened.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = FOLDER / "src"
LIBRARY = "libquire.so"  # beside this file; ctypes loads it by path, so the suffix is the same everywhere
X86_FLAGS = {
    "isa_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "isa_avx512.cpp": [
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mavx512vnni",
        "-mavx2",
        "-mfma",
        "-mf16c",
        "-Wno-uninitialized",
        "-Wno-maybe-uninitialized",
    ],
}
ARM_FLAGS = {
    "isa_dotprod.cpp": ["-march=armv8.2-a+dotprod"],
    "isa_i8mm.cpp": ["-march=armv8.2-a+dotprod+i8mm"],
}
# Without -ffp-contract=off the compiler chooses where to fuse multiply-adds, and two instances of one template could
# differ in the last bit.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
]


class BuildError(Exception):
    """The library can't be built; the message is one line."""


def source_digest() -> str:
    """Returns a digest of the sources, compiled into the library so that a stale library is not used."""
    digest = hashlib.sha256()
    for path in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> str | None:
    return next(
        (found for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name and (found := shutil.which(name))),
        None,
    )


def isa_flags(machine: str) -> dict[str, list[str]]:
    """Returns the flags of each instruction set's source file, for a machine as `platform.machine` names it."""
    if machine.lower() in ("x86_64", "amd64"):
        return X86_FLAGS
    return ARM_FLAGS if machine.lower() in ("aarch64", "arm64") else {}


def build(target: Path, compiler: str | None = None, machine: str | None = None) -> None:
    """Compiles all sources into `target`; raises BuildError if that fails. `compiler`, `machine`: of another machine
    that is compiled for; None: this one's."""
    compiler = compiler or find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler was found (c++, g++ or clang++)")
    flags_of = isa_flags(machine or platform.machine())
    with tempfile.TemporaryDirectory() as folder:

        def compile_one(source: Path) -> str:
            out = str(Path(folder) / f"{source.stem}.o")
            extra = flags_of.get(source.name, [])
            defined = f'-DQUIRE_SOURCES="{source_digest()}"'
            _run([compiler, *FLAGS, *extra, f"-I{SOURCES}", defined, "-c", str(source), "-o", out])
            return out

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(compile_one, sorted(SOURCES.rglob("*.cpp"))))
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(".new")
        _run([compiler, "-shared", "-pthread", "-o", str(fresh), *objects])
        fresh.replace(target)  # atomic: processes that have the old library loaded keep its inode


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")


if __name__ == "__main__":
    try:
        build(FOLDER / LIBRARY)
    except BuildError as error:
        sys.exit(f"The native kernels could not be built: {error}")
