"""The GGUF reader: what it reads from a good file, and that no bad one gets past it or brings it down."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.files import gguf as reader
from quire.files.ggml_types import GGMLType
from quire.files.gguf import open_gguf
from quire.types import QuireError


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, value_type: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", value_type) + value


def array(item_type: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", item_type, count) + items


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


METADATA = (
    entry("general.architecture", 8, text("llama")),
    entry("a.u8", 0, b"\xff"),
    entry("a.i8", 1, b"\xff"),
    entry("a.u16", 2, struct.pack("<H", 65535)),
    entry("a.i16", 3, struct.pack("<h", -2)),
    entry("a.u32", 4, struct.pack("<I", 1 << 31)),
    entry("a.i32", 5, struct.pack("<i", -3)),
    entry("a.f32", 6, struct.pack("<f", 0.5)),
    entry("a.bool", 7, b"\x01"),
    entry("a.u64", 10, struct.pack("<Q", 1 << 63)),
    entry("a.i64", 11, struct.pack("<q", -4)),
    entry("a.f64", 12, struct.pack("<d", 0.25)),
    entry("a.tokens", 9, array(8, 3, text("<s>") + text("Ġé") + text(""))),
    entry("a.scores", 9, array(6, 2, struct.pack("<2f", 1.5, -2.5))),
    entry("a.flags", 9, array(7, 2, b"\x00\x01")),
    entry("a.none", 9, array(5, 0, b"")),
)
TENSORS = (tensor("embed", (32, 2), int(GGMLType.Q8_0), 0), tensor("norm", (3,), int(GGMLType.F32), 96))
DATA = bytes(range(68)) + bytes(28) + np.array([1, 2, 3], "<f4").tobytes() + bytes(20)


def build(
    metadata: tuple[bytes, ...] = METADATA,
    tensors: tuple[bytes, ...] = TENSORS,
    data: bytes = DATA,
    version: int = 3,
    num_tensors: int | None = None,
    num_metadata: int | None = None,
) -> bytes:
    counts = (
        (len(tensors) if num_tensors is None else num_tensors),
        (len(metadata) if num_metadata is None else num_metadata),
    )
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(metadata) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data


def reason(tmp_path: Path, content: bytes) -> str:
    """Why the file is refused."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(QuireError) as caught:
        open_gguf(path)
    assert caught.value.code == "bad_gguf"
    assert str(path) in caught.value.what and "\n" not in str(caught.value)
    return caught.value.what


@pytest.mark.parametrize("version", [2, 3])
def test_reads_every_kind_of_value(tmp_path: Path, version: int) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(build(version=version))
    file = open_gguf(path)
    assert file.version == version
    assert file.metadata == {
        "general.architecture": "llama",
        "a.u8": 255,
        "a.i8": -1,
        "a.u16": 65535,
        "a.i16": -2,
        "a.u32": 1 << 31,
        "a.i32": -3,
        "a.f32": 0.5,
        "a.bool": True,
        "a.u64": 1 << 63,
        "a.i64": -4,
        "a.f64": 0.25,
        "a.tokens": ["<s>", "Ġé", ""],
        "a.scores": [1.5, -2.5],
        "a.flags": [False, True],
        "a.none": [],
    }
    assert file.metadata["a.bool"] is True and file.metadata["a.flags"][1] is True
    embed, norm = file.tensors["embed"], file.tensors["norm"]
    assert (embed.shape, embed.type, embed.num_elements) == ((2, 32), GGMLType.Q8_0, 64)
    assert embed.data.tobytes() == bytes(range(68)) and not embed.data.flags.writeable
    assert norm.shape == (3,) and norm.data.view("<f4").tolist() == [1, 2, 3]


def test_agrees_with_the_reference_writer(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_token_list(["a", "b", "ü"])
    writer.add_array("llama.sizes", [1, 2, 3])
    weights = np.arange(96, dtype=np.float32).reshape(3, 32)
    writer.add_tensor("w", weights)
    raw = gguf.quantize(weights, gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("q", raw, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(path)
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b", "ü"]
    assert file.metadata["llama.sizes"] == [1, 2, 3]
    assert file.tensors["w"].shape == file.tensors["q"].shape == (3, 32)
    assert file.tensors["w"].data.tobytes() == weights.tobytes()
    assert file.tensors["q"].type is GGMLType.Q4_1 and file.tensors["q"].data.tobytes() == raw.tobytes()


def test_type_table_agrees_with_the_reference() -> None:
    constants = pytest.importorskip("gguf.constants")
    for member in GGMLType:
        if member is GGMLType.Q8_1:  # never stored; the package counts its two scales as float32, the format as float16
            continue
        known = constants.GGML_QUANT_SIZES.get(int(member))
        if known is not None:
            assert (member.block_size, member.block_bytes) == known, member.name


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "0 bytes"),
        (b"GGUF" + bytes(8), "12 bytes"),
        (b"PK\x03\x04" + bytes(64), "begins with"),
        (build(version=1), "version is 1"),
        (build(version=4), "version is 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (build(num_tensors=1 << 62), f"claims {1 << 62} tensors"),
        (build(num_metadata=1 << 62), f"claims {1 << 62} metadata entries"),
        (build(metadata=(entry("k", 13, b""),)), "unknown value type 13"),
        (build(metadata=(entry("k", 7, b"\x02"),)), "bool with the value 2"),
        (build(metadata=(entry("k", 9, array(7, 1, b"\x05")),)), "bools with the value 5"),
        (build(metadata=(entry("k", 9, array(9, 1, array(0, 1, b"x"))),)), "array of arrays"),
        (build(metadata=(entry("k", 9, array(77, 1, b"x")),)), "unknown value type 77"),
        (build(metadata=(entry("k", 9, array(0, 1 << 60, b"x")),)), "cannot fit"),
        (build(metadata=(entry("k", 9, array(8, 1 << 40, b"x")),)), "cannot fit"),
        (build(metadata=(entry("k", 9, array(8, 1, struct.pack("<Q", 1 << 63))),)), "past the end"),
        (build(metadata=(entry("k", 9, array(8, 1, text(b"\xff"))),)), "not UTF-8"),
        (build(metadata=(entry("k", 8, struct.pack("<Q", 1 << 20)),)), "past the end"),
        (build(metadata=(entry("k", 8, struct.pack("<Q", 1 << 60)),)), f"claims {1 << 60} bytes"),
        (build(metadata=(entry("k", 8, text(b"\xc3")),)), "not UTF-8"),
        (build(metadata=(entry("k", 0, b"1"), entry("k", 0, b"2"))), "'k' appears twice"),
        (build(metadata=(entry("general.alignment", 4, struct.pack("<I", 0)),)), "alignment is 0"),
        (build(metadata=(entry("general.alignment", 4, struct.pack("<I", 24)),)), "alignment is 24"),
        (build(metadata=(entry("general.alignment", 8, text("32")),)), "alignment is '32'"),
        (build(tensors=(tensor("t", (4,), 0, 0), tensor("t", (4,), 0, 32))), "'t' appears twice"),
        (build(tensors=(tensor("t", (4,), 0, 0), tensor("u", (4,), 0, 0))), "'t' and 'u' overlap"),
        (build(tensors=(tensor("t", (16,), 0, 0), tensor("u", (4,), 0, 32))), "'t' and 'u' overlap"),
        (build(tensors=(tensor("t", (4,), 0, 8),)), "no multiple of the alignment"),
        (build(tensors=(tensor("t", (4,), 0, 1 << 40),)), "ends at byte"),
        (build(tensors=(tensor("t", (1 << 60, 1 << 60), 0, 0),)), "ends at byte"),
        (build(tensors=(tensor("t", (4,), 5, 0),)), "unknown type 5"),
        (build(tensors=(tensor("t", (33,), int(GGMLType.Q4_0), 0),)), "no multiple of Q4_0's 32"),
        (build(tensors=(tensor("t", (4, 0), 0, 0),)), "empty dimension"),
        (build(tensors=(tensor("t", (1, 1, 1, 1, 1), 0, 0),)), "claims 5 dimensions"),
        (build(data=DATA[:-21]), "ends at byte"),
    ],
)
def test_lies_are_named(tmp_path: Path, content: bytes, expected: str) -> None:
    assert expected in reason(tmp_path, content)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = build()
    for length in range(len(whole) - 20):  # the last 20 bytes are padding
        reason(tmp_path, whole[:length])


def test_missing_files_and_folders(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(QuireError, match=r"cannot be opened|not a plain file"):
            open_gguf(path)


def test_lying_array_costs_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that the file could hold but no model needs stops at the limit, before anything is allocated."""
    monkeypatch.setattr(reader, "MAX_ARRAY_ITEMS", 1000)
    content = build(metadata=(entry("k", 9, array(0, 1 << 20, bytes(1 << 20))),))
    tracemalloc.start()
    try:
        assert "more than 1000 items" in reason(tmp_path, content)
        assert tracemalloc.get_traced_memory()[1] < 1 << 19
    finally:
        tracemalloc.stop()


def _flip(rng: random.Random, content: bytearray) -> None:
    content[rng.randrange(len(content))] = rng.choice((0, 1, 7, 8, 9, 0x7F, 0xFF, rng.randrange(256)))


def _number(rng: random.Random, content: bytearray) -> None:
    size = rng.choice((4, 8))
    start = rng.randrange(len(content) - size)
    value = rng.choice((0, 1, 2, 31, 1 << 15, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1, rng.randrange(1 << 64)))
    content[start : start + size] = (value % (1 << 8 * size)).to_bytes(size, "little")


def _cut(rng: random.Random, content: bytearray) -> None:
    start = rng.randrange(len(content))
    del content[start : start + rng.randrange(1, 64)]


def _insert(rng: random.Random, content: bytearray) -> None:
    start = rng.randrange(len(content))
    content[start:start] = rng.randbytes(rng.randrange(1, 64))


def test_mutations_open_or_are_refused(tmp_path: Path) -> None:
    """Nothing but a file or a QuireError ever comes back, and what opens can be read to its last byte."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    whole, path = build(), tmp_path / "mutant.gguf"
    moves: list[Callable[[random.Random, bytearray], Any]] = [_flip, _number, _cut, _insert]
    num_opened = 0
    for _ in range(1500):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 5))):
            rng.choice(moves)(rng, content)
        path.write_bytes(content)
        try:
            file = open_gguf(path)
        except QuireError as error:
            assert error.code == "bad_gguf"
            continue
        num_opened += 1
        for item in file.tensors.values():
            assert item.data.size == item.type.num_bytes(item.num_elements)
            item.data.sum()
    assert 0 < num_opened < 1500
