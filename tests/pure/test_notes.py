"""Notes of what was tried: left whole or not at all, read back only by a start just like the one that left it, and by
nobody once they are damaged."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.config import Config
from quire.config_build import override_config
from quire.files.source import ModelFiles
from quire.startup import trial_notes as notes
from quire.startup.trial_notes import TrialNote, find_note

CARD = {"name": "NVIDIA H200", "uuid": "GPU-1", "major": "9", "cuda": "12.8"}
FILES = ModelFiles("folder", Path("/models/m"), "m", {"hidden_size": 64, "num_hidden_layers": 2})
DECIDED = {"product": True, "another": False}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(notes, "nvidia_driver_version", lambda: "580.95.05")
    return tmp_path / "triton/quire"


def find(files: ModelFiles = FILES, card: dict[str, str] | None = CARD, **settings: Any) -> TrialNote:
    note = find_note(override_config(Config(), {"model": "m", **settings}), files, card)
    assert note is not None
    return note


def test_what_one_start_leaves_the_next_one_reads(cache: Path) -> None:
    assert find().read() is None
    find().write(DECIDED)
    assert find().read() == DECIDED
    assert [path.name for path in cache.iterdir()] == [find().path.name], "and nothing else is left there"
    find().write({})
    assert find().read() == {}
    find().delete()
    assert find().read() is None
    find().delete()


@pytest.mark.parametrize("change", [
    {"card": CARD | {"uuid": "GPU-2"}},
    {"card": CARD | {"name": "NVIDIA H100"}},
    {"card": CARD | {"cuda": "12.9"}},
    {"files": replace(FILES, config={"hidden_size": 128, "num_hidden_layers": 2})},
    {"max_model_len": 512},
    {"quant": "fp8"},
    {"kv_dtype": "fp8"},
    {"dtype": "float16"},
    {"deterministic": True},
    {"kernels": "triton"},
    {"graphs": False},
])  # fmt: skip
def test_another_model_card_or_setting_has_a_note_of_its_own(change: dict[str, Any]) -> None:
    find().write(DECIDED)
    assert find(**change).read() is None


def test_other_versions_have_notes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find().write(DECIDED)
    changes: list[Callable[[pytest.MonkeyPatch], None]] = [
        lambda patch: patch.setattr(notes, "installed_version", lambda name: "9.9" if name == "triton" else "2.11.0"),
        lambda patch: patch.setattr(notes, "nvidia_driver_version", lambda: "580.95.06"),
        lambda patch: patch.setenv("TRITON_DEFAULT_FP_FUSION", "0"),
        lambda patch: patch.setenv("NVIDIA_TF32_OVERRIDE", "1"),
    ]
    for change in changes:
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            assert find().read() is None
    assert find().read() == DECIDED
    for name in notes.SOURCES:  # sources of the same length, written at the same time
        place = tmp_path / "tree/quire" / name
        path = place if place.suffix else place / "deep/kernel.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    monkeypatch.setattr(notes, "ROOT", tmp_path / "tree")
    before = find()
    for path in (tmp_path / "tree").rglob("*.py"):
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        path.write_text("x = 2\n")
        os.utime(path, ns=times)
        assert find() != before, path
        before = find()


def test_a_gguf_file_that_changed_has_another_note(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"one")
    files = ModelFiles("gguf", path, "m", None)
    find(files).write(DECIDED)
    assert find(files).read() == DECIDED
    path.write_bytes(b"other")
    assert find(files).read() is None
    path.unlink()
    assert find_note(Config(), files, CARD) is None


def test_what_changes_no_kernel_changes_no_note_and_secrets_are_in_none(cache: Path) -> None:
    find(hub_token="a-secret").write(DECIDED)
    assert find(offline=True).read() == DECIDED
    assert "a-secret" not in "".join(path.read_text() for path in cache.iterdir())


def test_who_is_strict_tries_each_time_and_without_a_card_nothing_is_noted() -> None:
    assert find_note(override_config(Config(), {"strict_kernels": True}), FILES, CARD) is None
    assert find_note(Config(), FILES, None) is None


@pytest.mark.parametrize("damage", [
    b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b"1e999", b"[" * 5000,
    lambda told: told | {"version": notes.VERSION + 1},
    lambda told: told | {"note": "0" * 32},
    lambda told: told | {"decided": {"product": "yes"}},
    lambda told: told | {"decided": [True]},
    lambda told: told | {"padding": "x" * notes.MAX_BYTES},
    lambda told: {key: value for key, value in told.items() if key != "decided"},
])  # fmt: skip
def test_a_file_that_is_damaged_or_of_another_version_is_no_note(damage: Any) -> None:
    note = find()
    note.write(DECIDED)
    told = json.loads(note.path.read_text())
    note.path.write_bytes(damage if isinstance(damage, bytes) else json.dumps(damage(told)).encode())
    assert note.read() is None
    note.write(DECIDED)
    assert note.read() == DECIDED, "and is written over"


def test_another_starts_note_under_this_name_is_none(cache: Path) -> None:
    find(max_model_len=512).write(DECIDED)
    find(max_model_len=512).path.rename(find().path)
    assert find().read() is None


def test_where_nothing_can_be_kept_nothing_is_said(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "triton").write_text("a file where the folder should be")
    find().write(DECIDED)
    find().delete()
    assert find().read() is None
    (tmp_path / "triton").unlink()
    find().write({"x" * notes.MAX_BYTES: True})
    assert not cache.exists() or not list(cache.iterdir())


def test_many_may_write_at_once() -> None:
    """Whoever reads meanwhile finds no half of it."""
    note, seen = find(), []
    note.write(DECIDED)
    writers = [threading.Thread(target=lambda: [note.write(DECIDED) for _ in range(20)]) for _ in range(4)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        seen.append(note.read())
    for writer in writers:
        writer.join()
    seen.append(note.read())
    assert all(decided == DECIDED for decided in seen)


def test_only_so_many_are_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "MAX_NOTES", 3)
    cache.mkdir(parents=True)
    (cache / "a stamp").touch()
    for age in range(5):
        path = cache / f"{age}{notes.SUFFIX}"
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    find().write(DECIDED)
    kept = {path.name for path in cache.iterdir()}
    assert kept == {"a stamp", find().path.name, f"0{notes.SUFFIX}", f"1{notes.SUFFIX}"}
