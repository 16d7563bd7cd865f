"""`quire cache`: lists, verifies and prunes a folder, and never touches one that is no cache."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from quire.cache.tiers.folder import FolderStore
from quire.cache.tiers.sessions import SessionFolder, StoredSession
from quire.cli.main import main
from tests.pure.test_tiers_blocks import LAYOUTS, FakeMemory, key_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten blocks, one second apart, and a session of the oldest two."""
    store, now = FolderStore(tmp_path / "c"), time.time() - 100
    names = []
    for number in range(10):
        layout = LAYOUTS[number % 2]
        part = layout.parts[0]
        name = layout.names(key_of(number))[0]
        store.write(name, layout.encode(key_of(number), part, FakeMemory.content(number % 2, number, part)))
        os.utime(store.path(name), (now + number, now + number))
        names.append(name)
    session = StoredSession("talk", "", b"weights", b"", [1] * 40, 32, names[:2], 900, time.time(), time.time() + 60)
    SessionFolder(tmp_path / "c").put(session)
    return tmp_path / "c"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["cache", *words])
    return code, capsys.readouterr().out


def test_ls_names_models_and_sessions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, "ls", str(folder))
    assert code == 0 and b"weights".hex()[:14] in text and " 10 " in text and "session talk: 32 tokens" in text
    facts = json.loads(run(capsys, "ls", str(folder), "--json")[1])
    (usage,) = facts["models"].values()
    assert usage["num_files"] == 10 and usage["groups"] == ["full", "state"] and facts["sessions"][0]["id"] == "talk"


def test_verify_finds_what_is_damaged_or_renamed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime for path in folder.glob("??/*")}
    assert run(capsys, "verify", str(folder)) == (0, run(capsys, "verify", str(folder))[1])
    assert before == {path: path.stat().st_mtime for path in folder.glob("??/*")}, "looking is no use"
    files = sorted(folder.glob("??/*"))
    files[0].write_bytes(files[0].read_bytes()[:-1])
    os.replace(files[4], files[6])
    code, text = run(capsys, "verify", str(folder), "--json")
    facts = json.loads(text)
    assert code == 1 and sorted(facts["damaged"]) == [str(files[0]), str(files[6])]
    assert facts["incomplete_sessions"] == ["talk"]
    assert run(capsys, "verify", str(folder), "--delete")[0] == 1 and not files[0].exists()
    assert run(capsys, "verify", str(folder))[0] == 0


def test_prune_deletes_the_oldest_and_spares_sessions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [path.stat().st_size for path in folder.glob("??/*")]
    facts = json.loads(run(capsys, "prune", str(folder), "--keep", str(sum(sizes) // 2), "--json")[1])
    assert facts["files"] >= 4 and facts["bytes"] >= sum(sizes) // 2 - max(sizes)
    assert json.loads(run(capsys, "verify", str(folder), "--json")[1])["incomplete_sessions"] == []
    assert json.loads(run(capsys, "prune", str(folder), "--older-than", "0", "--json")[1])["files"] > 0
    assert len(list(folder.glob("??/*"))) == 2, "those of the session"
    run(capsys, "prune", str(folder), "--weights", b"weights".hex())
    assert not list(folder.glob("??/*"))


def test_another_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    for action in ("ls", "verify", "prune"):
        assert main(["cache", action, str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert "is no cache of Quire" in error and error.count("\n") <= 2
    assert main(["cache", "export", str(tmp_path), "talk", str(tmp_path / "x")]) == 2
    assert main(["cache", "import", str(tmp_path), str(tmp_path / "thesis.txt")]) in (1, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.txt"]


def test_a_session_goes_to_another_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "export", str(folder), "talk", str(tmp_path / "x"))[0] == 0
    assert run(capsys, "import", str(tmp_path / "new"), str(tmp_path / "x"), "--name", "moved")[0] == 0
    assert "session moved: 32 tokens" in run(capsys, "ls", str(tmp_path / "new"))[1]
    assert run(capsys, "verify", str(tmp_path / "new"))[0] == 0
    assert main(["cache", "export", str(folder), "none", str(tmp_path / "y")]) == 1
    assert not (tmp_path / "y").exists()
