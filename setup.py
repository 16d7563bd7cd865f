"""Builds the native CPU kernels into the package; pyproject.toml has the rest of the configuration.

Without a C++ compiler the package installs without them: the CPU then runs plain torch, and `quire doctor` reports it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NAME = "quire.kernels.native.libquire"


def load_building() -> ModuleType:
    """Imports the build module of the kernels without importing the package."""
    path = Path(__file__).parent / "quire/kernels/native/building.py"
    spec = importlib.util.spec_from_file_location("quire_building", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildNative(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))  # loaded by ctypes, so its name has no Python version

    def build_extension(self, ext: Extension) -> None:
        building = load_building()
        try:
            building.build(Path(self.get_ext_fullpath(ext.name)).absolute())
        except building.BuildError as error:
            print(f"warning: the native kernels are left out: {error}", file=sys.stderr)
            raise CompileError(str(error)) from error  # the extension is optional: setuptools only warns


setup(ext_modules=[Extension(NAME, sources=[], optional=True)], cmdclass={"build_ext": BuildNative})
