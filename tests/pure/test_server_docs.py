"""`docs/server.md` says what is so: its flags, codes, metrics and lists are the code's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("fastapi")

from quire.config import knobs
from quire.server.anthropic.translate import VOLATILE_HEADERS
from quire.server.http.errors import STATUS_BY_CODE
from quire.text.channels import FORMATS
from quire.text.conversation import TEMPLATE_KWARGS
from tests.pure.test_server_metrics import make_text

TEXT = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
FLAG = re.compile(r"--[a-z][a-z-]+")


def test_every_flag_exists() -> None:
    known = {item.flag for item in knobs().values()} | {"--help"}
    bench = {"--url", "--rate", "--requests", "--html"}
    assert set(FLAG.findall(TEXT)) <= known | bench, set(FLAG.findall(TEXT)) - known - bench


def test_every_code_is_told() -> None:
    missing = [code for code in STATUS_BY_CODE if f"`{code}`" not in TEXT]
    assert not missing, missing
    for code, status in STATUS_BY_CODE.items():
        row = next(line for line in TEXT.splitlines() if line.startswith("| ") and f"`{code}`" in line)
        assert str(status) in row.split("|")[1], f"{code} is {status}"


def test_every_metric_is_told() -> None:
    names = set(re.findall(r"^# TYPE (quire_\w+) ", make_text(), re.MULTILINE))
    names = {name for name in names if not name.endswith("_created")}
    missing = [name for name in names if name not in TEXT and name.removeprefix("quire_engine") not in TEXT]
    assert not missing, missing


def test_lists_are_complete() -> None:
    for name in (*TEMPLATE_KWARGS, *FORMATS, *(header for header in VOLATILE_HEADERS)):
        assert f"`{name}`" in TEXT, name
