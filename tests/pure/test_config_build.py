"""Settings from files, the environment and arguments: who wins, what is refused, and what the refusal says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config import Config, ModelConfig
from quire.config_build import MASK, build_config, describe_config, find_config_file, override_config, parse_size
from quire.types import QuireError


def from_toml(folder: Path, text: str, env: dict[str, str] | None = None, **flags: Any) -> Config:
    file = folder / "some.toml"
    file.write_text(text)
    return build_config(file=file, env=env or {}, flags=flags)


def from_env(**env: str) -> Config:
    return build_config(file=None, env=env, flags={}, search=False)


def from_flags(**flags: Any) -> Config:
    return build_config(file=None, env={}, flags=flags, search=False)


def test_flags_beat_environment_beats_file_beats_default(tmp_path: Path) -> None:
    toml = "[scheduler]\nmax_rows = 1\nmax_batch_tokens = 10\nchunk_tokens = 100\n"
    env = {"QUIRE_MAX_ROWS": "2", "QUIRE_MAX_BATCH_TOKENS": "20"}
    scheduler = from_toml(tmp_path, toml, env, max_rows="3").scheduler
    assert (scheduler.max_rows, scheduler.max_batch_tokens, scheduler.chunk_tokens) == (3, 20, 100)
    assert scheduler.max_waiting == Config().scheduler.max_waiting


# -- unknown names


def test_unknown_key_names_file_table_and_nearest(tmp_path: Path) -> None:
    with pytest.raises(QuireError) as caught:
        from_toml(tmp_path, "[model]\nmax_modl_len = 1\n")
    error = caught.value
    assert error.code == "unknown_setting"
    assert "max_modl_len" in error.what and "[model]" in error.what and "some.toml" in error.what
    assert error.hint == "Did you mean 'max_model_len' in [model]?"


@pytest.mark.parametrize(
    ("toml", "says", "hint"),
    [
        ("[cach]\nnum_pages = 4\n", "[cach]", "[cache]"),
        ("max_rows = 4\n", "max_rows", "[scheduler]"),
        ("[model]\nmax_rows = 4\n", "max_rows", "[scheduler]"),
        ('model = "smollm2"\n', "model", "[model]"),
        ("[model.model]\nx = 1\n", "model", "text"),
        ("[model.zzzz]\nx = 1\n", "zzzz", "--help"),
    ],
)
def test_misplaced_keys_say_where_they_belong(tmp_path: Path, toml: str, says: str, hint: str) -> None:
    with pytest.raises(QuireError) as caught:
        from_toml(tmp_path, toml)
    assert says in caught.value.what
    assert hint in str(caught.value)


def test_unknown_variable_names_the_nearest() -> None:
    with pytest.raises(QuireError, match="QUIRE_MAX_ROW ") as caught:
        from_env(QUIRE_MAX_ROW="1")
    assert caught.value.code == "unknown_setting"
    assert "QUIRE_MAX_ROWS" in caught.value.hint


def test_other_variables_are_left_alone() -> None:
    assert from_env(PATH="/bin", QUIRE_DEBUG="1", quire_x="1", QUIRE_DEPTH="") == Config()


def test_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(QuireError, match="'dtpe'") as caught:
        override_config(Config(), {"dtpe": "float32"})
    assert "'dtype'" in caught.value.hint


# -- values


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("max_model_len", "8_192", 8192),
        ("max_model_len", "auto", None),
        ("max_model_len", None, None),
        ("cache_memory", "1.5GiB", 3 << 29),
        ("cache_memory", "512M", 512_000_000),
        ("cache_memory", 4096, 4096),
        ("host_memory", "0", 0),
        ("memory_fraction", "5e-1", 0.5),
        ("memory_fraction", 1, 1.0),
        ("prefix_cache", "off", False),
        ("prefix_cache", "Yes", True),
        ("revision", "none", None),
        ("model", Path("a/b"), "a/b"),
        ("threads", type("Index", (), {"__index__": lambda self: 3})(), 3),
    ],
)
def test_values_are_read_in_their_type(name: str, raw: Any, value: Any) -> None:
    setting = next(setting for setting in describe_config(from_flags(**{name: raw})) if setting.name == name)
    assert setting.value == value
    assert type(setting.value) is type(value)


@pytest.mark.parametrize(
    ("name", "raw", "why"),
    [
        ("max_model_len", "0", "must be at least 1"),
        ("max_model_len", "1e3", "must be a whole number, or auto"),
        ("max_model_len", "8K", "must be a whole number, or auto"),
        ("max_model_len", 2.0, "must be a whole number"),
        ("max_model_len", True, "must be a whole number"),
        ("max_model_len", 10**30, "too large"),
        ("max_model_len", "9" * 5000, "must be a whole number"),
        ("page_tokens", "5000", "must lie between 1 and 1024"),
        ("max_waiting", None, "must be a whole number"),
        ("memory_fraction", "nan", "must be a number"),
        ("memory_fraction", float("inf"), "must be a number"),
        ("memory_fraction", 10**400, "must be a number"),
        ("memory_fraction", "1.01", "must lie between 0.01 and 1"),
        ("prefix_cache", "maybe", "must be true or false"),
        ("prefix_cache", 1, "must be true or false"),
        ("dtype", "int8", "must be one of auto, float32, bfloat16, float16"),
        ("cache_memory", "12 apples", "such as 512M or 2GiB"),
        ("cache_memory", "-1", "such as 512M or 2GiB"),
        ("cache_memory", "0", "must be at least 1"),
        ("model", "", "must be a non-empty text"),
        ("model", "a\0b", "must be a non-empty text"),
    ],
)
def test_bad_values_are_refused_with_setting_value_source_and_range(name: str, raw: Any, why: str) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(QuireError, match=why) as caught:
        from_flags(**{name: raw})
    error = caught.value
    assert (error.code, error.param) == ("invalid_setting", name)
    assert error.what.startswith(f"{name}=") and f"(from {flag})" in error.what
    assert len(str(error)) < 250 and "\n" not in str(error)


@pytest.mark.parametrize(
    "line", ['max_model_len = "2048"', "max_model_len = 1.5", "offline = 1", 'offline = "true"', "model = ['a']"]
)
def test_toml_values_must_have_the_right_type(tmp_path: Path, line: str) -> None:
    with pytest.raises(QuireError) as caught:
        from_toml(tmp_path, f"[model]\n{line}\n")
    assert caught.value.code == "invalid_setting"


def test_toml_takes_sizes_as_text(tmp_path: Path) -> None:
    assert from_toml(tmp_path, '[cache]\ncache_memory = "2GiB"\nhost_memory = "auto"\n').cache.cache_memory == 2 << 30


def test_a_bad_value_is_refused_even_where_a_flag_overrides_it(tmp_path: Path) -> None:
    with pytest.raises(QuireError, match=r"some\.toml"):
        from_toml(tmp_path, "[engine]\ndepth = 99\n", depth="2")


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("1K", 1000), ("1KB", 1000), ("1KiB", 1024), ("2g", 2 * 10**9), ("2Gi", 2 << 30), ("1_000", 1000),
     ("0.5 MiB", 1 << 19), ("", None), ("i", None), ("5i", None), ("K", None), ("1.5.1", None), ("1PiB", None)],
)  # fmt: skip
def test_sizes(text: str, size: int | None) -> None:
    assert parse_size(text) == size


# -- files


@pytest.mark.parametrize("content", [b"[model\n", b"\xff\xfe", b"x = " + b"9" * 5000, b"x = " + b"[" * 100_000])
def test_a_file_that_is_not_toml_is_one_clear_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(QuireError, match="is not valid TOML") as caught:
        build_config(file=file, env={}, flags={})
    assert caught.value.code == "invalid_config"


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    for file, env in ((tmp_path / "no.toml", {}), (None, {"QUIRE_CONFIG": str(tmp_path)})):
        with pytest.raises(QuireError) as caught:
            build_config(file=file, env=env, flags={})
        assert caught.value.code == "config_not_found"


def test_where_files_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = {"HOME": str(tmp_path / "home"), "QUIRE_CONFIG": str(tmp_path / "variable.toml")}
    places = [
        (tmp_path / "home" / ".config" / "quire" / "config.toml", None, {"HOME": env["HOME"]}),
        (Path("quire.toml"), None, {"HOME": env["HOME"]}),
        (tmp_path / "variable.toml", None, env),
        (tmp_path / "flag.toml", tmp_path / "flag.toml", env),
    ]
    assert find_config_file(None, {"HOME": env["HOME"]}) is None
    for path, file, variables in places:  # each beats those before it
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        assert find_config_file(file, variables) == path
    (tmp_path / "xdg" / "quire").mkdir(parents=True)
    (tmp_path / "xdg" / "quire" / "config.toml").write_text("")
    Path("quire.toml").unlink()
    both = {"HOME": env["HOME"], "XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    assert find_config_file(None, both) == tmp_path / "xdg" / "quire" / "config.toml"


def test_no_search_reads_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quire.toml").write_text("[engine]\ndepth = 2\n")
    assert build_config(file=None, env={}, flags={}).engine.depth == 2
    assert build_config(file=None, env={}, flags={}, search=False).engine.depth is None


# -- what is shown


def test_sources_and_masked_secrets(tmp_path: Path) -> None:
    toml = '[model]\nhub_token = "s3cret"\n[engine]\ndepth = 2\n'
    config = from_toml(tmp_path, toml, {"QUIRE_THREADS": "1"}, dtype="float32")
    shown = {
        name: (value, source) for name, value, source in describe_config(override_config(config, {"order": "fcfs"}))
    }
    file = str(tmp_path / "some.toml")
    assert shown["hub_token"] == (MASK, file)
    assert shown["depth"] == (2, file)
    assert shown["threads"] == (1, "QUIRE_THREADS")
    assert shown["dtype"] == ("float32", "--dtype")
    assert shown["order"] == ("fcfs", "argument")
    assert shown["model"] == ("smollm2", "default")
    assert "s3cret" not in str(shown) + repr(config)
    assert config.model.hub_token == "s3cret"


def test_a_tree_made_by_hand_has_sources_too() -> None:
    shown = {name: source for name, _, source in describe_config(Config(model=ModelConfig(dtype="float16")))}
    assert (shown["dtype"], shown["model"]) == ("code", "default")


def test_a_refused_secret_is_not_shown() -> None:
    with pytest.raises(QuireError) as caught:
        from_flags(hub_token="s3cret\0")
    assert "s3cret" not in str(caught.value)


def test_hub_token_also_comes_from_hf_token(tmp_path: Path) -> None:
    assert from_env(HF_TOKEN="theirs").model.hub_token == "theirs"
    assert from_env(HF_TOKEN="theirs", QUIRE_HUB_TOKEN="ours").model.hub_token == "ours"
    assert from_toml(tmp_path, '[model]\nhub_token = "file"\n', {"HF_TOKEN": "theirs"}).model.hub_token == "file"
