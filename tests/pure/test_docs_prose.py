"""Docs for people: paragraphs are short, lines wrapped, and every link and path that they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
HISTORY = ("log.md", "CHANGELOG.md")  # they name files that are gone
PLACES = ("", "quire", "quire/models", "quire/kernels", "quire/text")
OTHERS = ("owner/name", "1_Pooling/config.json")  # on the hub, in a checkpoint
MAX_WORDS = 120
MAX_LINE = 120
PATH = re.compile(r"`((?:[\w.]+/)+[\w.]*)`")
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)


def prose(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.S)


def paragraphs(text: str) -> list[str]:
    """Runs of prose lines; tables, lists, headings and code are not prose."""
    found = [" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\. ))", prose(text))]
    return [part for part in found if part and part[0] not in "|#"]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in HEADING.findall(text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paragraphs_are_short_and_lines_wrapped(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert paragraphs(text)
    long = [f"{len(part.split())} words: {part[:80]}" for part in paragraphs(text) if len(part.split()) > MAX_WORDS]
    long += [line for line in prose(text).splitlines() if len(line) > MAX_LINE and line.lstrip()[0] not in "|#"]
    assert not long


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = []
    for link, anchor in LINK.findall(text):
        target = page.parent / link if link else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            missing.append(f"{link}#{anchor}")
    if page.name not in HISTORY:
        paths = [path for path in PATH.findall(text) if path not in OTHERS]
        missing += [path for path in paths if not any((ROOT / place / path).exists() for place in PLACES)]
    assert not missing
