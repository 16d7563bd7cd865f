"""The rules of docs/speculation.md: each names a test that exists and is run with the rule removed by `tests.rules`."""

from __future__ import annotations

import re
from pathlib import Path

from tests.rules.speculation_removals import SPECULATION_REMOVALS

ROOT = Path(__file__).parents[2]


def test_every_rule_of_the_page_has_a_removal() -> None:
    page = (ROOT / "docs" / "speculation.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    removed = {removal.test.split("::")[1].split("[")[0] for removal in SPECULATION_REMOVALS}
    assert named - removed == {"test_random_moves_with_drafts"}, "which sees all of them"
    assert removed <= named | {"test_random_moves_with_drafts"}


def test_the_removals_fit_the_sources() -> None:
    for removal in SPECULATION_REMOVALS:
        file, name = removal.test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), removal.test
        for edit in removal.edits:
            assert (ROOT / edit.file).read_text(encoding="utf-8").count(edit.text) == 1, (removal.rule, edit.text)
