"""Hub models fetched from a stand-in hub over real HTTP: resumed, checked, locked, remembered."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.files.hub import HubRef, is_safe_name, parse_hub_id
from quire.files.settings import HubSettings
from quire.files.source import ModelFiles, resolve_model
from quire.types import QuireError
from tests.pure.test_files_web import COMMIT, FakeHub, Recorder, clean_environment, serve

WEIGHTS = bytes(range(256)) * 40
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
FOLDER = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b'{"eos_token_id": [1, 2]}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"hello",
    "README.md": b"read me",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"another layout",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[::-1],
}
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    clean_environment(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with serve(FakeHub(files=dict(FOLDER))) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def resolve(model: str = "owner/name", **options: Any) -> ModelFiles:
    return resolve_model(model, **{"progress": Recorder(), **options})


def refusal(model: str = "owner/name", **options: Any) -> QuireError:
    with pytest.raises(QuireError) as caught:
        resolve(model, **options)
    assert "\n" not in str(caught.value)
    return caught.value


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.rglob("*.part")]


def test_a_folder_of_safetensors(hub: FakeHub, tmp_path: Path) -> None:
    found = resolve()
    assert found.kind == "folder" and found.name == "owner/name"
    assert found.path == tmp_path / "quire/hub/owner--name" / COMMIT
    assert found.config == {"model_type": "llama"} and found.generation_config == {"eos_token_id": [1, 2]}
    skipped = {"README.md", "pytorch_model.bin", "consolidated.safetensors"}
    assert {path.name for path in found.path.iterdir()} == set(FOLDER) - skipped
    assert all((found.path / name).read_bytes() == FOLDER[name] for name in set(FOLDER) - skipped)
    assert leftovers(tmp_path) == []


def test_the_second_time_only_the_listing_is_asked(hub: FakeHub) -> None:
    resolve()
    hub.requests.clear()
    resolve()
    assert [path for path, _ in hub.requests] == ["/api/models/owner/name/revision/main"]
    hub.requests.clear()
    resolve(revision=COMMIT)  # a commit never changes, so nobody needs to be asked
    assert hub.requests == []


def test_offline_uses_what_is_here(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(offline=True).code == "offline"
    found = resolve()
    hub.requests.clear()
    assert resolve(offline=True).path == found.path
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve().path == found.path
    assert hub.requests == []
    (found.path / SHARD).unlink()
    assert SHARD in refusal().what


def test_an_unreachable_hub_leaves_the_known_copy(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolve()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    progress = Recorder()
    assert resolve(progress=progress).path == found.path
    assert len(progress.notes) == 1 and COMMIT[:12] in progress.notes[0]
    error = refusal("owner/unknown")
    assert error.code == "hub_unreachable" and "127.0.0.1" in error.what and "owner/unknown" in error.what


def fill_hf_cache(cache: Path, files: dict[str, bytes], commit: str = COMMIT) -> Path:
    """Writes a snapshot as Hugging Face's tools do: links to blobs, and a reference of the branch."""
    repo = cache / "models--owner--name"
    for name, data in files.items():
        blob, link = repo / "blobs" / hashlib.sha256(data).hexdigest(), repo / "snapshots" / commit / name
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (repo / "refs").mkdir(parents=True, exist_ok=True)
    (repo / "refs" / "main").write_text(commit)
    return repo / "snapshots" / commit


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_a_model_in_the_hugging_face_cache(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """It is used where it lies, with the hub's consent or without the hub."""
    below = {"HF_HUB_CACHE": ".", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
    base = tmp_path / "elsewhere"
    snapshot = fill_hf_cache(base / below, FOLDER)
    monkeypatch.setenv(variable, str(base))
    found = resolve()
    assert found.path == snapshot and found.config == {"model_type": "llama"} and COMMIT in found.source
    assert [path for path, _ in hub.requests] == ["/api/models/owner/name/revision/main"]
    assert not (tmp_path / "quire").exists() and not (base / "quire").exists()
    assert resolve(offline=True).path == snapshot
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    progress = Recorder()
    assert resolve(progress=progress).path == snapshot
    assert len(progress.notes) == 1 and "Hugging Face cache" in progress.notes[0]
    assert refusal(revision="other").code == "hub_unreachable"


def test_a_snapshot_that_is_old_or_lacks_a_file(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hf"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    snapshot = fill_hf_cache(cache, FOLDER, "beef" + "0" * 36)
    assert resolve().path == tmp_path / "quire/hub/owner--name" / COMMIT, "the hub has a newer commit"
    shutil.rmtree(tmp_path / "quire")
    shutil.rmtree(cache)
    snapshot = fill_hf_cache(cache, FOLDER)
    (snapshot / SHARD).resolve().unlink()  # its blob, so that the link leads nowhere
    assert refusal(offline=True).code == "offline"
    assert resolve().path != snapshot
    shutil.rmtree(tmp_path / "quire")
    shutil.rmtree(cache)
    snapshot = fill_hf_cache(cache, {**FOLDER, SHARD: WEIGHTS[:-1]})
    assert resolve().path != snapshot, "a file has another size than the hub says"


def test_a_gguf_in_the_hugging_face_cache(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hf"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    snapshot = fill_hf_cache(cache, {"name-Q4_K_M.gguf": b"GGUF" + WEIGHTS})
    assert resolve(offline=True).path == snapshot / "name-Q4_K_M.gguf"
    assert resolve("owner/name:q4_k_m", offline=True).path == snapshot / "name-Q4_K_M.gguf"
    assert refusal("owner/name:q8_0", offline=True).code == "offline"


def test_a_new_commit_is_another_folder(hub: FakeHub) -> None:
    old = resolve()
    hub.commit = "beef" + "0" * 36
    hub.files["config.json"] = b'{"model_type": "qwen2"}'
    new = resolve()
    assert new.path.name == hub.commit and new.config == {"model_type": "qwen2"}
    assert old.path.joinpath("config.json").read_bytes() == FOLDER["config.json"]


def test_a_damaged_file_is_fetched_again(hub: FakeHub) -> None:
    found = resolve()
    (found.path / SHARD).write_bytes(WEIGHTS[:100])
    resolve()
    assert (found.path / SHARD).read_bytes() == WEIGHTS


def test_a_broken_line_is_taken_up_again(hub: FakeHub) -> None:
    hub.breaks[SHARD] = [1000, 500]
    found = resolve()
    assert (found.path / SHARD).read_bytes() == WEIGHTS
    assert [headers.get("range") for headers in hub.asked_for(SHARD)] == [None, "bytes=1000-", "bytes=1500-"]


def test_an_interrupted_fetch_resumes_next_time(hub: FakeHub, tmp_path: Path) -> None:
    hub.breaks[SHARD] = [1000, 0]
    error = refusal()
    assert error.code == "hub_unreachable" and f"1000 of {len(WEIGHTS)} bytes" in error.what
    assert leftovers(tmp_path) == [SHARD + ".part"]
    hub.requests.clear()
    found = resolve()
    assert (found.path / SHARD).read_bytes() == WEIGHTS and leftovers(tmp_path) == []
    assert [headers.get("range") for headers in hub.asked_for(SHARD)] == ["bytes=1000-"]
    assert not hub.asked_for("config.json")


def test_a_server_without_ranges_starts_over(hub: FakeHub) -> None:
    hub.ranges = False
    hub.breaks[SHARD] = [1000]
    assert (resolve().path / SHARD).read_bytes() == WEIGHTS


def test_a_part_the_server_cannot_continue_is_dropped(hub: FakeHub, tmp_path: Path) -> None:
    hub.listed[SHARD] = {"size": None, "lfs": None}
    folder = tmp_path / "quire/hub/owner--name" / COMMIT
    folder.mkdir(parents=True)
    (folder / f"{SHARD}.part").write_bytes(bytes(len(WEIGHTS) + 5))
    assert (resolve().path / SHARD).read_bytes() == WEIGHTS


@pytest.mark.parametrize("part", [bytes(50), bytes(len(WEIGHTS)), bytes(len(WEIGHTS) + 5)])
def test_wrong_bytes_are_refused(hub: FakeHub, tmp_path: Path, part: bytes) -> None:
    """Whether the hub sent them or an old part holds them: what does not hash right never gets its name."""
    folder = tmp_path / "quire/hub/owner--name" / COMMIT
    folder.mkdir(parents=True)
    (folder / f"{SHARD}.part").write_bytes(part)
    hub.served[SHARD] = b"x" * len(WEIGHTS)
    error = refusal()
    assert error.code == "hash_mismatch" and SHARD in error.what
    assert not (folder / SHARD).exists() and leftovers(tmp_path) == []
    hub.served.clear()
    assert (resolve().path / SHARD).read_bytes() == WEIGHTS


def test_sizes_that_contradict(hub: FakeHub, tmp_path: Path) -> None:
    hub.lengths[SHARD] = len(WEIGHTS) + 100
    assert f"with {len(WEIGHTS)} bytes but offers {len(WEIGHTS) + 100}" in refusal().what
    hub.lengths[SHARD] = 10
    assert f"with {len(WEIGHTS)} bytes but offers 10" in refusal().what
    hub.listed[SHARD] = {"size": None, "lfs": None}
    hub.lengths[SHARD] = len(WEIGHTS) + 100  # nothing contradicts it but the body, which ends early
    hub.requests.clear()
    assert refusal().code == "hub_unreachable" and len(hub.asked_for(SHARD)) < 6
    assert not list(tmp_path.rglob(SHARD))


def test_a_server_that_sends_too_much(hub: FakeHub, tmp_path: Path) -> None:
    """Without a Content-Length the body ends with the connection: reading stops one byte past what was listed."""
    long = (200, {"Content-Length": ""}, b"y" * (len(FOLDER["config.json"]) + 5000))
    hub.answers[f"/owner/name/resolve/{COMMIT}/config.json"] = long
    error = refusal()
    assert error.code == "hash_mismatch" and "instead of" in error.what
    assert not list(tmp_path.rglob("config.json*"))


def test_no_room(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))  # type: ignore[attr-defined]
    error = refusal()
    assert error.code == "cache_unwritable" and "10 bytes free" in error.what


def test_a_cache_that_is_no_folder(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "quire").write_text("in the way")
    assert refusal().code == "cache_unwritable"


LISTING = "/api/models/owner/name/revision/main"


@pytest.mark.parametrize(
    ("status", "reason", "code", "expected"),
    [
        (401, "GatedRepo", "hub_denied", "is gated"),
        (403, "GatedRepo", "hub_denied", "is gated"),
        (401, "", "hub_denied", "does not exist, or is private or gated"),
        (404, "RepoNotFound", "hub_not_found", "has no model owner/name"),
        (404, "RevisionNotFound", "hub_not_found", "has no revision main"),
        (429, "", "hub_unreachable", "busy"),
        (503, "", "hub_unreachable", "unavailable or busy"),
        (400, "", "hub_error", "HTTP 400"),
    ],
)
def test_a_hub_that_says_no(hub: FakeHub, status: int, reason: str, code: str, expected: str) -> None:
    hub.answers[LISTING] = (status, {"X-Error-Code": reason}, b"")
    error = refusal(token="secret-token")
    assert error.code == code and expected in error.what and "secret-token" not in str(error)
    assert hub.requests[0][1]["authorization"] == "Bearer secret-token"


def test_gated_files_of_a_listed_repo(hub: FakeHub) -> None:
    hub.answers[f"/owner/name/resolve/{COMMIT}/config.json"] = (401, {"X-Error-Code": "GatedRepo"}, b"")
    error = refusal()
    assert error.code == "hub_denied" and "no token was given" in error.what and "HF_TOKEN" in error.hint


def test_the_token_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    settings = HubSettings.from_environment()
    assert settings.token == "secret-token" and "secret-token" not in repr(settings)
    assert HubSettings.from_environment("other").token == "other"


@pytest.mark.parametrize(
    "listing",
    [
        [],
        {},
        {"sha": COMMIT},
        {"sha": "../../x", "siblings": []},
        {"sha": COMMIT, "siblings": [{"rfilename": "../config.json"}]},
        {"sha": COMMIT, "siblings": [{"rfilename": "/etc/passwd"}]},
        {"sha": COMMIT, "siblings": [{"rfilename": "a\\..\\b"}]},
        {"sha": COMMIT, "siblings": [{"rfilename": 5}]},
        {"sha": COMMIT, "siblings": [{"rfilename": "config.json", "size": -1}]},
        {"sha": COMMIT, "siblings": [{"rfilename": "config.json", "lfs": {"sha256": "../x"}}]},
        {"sha": COMMIT, "siblings": 5},
    ],
)
def test_a_listing_that_lies(hub: FakeHub, tmp_path: Path, listing: Any) -> None:
    hub.answers[LISTING] = (200, {}, json.dumps(listing).encode())
    assert refusal().code == "hub_error"
    assert not list(tmp_path.rglob("*.json"))


def test_an_index_that_leads_elsewhere(hub: FakeHub) -> None:
    hub.files["model.safetensors.index.json"] = b'{"weight_map": {"a": "../../x.safetensors"}}'
    assert refusal().code == "bad_safetensors"
    hub.commit = "abc" + "0" * 37
    hub.files["model.safetensors.index.json"] = b'{"weight_map": {"a": "gone.safetensors"}}'
    assert "gone.safetensors" in refusal().what


def test_only_the_config_for_random_weights(hub: FakeHub) -> None:
    found = resolve(random_weights=True)
    assert found.config is not None and not list(found.path.glob("*.safetensors"))
    assert not hub.asked_for(SHARD)


def test_choosing_a_gguf(hub: FakeHub) -> None:
    q4, q8 = b"GGUF" + bytes(20), b"GGUF" + bytes(30)
    hub.files = {"README.md": b"", "sub/m-Q4_K_M.gguf": q4, "m.Q8_0.gguf": q8, "mmproj-m.gguf": b"GGUF"}
    found = resolve("owner/name:q8_0")
    assert found.kind == "gguf" and found.path.read_bytes() == q8 and found.config is None
    found = resolve("owner/name/sub/m-Q4_K_M.gguf")
    assert found.path.read_bytes() == q4 and found.path.parent.name == "sub"
    error = refusal()
    assert "several GGUF files" in error.what and "owner/name/m.Q8_0.gguf" in error.hint
    assert "no GGUF file of kind K_M" not in refusal("owner/name:Q2_K").what
    assert "no GGUF file of kind Q2_K" in refusal("owner/name:Q2_K").what
    assert "no file other.gguf" in refusal("owner/name/other.gguf").what
    del hub.files["m.Q8_0.gguf"]
    assert resolve().path.read_bytes() == q4


def test_a_split_gguf_comes_with_all_parts(hub: FakeHub) -> None:
    parts = {f"sub/m-Q4_0-0000{number}-of-00003.gguf": b"GGUF" + bytes(20 + number) for number in (1, 2, 3)}
    hub.files = {**parts, "sub/mmproj-m.gguf": b"GGUF"}
    for model in ("owner/name:Q4_0", "owner/name", "owner/name/sub/m-Q4_0-00002-of-00003.gguf"):
        found = resolve(model)
        assert found.kind == "gguf" and found.path.name == "m-Q4_0-00001-of-00003.gguf"
        assert {path.name: path.read_bytes() for path in found.path.parent.iterdir()} == {
            name.removeprefix("sub/"): content for name, content in parts.items()
        }
    del hub.files["sub/m-Q4_0-00003-of-00003.gguf"]
    hub.commit = "beef" + "0" * 36
    error = refusal("owner/name:Q4_0")
    assert error.code == "missing_shard" and "m-Q4_0-00003-of-00003.gguf" in error.what


def test_repositories_without_a_model(hub: FakeHub) -> None:
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    assert "pickle" in refusal().what
    hub.files = {"README.md": b"x"}
    assert "no config.json" in refusal().what


def test_hub_ids() -> None:
    assert parse_hub_id("a/b") == HubRef("a/b")
    assert parse_hub_id("a/b.c-1_2:Q4_K_M") == HubRef("a/b.c-1_2", quant="Q4_K_M")
    assert parse_hub_id("a/b/c/d.gguf") == HubRef("a/b", file="c/d.gguf")
    for bad in ("a", "a/", "/a", "a/b/", "a/b/c", "../b", "a/..", "a/b/../c.gguf", "a--b/c", "a/b:", "a b/c", "a/b\n"):
        assert parse_hub_id(bad) is None, bad
    assert is_safe_name("a/b.json") and not is_safe_name("a//b") and not is_safe_name("a/\0")
    assert refusal("owner/name", revision="../x y").code == "invalid_parameter"


FETCHER = "from quire.files.source import resolve_model; print(resolve_model('owner/name').path)"


def start_fetcher() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    root = Path(__file__).resolve().parents[2]
    command, pipe = [sys.executable, "-c", FETCHER], subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd=root, text=True, stdout=pipe, stderr=pipe)


def test_two_processes_fetch_once(hub: FakeHub, tmp_path: Path) -> None:
    """The second finds the lock held while the first is in the middle of a file, says so, and downloads nothing."""
    hub.gates["config.json"] = threading.Event()
    lines: list[str] = []
    someone_waits = threading.Event()

    def watch(process: subprocess.Popen[str]) -> None:
        for line in process.stderr or ():
            lines.append(line)
            if "another process is fetching owner/name, waiting" in line:
                someone_waits.set()

    processes = [start_fetcher(), start_fetcher()]
    watchers = [threading.Thread(target=watch, args=(process,), daemon=True) for process in processes]
    try:
        for watcher in watchers:
            watcher.start()
        assert someone_waits.wait(60), lines
        hub.gates["config.json"].set()
        paths = {process.stdout.read().strip() for process in processes if process.stdout}
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert paths == {str(tmp_path / "quire/hub/owner--name" / COMMIT)}, lines
    fetched = [path for path, _ in hub.requests if "/resolve/" in path]
    assert len(fetched) == len(set(fetched)) == 7
    assert hashlib.sha256((Path(paths.pop()) / SHARD).read_bytes()).digest() == hashlib.sha256(WEIGHTS).digest()
