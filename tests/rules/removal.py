"""A removal: how one rule of docs/security.md is taken away, and the test that must fail then.

It is a change of the source: exact text, which must stand there once, and what stands there without the rule.
`tests/pure/test_security.py` checks that the list fits the sources and the page; `__main__` does the removing.
"""

from __future__ import annotations

from dataclasses import dataclass

PURE, CPU, E2E = "tests/pure/test_", "tests/cpu/test_", "tests/e2e/test_"


@dataclass(frozen=True, slots=True)
class Edit:
    file: str
    text: str
    without: str


@dataclass(frozen=True, slots=True)
class Removal:
    threat: str  # the row's first cell
    rule: str  # what is gone
    test: str  # as pytest names it
    edits: tuple[Edit, ...]


def drop(threat: str, rule: str, test: str, file: str, text: str, without: str) -> Removal:
    return Removal(threat, rule, test, (Edit(file, text, without),))
