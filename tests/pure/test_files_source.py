"""From what a person typed to files on disk, and the `pull` command on top of it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.cli import pull
from quire.files.progress import LineProgress, default_progress, format_bytes
from quire.files.source import ModelFiles, resolve_model
from quire.types import QuireError
from tests.pure.test_files_web import Recorder, clean_environment


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clean_environment(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "mine"
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "model.safetensors").write_bytes(b"")
    return path


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "files" / "my-model.gguf"
    path.parent.mkdir()
    path.write_bytes(b"GGUF" + bytes(20))
    return path


def resolve(model: object, **options: Any) -> ModelFiles:
    return resolve_model(str(model), progress=Recorder(), **options)


def refusal(model: object, **options: Any) -> QuireError:
    with pytest.raises(QuireError) as caught:
        resolve(model, **options)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_local_folder(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    found = resolve(folder)
    assert (found.kind, found.path, found.name) == ("folder", folder, "mine")
    assert found.config == {"model_type": "llama"} and found.generation_config == {"eos_token_id": 2}
    assert resolve("models/mine").name == "mine"  # what is on disk goes before a hub id
    assert resolve(folder / "config.json").path == folder
    assert resolve_model(folder).path == folder


def test_a_local_gguf(gguf: Path) -> None:
    found = resolve(gguf)
    assert (found.kind, found.path, found.name, found.config) == ("gguf", gguf, "my-model", None)
    assert resolve(gguf.parent).path == gguf
    (gguf.parent / "second.gguf").write_bytes(b"GGUF")
    error = refusal(gguf.parent)
    assert "2 GGUF files" in error.what and "second.gguf" in error.hint


def test_a_vision_part_is_no_model(gguf: Path) -> None:
    vision = gguf.with_name("mmproj-my-model-f16.gguf")
    vision.write_bytes(b"GGUF")
    assert resolve(gguf.parent).path == gguf
    assert resolve(gguf).vision_part == vision.name and resolve(gguf.parent).vision_part == vision.name
    gguf.with_name("another.gguf").write_bytes(b"GGUF")
    assert resolve(gguf).vision_part is None  # it may be the other model's


def test_any_part_of_a_split_gguf_names_the_model(gguf: Path) -> None:
    parts = [gguf.with_name(f"big-0000{number}-of-00003.gguf") for number in (1, 2, 3)]
    for part in parts:
        part.write_bytes(b"GGUF")
    gguf.unlink()
    assert {resolve(place).path for place in (gguf.parent, *parts)} == {parts[0]}
    parts[1].unlink()
    for place in (gguf.parent, parts[0], parts[2]):
        error = refusal(place)
        assert error.code == "missing_shard" and "big-00002-of-00003.gguf" in error.what and "3 files" in error.what


def test_random_weights_need_only_a_config(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no weights: looked for model.safetensors" in refusal(folder).what
    assert resolve(folder, random_weights=True).config == {"model_type": "llama"}
    (folder / "config.json").unlink()
    assert "looked for config.json" in refusal(folder, random_weights=True).what


def test_what_is_not_a_model(folder: Path, tmp_path: Path) -> None:
    missing = refusal(tmp_path / "none")
    assert missing.code == "model_not_found" and "does not exist" in missing.what
    assert "looked for config.json with *.safetensors, or one *.gguf" in refusal(tmp_path).what
    error = refusal(folder / "model.safetensors")
    assert "not a GGUF file" in error.what and "Give its folder" in error.hint
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickle" in refusal(folder).what
    assert "cannot be read" in refusal("/" + "a" * 300).what
    assert "No model was named" in refusal("").what and "No model was named" in refusal("a\0b").what


def test_infinity_is_a_number_however_it_is_written(folder: Path) -> None:
    content = '{"model_type": "m", "limits": [0.0, {"__float__": "Infinity"}], "other": Infinity, "part": {"a": 1}}'
    (folder / "config.json").write_text(content)
    infinity = float("inf")
    assert resolve(folder).config == {"model_type": "m", "limits": [0.0, infinity], "other": infinity, "part": {"a": 1}}
    (folder / "config.json").write_text('{"model_type": "m", "limits": {"__float__": "all of it"}}')
    assert refusal(folder).code == "bad_config"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'"x"'])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_json(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    error = refusal(folder)
    assert error.code == "bad_config" and name in error.what


def test_names_nobody_knows() -> None:
    assert refusal("smolm2").hint == "Did you mean smollm2?"
    assert refusal("SmolLM").hint == "Did you mean smollm2?"
    error = refusal("zzz")
    assert error.code == "model_not_found" and "'zzz'" in error.what and "owner/name" in error.hint
    for path in ("zzz.gguf", "dir/zzz.gguf", "a/b/c"):
        assert "no model, file or folder" in refusal(path).what
    error = refusal("owner/zzz")
    assert error.code == "hub_unreachable" and "owner/zzz is not on this machine" in error.what


def test_a_revision_is_for_the_hub(folder: Path) -> None:
    for model in (str(folder), "smollm2"):
        with pytest.raises(QuireError, match="revision='main' makes no sense"):
            resolve_model(model, revision="main")


def test_resolving_imports_nothing_heavy(folder: Path) -> None:
    code = (
        "import sys; from quire.files.source import resolve_model; resolve_model(sys.argv[1]);"
        "print([m for m in ('torch', 'numpy', 'rich', 'ssl', 'urllib.request', 'safetensors') if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def run_pull(*words: str) -> int:
    parser = argparse.ArgumentParser()
    pull.add_parser(parser.add_subparsers())
    return pull.run(parser.parse_args(["pull", *words]))


def test_pull(gguf: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_pull(str(gguf)) == 0
    assert capsys.readouterr().out == f"my-model: {gguf} (24 bytes)\n"
    assert run_pull(str(folder), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == {"model": "mine", "kind": "folder", "path": str(folder), "bytes": 23, "source": f"folder {folder}"}
    with pytest.raises(QuireError, match="offline mode"):
        run_pull("owner/name", "--offline")
    monkeypatch.setenv("QUIRE_OFFLINE", "1")
    with pytest.raises(QuireError, match="offline mode"):
        run_pull("smollm2")


def test_lines_for_logs(capsys: pytest.CaptureFixture[str]) -> None:
    progress = default_progress()
    assert isinstance(progress, LineProgress)  # a captured stderr is no terminal
    progress.start("fetching x", 98_362_432, 1500)
    progress.update(2000)
    progress.finish()
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "fetching x (98.4 MB, 1.5 kB already here)\n"
    assert [format_bytes(n) for n in (0, 999, 1000, 999_999, 5 * 10**12)] == [
        "0 bytes",
        "999 bytes",
        "1.0 kB",
        "1.0 MB",
        "5000.0 GB",
    ]
