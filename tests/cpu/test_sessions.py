"""Sessions of `LLM`: the cache of a conversation kept by name, loaded after a restart, exported and imported."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli.chat import ChatHistory, Session
from quire.llm import LLM
from quire.types import QuireError, SamplingParams
from tests.cpu.tiny_llm import make_tiny_llm

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llm(tmp_path_factory.mktemp("model"))


def open_llm(model: Path, cache: Path | None, **knobs: Any) -> LLM:
    folder = {} if cache is None else {"cache_dir": str(cache)}
    return LLM(str(model), dtype="float32", num_pages=30, threads=1, host_memory=16 << 20, **folder, **knobs)


@pytest.fixture
def saved(model: Path, tmp_path: Path) -> Iterator[tuple[Path, list[int]]]:
    """A cache folder with the session "talk", and the conversation's tokens."""
    with open_llm(model, tmp_path / "cache") as llm:
        prompt = [random.Random(5).randrange(10, 250) for _ in range(100)]
        tokens = prompt + llm.generate([prompt], GREEDY)[0].token_ids
        info = llm.sessions.save("talk", tokens)
        assert (info.num_tokens, info.saved_tokens, info.ready_tokens) == (108, 96, 96) and info.num_bytes > 0
        assert info == llm.sessions.get("talk").__class__(*[getattr(info, f) for f in info.__slots__])
        llm.engine.scheduler.check()
    yield tmp_path / "cache", tokens


def computed(llm: LLM, tokens: list[int]) -> tuple[int, list[int]]:
    before = llm.engine.scheduler.stats.computed_tokens
    output = llm.generate([tokens], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))[0]
    return llm.engine.scheduler.stats.computed_tokens - before, output.token_ids


def test_a_saved_session_is_loaded_after_a_restart(model: Path, saved: tuple[Path, list[int]]) -> None:
    cache, tokens = saved
    turn = [*tokens, 5, 6, 7]
    with open_llm(model, None) as llm:
        _, expected = computed(llm, turn)
    with open_llm(model, cache) as llm:
        info = llm.sessions.load("talk")
        assert info.ready_tokens == 96 and llm.explain(turn).tiers["host"] == 96
        count, output = computed(llm, turn)
        assert output == expected and count <= 3 + 16 + 3, "the new tokens and at most a page, and what was sampled"
        llm.engine.scheduler.check()


def test_sessions_go_last_from_host_memory_and_disk(model: Path, saved: tuple[Path, list[int]]) -> None:
    cache, _ = saved
    size = sum(path.stat().st_size for path in cache.glob("??/*"))
    with open_llm(model, cache) as llm:
        (disk,) = llm.engine.scheduler.cache.stores
        disk._quota = 2 * size
        llm.sessions.load("talk")
        rng = random.Random(1)
        for _ in range(12):
            llm.generate([[rng.randrange(10, 250) for _ in range(100)]], GREEDY)
            llm.engine.save()
        assert disk.stats.evictions > 20
        assert llm.sessions.load("talk").ready_tokens == 96
        llm.sessions.delete("talk")
        with pytest.raises(QuireError, match="no session 'talk'"):
            llm.sessions.get("talk")
        assert not disk._favoured and not llm.engine.scheduler.cache.host.favoured


def test_a_session_is_exported_and_imported_elsewhere(
    model: Path, saved: tuple[Path, list[int]], tmp_path: Path
) -> None:
    cache, tokens = saved
    with open_llm(model, cache) as llm:
        llm.sessions.export("talk", tmp_path / "talk.quire")
        with pytest.raises(QuireError, match="exists already"):
            llm.sessions.export("talk", tmp_path / "talk.quire")
    assert (tmp_path / "talk.quire").stat().st_mode & 0o777 == 0o600
    with open_llm(model, tmp_path / "elsewhere") as llm:
        llm.sessions.import_file(tmp_path / "talk.quire", "moved")
        assert llm.sessions.load("moved").ready_tokens == 96
        assert computed(llm, [*tokens, 5])[0] <= 1 + 16 + 3


def test_damaged_exports_are_refused(model: Path, saved: tuple[Path, list[int]], tmp_path: Path) -> None:
    cache, _ = saved
    rng = random.Random(3)
    with open_llm(model, cache) as llm, open_llm(model, tmp_path / "other") as other:
        llm.sessions.export("talk", tmp_path / "x")
        data = (tmp_path / "x").read_bytes()
        for number in range(60):
            bad = bytearray(data)
            if number % 2:
                bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
            else:
                del bad[rng.randrange(len(bad)) :]
            (tmp_path / "bad").write_bytes(bad)
            with pytest.raises(QuireError) as caught:
                other.sessions.import_file(tmp_path / "bad")
            assert "\n" not in str(caught.value)
            with pytest.raises(QuireError, match="no session"):
                other.sessions.get("talk")


def test_messages_are_kept_with_a_session(model: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "why is the sky blue " * 10}]
    with open_llm(model, tmp_path / "c") as llm:
        answer = llm.chat(messages, GREEDY)[0].text
        talk = [*messages, {"role": "assistant", "content": answer}]
        assert llm.sessions.save("sky", talk).saved_tokens > 0
        assert json.loads(llm.sessions.load("sky").messages) == talk


def test_ids_that_are_paths_are_refused(model: Path, saved: tuple[Path, list[int]]) -> None:
    cache, tokens = saved
    before = sorted(cache.parent.rglob("*"))
    with open_llm(model, cache) as llm:
        for name in ("", "a/b", "../x", ".hidden", "x" * 129, "a\0b", "-rf"):
            with pytest.raises(QuireError, match="no session id") as caught:
                llm.sessions.save(name, tokens)
            assert caught.value.code == "invalid_session_id"
            with pytest.raises(QuireError, match="no session id"):
                llm.sessions.load(name)
    assert sorted(cache.parent.rglob("*")) == before


def test_what_can_not_be_kept_is_said(model: Path, saved: tuple[Path, list[int]], tmp_path: Path) -> None:
    cache, tokens = saved
    with open_llm(model, None) as llm, pytest.raises(QuireError, match="no cache folder"):
        llm.sessions.save("talk", tokens)
    with open_llm(model, cache, max_model_len=128) as other, pytest.raises(QuireError, match="of another model"):
        other.sessions.load("talk")
    with open_llm(model, cache) as llm:
        with pytest.raises(QuireError, match="Nothing of this conversation"):
            llm.sessions.save("new", [9] * 50)
        with pytest.raises(QuireError, match="can't expire"):
            llm.sessions.save("talk", tokens, expires_in=-1)
        (file,) = (cache / "sessions").iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        file.write_bytes(file.read_bytes()[:-3])
        with pytest.raises(QuireError, match="damaged"):
            llm.sessions.load("talk")
        assert llm.sessions.save("talk", tokens).saved_tokens == 96, "it can be saved again"
        llm.sessions.save("short", tokens, expires_in=0.001)
        llm.engine.sessions._clock = lambda: 4e9
        with pytest.raises(QuireError, match="no session 'short'"):
            llm.sessions.get("short")


def test_a_chat_is_saved_and_goes_on(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_llm(model, tmp_path / "c") as llm:
        chat = Session(llm, GREEDY, ChatHistory("be short"))
        with pytest.raises(QuireError, match="no answer to save"):
            chat.run_command("save", "sky")
        chat.answer("why is the sky blue because light is scattered")
        chat.run_command("save", "sky")
        expected = chat.conversation
    with open_llm(model, tmp_path / "c") as llm:
        chat = Session(llm, GREEDY, ChatHistory())
        chat.run_command("load", "sky")
        assert chat.conversation == expected and "1 turns" in capsys.readouterr().err
        chat.answer("why")
        assert chat.last is not None and chat.last.usage.cached_tokens >= 16
