"""Flags generated from the tree: only those given count, and the help says what a person needs."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import pytest

from quire.config import Config, knobs
from quire.config_build import add_config_flags, config_from_args


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No quire.toml of whoever runs the tests."""
    monkeypatch.chdir(tmp_path)


def make_parser(*groups: str) -> ArgumentParser:
    parser = ArgumentParser()
    add_config_flags(parser, groups or None)
    return parser


def test_flags_not_given_leave_no_trace() -> None:
    args = make_parser().parse_args([])
    assert not set(vars(args)) & set(knobs())
    assert config_from_args(args, env={}) == Config()


def test_switches_go_both_ways() -> None:
    parser = make_parser()
    assert config_from_args(parser.parse_args(["--no-prefix-cache"]), env={}).cache.prefix_cache is False
    assert config_from_args(parser.parse_args(["--offline", "--no-offline"]), env={}).model.offline is False


def test_the_help_names_every_knob_its_choices_and_default() -> None:
    text = " ".join(make_parser().format_help().split())
    for item in knobs().values():
        assert item.flag in text
        assert " ".join(item.help.split()) in text
    assert "{auto,cpu,cuda,cuda:N,mps}" in text
    assert "(default: 0.9)" in text
    assert "(default: on)" in text


def test_only_the_groups_asked_for() -> None:
    text = make_parser("engine").format_help()
    assert "--depth" in text
    assert "--max-rows" not in text


def test_other_arguments_of_a_command_are_not_settings() -> None:
    parser = make_parser()
    parser.add_argument("--temperature", type=float)
    config = config_from_args(parser.parse_args(["--temperature", "1", "--depth", "2"]), env={})
    assert config.engine.depth == 2
