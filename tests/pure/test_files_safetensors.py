"""Safetensors headers and shard lists: good ones are read, every lie is named."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.files.safetensors import check_safetensors, choose_shards, list_shards
from quire.types import QuireError

HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    "c": {"dtype": "I8", "shape": [0, 5], "data_offsets": [26, 26]},
}


def build(header: Any = None, data: bytes = bytes(26)) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(HEADER if header is None else header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def with_entry(**changes: Any) -> bytes:
    return build({**HEADER, "a": {**HEADER["a"], **changes}})


def test_reads_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(build())
    entries = check_safetensors(path)
    start = path.stat().st_size - 26
    assert entries == {
        "a": ("F32", (2, 3), start, start + 24),
        "b": ("BF16", (), start + 24, start + 26),
        "c": ("I8", (0, 5), start + 26, start + 26),
    }


def test_agrees_with_the_library(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "model.safetensors"
    arrays: dict[str, Any] = {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "y": np.ones(5, np.int64),
        "z": np.zeros(3, np.bool_),
    }
    library.save_file(arrays, path)
    content = path.read_bytes()
    for name, (dtype, shape, start, end) in check_safetensors(path).items():
        assert shape == arrays[name].shape and content[start:end] == arrays[name].tobytes(), dtype


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "only 0 bytes"),
        (b"\x01\x02", "only 2 bytes"),
        (struct.pack("<Q", 1 << 40) + b"{}", "more than the format allows"),
        (struct.pack("<Q", 100) + b"{}", "claims 100 bytes, but the file has only 10"),
        (build(b"{not json"), "not valid JSON"),
        (build(b"\xff\xfe\x00"), "not valid JSON"),
        (build(b"[" * 100_000), "not valid JSON"),
        (build(b"[]"), "not a JSON object"),
        (build(b'{"a": 1, "a": 2}'), "twice"),
        (build({"a": 5}), "not an object"),
        (build({"__metadata__": {"n": 5}}, b""), "not a map of strings"),
        (with_entry(dtype="F33"), "unknown type 'F33'"),
        (with_entry(dtype=["F32"]), "unknown type"),
        (with_entry(shape=[2, -3]), "shape [2, -3]"),
        (with_entry(shape=[2, 3.0]), "shape"),
        (with_entry(shape=[True, 6]), "shape"),
        (with_entry(shape=[2, 4]), "takes 32 bytes but lies at 0 to 24"),
        (with_entry(data_offsets=[24, 0]), "lies at 24 to 0"),
        (with_entry(data_offsets=[0, 1 << 70]), "offsets"),
        (with_entry(data_offsets=[2, 26]), "belong to none"),
        (build({**HEADER, "d": {"dtype": "I8", "shape": [4], "data_offsets": [22, 26]}}), "overlaps"),
        (build(data=bytes(25)), "a broken download"),
        (build(data=bytes(30)), "4 bytes after the last tensor"),
    ],
)
def test_lies_are_named(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(QuireError) as caught:
        check_safetensors(path)
    assert caught.value.code == "bad_safetensors"
    assert str(path) in caught.value.what and expected in caught.value.what and len(str(caught.value)) < 1000


def test_mutations_pass_or_are_refused(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    whole, path = build(), tmp_path / "mutant.safetensors"
    for _ in range(600):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 2, 4))):
            content[rng.randrange(len(content))] = rng.choice((rng.randrange(256), ord("9"), ord("-"), ord("[")))
        path.write_bytes(content[: rng.choice((len(content), rng.randrange(len(content))))])
        try:
            check_safetensors(path)
        except QuireError as error:
            assert error.code == "bad_safetensors"


def write_index(folder: Path, names: list[Any]) -> None:
    weight_map = {f"t{i}": name for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_from_an_index(tmp_path: Path) -> None:
    names = ["model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"]
    write_index(tmp_path, names * 2)
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "consolidated.safetensors").touch()
    assert [path.name for path in list_shards(tmp_path)] == sorted(names)
    (tmp_path / names[0]).unlink()
    with pytest.raises(QuireError, match=r"lacks its weight file model-00002-of-00002\.safetensors"):
        list_shards(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "a\\b.safetensors", "x.bin", 5]
)
def test_an_index_cannot_lead_elsewhere(tmp_path: Path, name: Any) -> None:
    write_index(tmp_path, [name])
    with pytest.raises(QuireError) as caught:
        list_shards(tmp_path)
    assert caught.value.code == "bad_safetensors"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"weight_map": {}}', '{"weight_map": []}', "[" * 100_000])
def test_broken_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(QuireError, match="not a usable weight index"):
        list_shards(tmp_path)


def test_shards_without_an_index(tmp_path: Path) -> None:
    assert list_shards(tmp_path) == []
    assert choose_shards(["model.safetensors", "other.safetensors", "x.bin"]) == ["model.safetensors"]
    assert choose_shards(["consolidated.safetensors", "weights.safetensors"]) == ["weights.safetensors"]
    assert choose_shards(["consolidated.safetensors"]) == ["consolidated.safetensors"]
    assert choose_shards(["adapter_model.safetensors"]) == []
    (tmp_path / "model-00002-of-00003.safetensors").touch()
    with pytest.raises(QuireError, match="lacks its weight file model-00001-of-00003"):
        list_shards(tmp_path)
