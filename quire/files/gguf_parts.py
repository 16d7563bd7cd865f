"""Which GGUF files belong together, by name: the parts of a split model (`name-00001-of-00003.gguf`) and vision parts.

`source` and `hub` choose files with it; `gguf` joins the parts as it opens the first. The first part has the metadata;
tensors may lie in any part, and each tensor lies in one part as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from quire.types import QuireError

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
MAX_PARTS = 10_000
FETCH_AGAIN = "Fetch all parts of the model again."


def list_parts(name: str) -> list[str]:
    """Returns the file names of all parts, given that of any of them; a name that is not one of a part is its own."""
    match = _PART.fullmatch(name)
    count = int(match["count"]) if match else 1
    if match is None or not 1 <= int(match["number"]) <= count <= MAX_PARTS:
        return [name]
    ending = name[match.end("count") :]
    return [f"{match['stem']}-{number:05d}-of-{match['count']}{ending}" for number in range(1, count + 1)]


def is_vision_part(name: str) -> bool:
    """Whether a GGUF file is, by its name, what llama.cpp calls mmproj: the vision or audio tower beside a model."""
    return "mmproj" in name.lower()


def first_part(path: Path) -> Path:
    """Returns the first part of the model that `path` belongs to; raises `missing_shard` if any part is missing."""
    paths = [path.with_name(name) for name in list_parts(path.name)]
    missing = [part.name for part in paths if not part.is_file()]
    if len(paths) > 1 and missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        what = f"{path} is part of a model in {len(paths)} files, and {missing[0]}{more} is not beside it."
        raise QuireError("missing_shard", what, FETCH_AGAIN, param="model")
    return paths[0]


def models_among(names: Iterable[str]) -> list[str]:
    """Returns the GGUF files that are models: one name for all parts of a split one, and no vision parts."""
    ggufs = (name for name in names if name.lower().endswith(".gguf"))
    return sorted({list_parts(name)[0] for name in ggufs if not is_vision_part(name)})
