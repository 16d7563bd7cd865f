"""Split GGUF files: parts are joined, and none that is missing, swapped or strange gets past the reader."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from quire.files.ggml_types import GGMLType
from quire.files.gguf import open_gguf
from quire.files.gguf_parts import list_parts
from quire.types import QuireError
from tests.pure.test_files_gguf import build, entry, tensor, text


def part(number: int, count: int, names: tuple[str, ...], total: int = 3) -> bytes:
    """`number` from 0; tensors of 8 floats, each with its number in the part as values."""
    metadata = (
        entry("split.no", 2, struct.pack("<H", number)),
        entry("split.count", 2, struct.pack("<H", count)),
        entry("split.tensors.count", 5, struct.pack("<i", total)),
    )
    if number == 0:
        metadata = (entry("general.architecture", 8, text("llama")), *metadata)
    tensors = tuple(tensor(name, (8,), int(GGMLType.F32), 32 * place) for place, name in enumerate(names))
    return build(metadata, tensors, b"".join(struct.pack("<8f", *[place] * 8) for place in range(len(names))))


def write(folder: Path, *parts: bytes) -> list[Path]:
    paths = [folder / f"m-{number:05d}-of-{len(parts):05d}.gguf" for number in range(1, len(parts) + 1)]
    for path, content in zip(paths, parts, strict=True):
        path.write_bytes(content)
    return paths


def refusal(path: Path) -> QuireError:
    with pytest.raises(QuireError) as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value)
    return caught.value


def test_tensors_of_all_parts(tmp_path: Path) -> None:
    """As `gguf-split` writes them: the first part may have no tensor at all."""
    paths = write(tmp_path, part(0, 3, ()), part(1, 3, ("a", "b")), part(2, 3, ("c",)))
    file = open_gguf(paths[0])
    assert file.path == paths[0] and file.metadata["general.architecture"] == "llama"
    assert {name: found.data.view("<f4").tolist() for name, found in file.tensors.items()} == {
        "a": [0.0] * 8, "b": [1.0] * 8, "c": [0.0] * 8,
    }  # fmt: skip


def test_a_part_is_missing(tmp_path: Path) -> None:
    paths = write(tmp_path, part(0, 3, ("a",)), part(1, 3, ("b",)), part(2, 3, ("c",)))
    paths[1].unlink()
    error = refusal(paths[0])
    assert error.code == "missing_shard" and paths[1].name in error.what


def test_parts_in_another_order(tmp_path: Path) -> None:
    paths = write(tmp_path, part(0, 3, ("a",)), part(2, 3, ("b",)), part(1, 3, ("c",)))
    assert "part 3 of 3 by its metadata and part 2 of 3 by its name" in refusal(paths[0]).what
    paths = write(tmp_path, part(1, 3, ("b",)), part(0, 3, ("a",)), part(2, 3, ("c",)))
    assert "part 2 of 3 by its metadata and part 1 of 3 by its name" in refusal(paths[0]).what


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    paths = write(tmp_path, part(0, 2, ("a",), 2), part(1, 2, ("a",), 2))
    assert "repeats the tensor a" in refusal(paths[0]).what
    paths = write(tmp_path, part(0, 2, ("a",)), part(1, 2, ("b",)))
    assert "have 2 tensors, and its metadata says 3" in refusal(paths[0]).what
    paths = write(tmp_path, part(0, 2, ("a",), 2), build())
    assert "is not a part by its metadata" in refusal(paths[0]).what
    renamed = paths[0].rename(tmp_path / "m.gguf")
    assert "one of 2 parts by its metadata and one of 1 by its name" in refusal(renamed).what


def test_a_part_that_is_cut_short(tmp_path: Path) -> None:
    paths = write(tmp_path, part(0, 2, ("a",), 2), part(1, 2, ("b",), 2)[:-8])
    error = refusal(paths[0])
    assert error.code == "bad_gguf" and str(paths[1]) in error.what and "ends at byte" in error.what


def test_names_of_parts() -> None:
    assert list_parts("m-00002-of-00003.GGUF") == [f"m-0000{number}-of-00003.GGUF" for number in (1, 2, 3)]
    for name in ("m.gguf", "m-00004-of-00003.gguf", "m-00000-of-00003.gguf", "m-1-of-3.gguf", "m-00001-of-99999.gguf"):
        assert list_parts(name) == [name]
