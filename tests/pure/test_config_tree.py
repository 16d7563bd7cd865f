"""Every leaf of the tree is one knob under one name, reachable from TOML, the environment and the command line."""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from quire.config import Config, Knob, ModelConfig, knobs, tables
from quire.config_build import add_config_flags, build_config, config_from_args


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No quire.toml of whoever runs the tests."""
    monkeypatch.chdir(tmp_path)


def other_value(item: Knob) -> Any:
    """A value the knob allows and that is not its default."""
    if item.kind is bool:
        return not item.default
    if item.choices:
        return next(choice for choice in item.choices if choice != item.default)
    if item.kind is str:
        return "something"
    low = item.low if item.low is not None else 1
    value = item.kind(low if low != item.default else low + 1)
    assert value != item.default
    return value


def as_toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def test_leaf_names_are_unique_over_the_tree() -> None:
    counts = Counter(leaf.name for table in tables().values() for leaf in fields(table))
    assert [name for name, count in counts.items() if count > 1] == []
    assert set(counts) == set(knobs())


@pytest.mark.parametrize("item", knobs().values(), ids=knobs())
def test_every_leaf_is_reachable_three_ways(item: Knob, tmp_path: Path) -> None:
    value = other_value(item)
    file = tmp_path / "q.toml"
    file.write_text(f"[{item.table}]\n{item.name} = {as_toml(value)}\n")
    parser = ArgumentParser()
    add_config_flags(parser)
    if item.kind is bool:
        argv = [item.flag if value else item.flag.replace("--", "--no-")]
    else:
        argv = [item.flag, str(value)]

    from_file = build_config(file=file, env={}, flags={})
    from_env = build_config(file=None, env={item.variable: str(value)}, flags={}, search=False)
    from_flag = config_from_args(parser.parse_args(argv), env={"QUIRE_CONFIG": str(file)})

    for config, source in ((from_file, str(file)), (from_env, item.variable), (from_flag, item.flag)):
        assert item.read(config) == value
        assert type(item.read(config)) is item.kind
        assert config.sources[item.name] == source


@pytest.mark.parametrize("item", knobs().values(), ids=knobs())
def test_every_knob_is_described_and_its_default_allowed(item: Knob) -> None:
    assert item.help
    assert item.kind in (bool, int, float, str)
    if item.default is None:
        assert item.optional
    else:
        build_config(file=None, env={}, flags={item.name: item.default}, search=False)


def test_the_tree_is_frozen_and_comparable() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().model.model = "other"  # type: ignore[misc]
    same = build_config(file=None, env={"QUIRE_MODEL": "smollm2"}, flags={}, search=False)
    assert same == Config()
    assert hash(same) == hash(Config())


def test_a_secret_is_not_in_the_repr() -> None:
    assert "s3cret" not in repr(Config(model=ModelConfig(hub_token="s3cret")))
