"""The finished tensors of a run, so that an interrupted one goes on where it stopped and writes the same bytes.

They lie in a folder beside the result, one file a tensor, written under another name and renamed when whole. The folder
belongs to one set of options: another one begins anew.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.types import QuireError

DESCRIPTION = "run.json"


class Parts:
    """The folder of a run."""

    def __init__(self, out: Path, description: dict[str, Any]):
        self.folder = out.with_name(f"{out.name}.parts")
        self._places: dict[str, int] = {}
        self.num_kept = 0
        known = self.folder / DESCRIPTION
        wanted = json.dumps(description, sort_keys=True, indent=1)
        if known.exists() and known.read_text() == wanted:
            return
        if self.folder.exists():
            shutil.rmtree(self.folder)
        with naming_full_disks(out):
            self.folder.mkdir(parents=True)
            write_whole(known, wanted.encode())

    def keep(self, name: str, make: Callable[[], dict[str, Tensor]]) -> Path:
        """Returns the file with a tensor's parts, which `make` computes unless an earlier run has kept them."""
        place = self._places.setdefault(name, len(self._places))
        path = self.folder / f"{place:06d}.safetensors"
        if path.exists():
            self.num_kept += 1
            return path
        made = {key: tensor.contiguous() for key, tensor in make().items()}
        with naming_full_disks(self.folder):
            partial = path.with_suffix(".new")
            save_file(made, partial)
            os.replace(partial, path)
        return path

    def tensors(self, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """As `keep`, and returns the tensors."""
        return load_file(self.keep(name, make))

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file under another name and renames it, so that it is never there in part."""
    partial = path.with_name(f"{path.name}.new")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


@contextmanager
def naming_full_disks(out: Path) -> Iterator[None]:
    """Turns an error of the disk into one line that says what to do."""
    try:
        yield
    except OSError as error:
        what = f"{out} can't be written: {error.strerror or error}."
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "Free some space and run the same command again: it goes on where it stopped." if full else "Check it."
        raise QuireError("cannot_write", what, hint, param="out") from error
    except Exception as error:  # safetensors raises its own type for what the system said
        if "No space left" not in str(error):
            raise
        what = f"{out} can't be written: no space is left on its disk."
        hint = "Free some space and run the same command again: it goes on where it stopped."
        raise QuireError("cannot_write", what, hint, param="out") from error
