"""The reference pages of docs/: paragraphs are short, and every path they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("architecture", "engine", "cache", "kernels", "loading", "glossary")
READ = (*PAGES, "performance", "quality", "reliability", "security", "server")
MAX_WORDS = 120
PATH = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9]*(?:\.py|\.md|\.cpp)?)`")
LINK = re.compile(r"\]\(([^)#:]+\.md)\)")


def paragraphs(text: str) -> list[str]:
    """Runs of prose lines; tables, lists, headings and code are not prose."""
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    found = [" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\. ))", prose)]
    return [part for part in found if part and part[0] not in "|#"]


@pytest.mark.parametrize("page", READ)
def test_paragraphs_are_short(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    long = [part for part in paragraphs(text) if len(part.split()) > MAX_WORDS]
    assert not long, [f"{len(part.split())} words: {part[:80]}" for part in long]


@pytest.mark.parametrize("page", PAGES)
def test_paths_and_links_exist(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    places = (ROOT, *(ROOT / "quire" / room for room in ("", "models", "kernels", "text")))
    missing = [path for path in PATH.findall(text) if not any((place / path).exists() for place in places)]
    missing += [link for link in LINK.findall(text) if not (ROOT / "docs" / link).exists()]
    assert not missing
