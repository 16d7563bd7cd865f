"""File operations of the agent's tools, run inside the sandbox so that its rules decide what a path may reach.

Reads one request as JSON from stdin and writes one reply as JSON to stdout. Errors are replies too.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import os
import re
import stat
import sys
from collections.abc import Callable
from typing import Any

MAX_READ = 8 << 20  # bytes of a file that is read or edited
MAX_LINE = 2000  # characters of a line that are shown
MAX_ENTRIES = 1000
MAX_MATCHES = 200
MAX_DIFF = 20_000
SKIPPED = {".git", ".hg", "node_modules", "__pycache__", ".venv", "venv", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


class FileError(Exception):
    """What is wrong, in words for the model."""


def read(path: str, start: int = 1, lines: int = 2000) -> dict[str, Any]:
    """Lines of a text file, numbered."""
    text = _load(path)
    everything = text.splitlines()
    first = max(1, start)
    chosen = everything[first - 1 : first - 1 + max(1, lines)]
    width = len(str(first + len(chosen)))
    shown = [f"{first + index:>{width}}\t{_cut(line)}" for index, line in enumerate(chosen)]
    rest = len(everything) - (first - 1) - len(chosen)
    if rest > 0:
        shown.append(f"[… {rest} more lines; read on with start={first + len(chosen)}]")
    if not shown:
        shown = ["[the file is empty]" if not everything else f"[the file has {len(everything)} lines]"]
    return {"text": "\n".join(shown)}


def write(path: str, content: str, dry: bool = False) -> dict[str, Any]:
    """Writes a whole file, and its folders."""
    before = _load(path) if os.path.lexists(path) else None
    diff = _diff(before or "", content, path)
    if not dry:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        _replace(path, content)
    kind = "created" if before is None else ("unchanged" if before == content else "changed")
    return {"text": f"{path}: {kind}, {len(content.splitlines())} lines", "diff": diff, "kind": kind}


def edit(path: str, old: str, new: str, all: bool = False, dry: bool = False) -> dict[str, Any]:
    """Replaces an exact text, which must stand in the file once unless `all`."""
    before = _load(path)
    if not old:
        raise FileError("old is empty. Give the exact text to replace; write_file makes a new file.")
    if old == new:
        raise FileError("old and new are equal, so there is nothing to change.")
    count = before.count(old)
    if count == 0:
        raise FileError(f"{path} does not hold this text. {_nearest(before, old)}")
    if count > 1 and not all:
        where = [before[: found.start()].count("\n") + 1 for found in re.finditer(re.escape(old), before)][:10]
        raise FileError(
            f"{path} holds this text {count} times (lines {', '.join(map(str, where))}). "
            "Give more of its surroundings, or all=true."
        )
    after = before.replace(old, new)
    if not dry:
        _replace(path, after)
    return {"text": f"{path}: {count} replaced", "diff": _diff(before, after, path), "kind": "changed"}


def entries(path: str = ".", pattern: str = "", depth: int = 2) -> dict[str, Any]:
    """Files and folders below a folder, folders first."""
    if not os.path.isdir(path):
        raise FileError(f"{path} is no folder." if os.path.lexists(path) else f"{path} does not exist.")
    found: list[str] = []
    more = False
    for name in _walk(path, max(1, min(depth, 20))):
        if pattern and not _fits(name.rstrip("/"), pattern):
            continue
        if len(found) == MAX_ENTRIES:
            more = True
            break
        found.append(name)
    note = [f"[more than {MAX_ENTRIES} entries; give a pattern or a folder]"] if more else []
    return {"text": "\n".join([*found, *note]) or "[nothing found]"}


def search(pattern: str, path: str = ".", files: str = "", ignore_case: bool = False) -> dict[str, Any]:
    """Lines that match a regular expression."""
    try:
        compiled = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except (re.error, RecursionError, OverflowError) as error:
        raise FileError(f"{pattern!r} is no regular expression: {error}.") from None
    if not os.path.lexists(path):
        raise FileError(f"{path} does not exist.")
    found: list[str] = []
    names = [path] if os.path.isfile(path) else [os.path.join(path, name) for name in _walk(path, 20)]
    for name in names:
        if name.endswith("/") or (files and not _fits(os.path.relpath(name, path), files)):
            continue
        found += _matches(name, compiled, MAX_MATCHES + 1 - len(found))
        if len(found) > MAX_MATCHES:
            found = [*found[:MAX_MATCHES], f"[more than {MAX_MATCHES} matches; narrow the pattern or give files]"]
            break
    return {"text": "\n".join(found) or "[no match]"}


def _matches(name: str, compiled: re.Pattern[str], most: int) -> list[str]:
    try:
        text = _load(name)
    except (FileError, OSError):
        return []
    shown = os.path.normpath(name)
    found: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if compiled.search(line[: 10 * MAX_LINE]):
            found.append(f"{shown}:{number}: {_cut(line.strip(), 300)}")
            if len(found) == most:
                break
    return found


def _walk(folder: str, depth: int) -> Any:
    """Names below a folder, relative to it; folders end with a slash. Links are not followed."""
    todo = [("", 0)]
    while todo:
        prefix, level = todo.pop()
        try:
            listed = sorted(os.scandir(os.path.join(folder, prefix) or "."), key=lambda entry: entry.name)
        except OSError:
            continue
        below = []
        for entry in listed:
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield name + "/"
                if entry.name not in SKIPPED and level + 1 < depth:
                    below.append((name + "/", level + 1))
            else:
                yield name
        todo += reversed(below)


def _fits(name: str, pattern: str) -> bool:
    plain = pattern.removeprefix("**/")
    return fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(os.path.basename(name), plain)


def _load(path: str) -> str:
    """The text of a regular file."""
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode):
        raise FileError(f"{path} is a folder; list shows it.")
    if not stat.S_ISREG(found.st_mode):
        raise FileError(f"{path} is no regular file.")
    if found.st_size > MAX_READ:
        raise FileError(
            f"{path} has {found.st_size} bytes, more than the {MAX_READ} that are read; use search or shell."
        )
    with open(path, "rb") as file:
        data = file.read(MAX_READ + 1)
    if b"\0" in data[:8192]:
        raise FileError(f"{path} is a binary file of {len(data)} bytes.")
    return data.decode("utf-8", "surrogateescape")


def _replace(path: str, text: str) -> None:
    """Writes the file anew beside its place and moves it there, so that it is never half-written. A link is written
    through."""
    place = os.path.realpath(path)
    beside = f"{place}.quire-{os.getpid()}"
    try:
        mode = stat.S_IMODE(os.stat(place).st_mode) & 0o777
    except FileNotFoundError:
        mode = 0o644
    try:
        with open(beside, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)
        os.chmod(beside, mode)
        os.replace(beside, place)
    except BaseException:
        if os.path.lexists(beside):
            os.unlink(beside)
        raise


def _diff(before: str, after: str, path: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), f"a/{path}", f"b/{path}", lineterm="")
    text = "\n".join(lines)
    return text if len(text) <= MAX_DIFF else text[:MAX_DIFF] + "\n[… the rest of the diff is left out]"


def _nearest(text: str, wanted: str) -> str:
    """Returns the place that resembles a text most, for a model whose text differs a little from the file."""
    first = next((line.strip() for line in wanted.splitlines() if line.strip()), "")
    lines = text.splitlines()
    near = difflib.get_close_matches(first, [line.strip() for line in lines[:5000]], n=1, cutoff=0.6)
    if not near:
        return "Read the file again."
    number = next(index for index, line in enumerate(lines) if line.strip() == near[0])
    shown = "\n".join(lines[max(0, number - 1) : number + 4])
    return f"The nearest is at line {number + 1}:\n{shown}\nSpaces and line breaks must agree too."


def _cut(line: str, most: int = MAX_LINE) -> str:
    return line if len(line) <= most else f"{line[:most]}[… {len(line) - most} more characters]"


OPERATIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "read": read,
    "write": write,
    "edit": edit,
    "list": entries,
    "search": search,
}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"ok": True, **OPERATIONS[request["operation"]](**request["arguments"])}
    except FileError as error:
        return {"ok": False, "text": str(error)}
    except OSError as error:
        reason = "it does not exist" if isinstance(error, FileNotFoundError) else (error.strerror or str(error)).lower()
        blocked = (
            " (outside of what the sandbox allows)" if isinstance(error, PermissionError) or error.errno == 30 else ""
        )
        return {"ok": False, "text": f"{error.filename or 'the file'}: {reason}{blocked}."}
    except (TypeError, ValueError, UnicodeError) as error:
        return {"ok": False, "text": f"{error}."}


def main() -> int:
    sys.stdout.write(json.dumps(answer(json.load(sys.stdin))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
