"""A Python interpreter that keeps its variables between calls, inside the sandbox.

Reads requests as lines of JSON from stdin and writes replies as lines of JSON to its first stdout. What the code
prints, also from other languages, goes through a pipe and is kept within bounds.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import threading
import traceback
from typing import Any

KEPT = 64 << 10  # bytes of each end of what one call prints
MAX_VALUE = 10_000  # characters of the last expression's value


class PrintedOutput:
    """Reads the pipe that stands in for stdout and stderr, and keeps its two ends."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(write)
        self._lock = threading.Condition()
        self._head, self._tail, self._count, self._marks = b"", b"", 0, 0
        threading.Thread(target=self._collect, daemon=True).start()

    def _collect(self) -> None:
        while data := os.read(self._read, 1 << 16):
            with self._lock:
                while MARK in data:
                    before, _, data = data.partition(MARK)
                    self._keep(before)
                    self._marks += 1
                    self._lock.notify_all()
                self._keep(data)

    def _keep(self, data: bytes) -> None:
        self._count += len(data)
        room = KEPT - len(self._head)
        self._head += data[:room]
        self._tail = (self._tail + data[room:])[-KEPT:]

    def take(self) -> str:
        """Returns what was printed since the last call."""
        with self._lock:
            wanted = self._marks + 1
            os.write(1, MARK)
            self._lock.wait_for(lambda: self._marks >= wanted, timeout=5)
            dropped = self._count - len(self._head) - len(self._tail)
            note = f"\n[… {dropped} bytes left out …]\n".encode() if dropped > 0 else b""
            text = (self._head + note + self._tail).decode("utf-8", "replace")
            self._head, self._tail, self._count = b"", b"", 0
        return text


MARK = b"\0\x1bquire-end-of-call" + os.urandom(8).hex().encode() + b"\0"


def run(code: str, names: dict[str, Any]) -> bool:
    """Runs the code; the value of a last expression is printed. Returns whether it ended without an exception."""
    try:
        tree = ast.parse(code, "<tool>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<tool>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<tool>", "eval"), names)
            if value is not None:
                names["_"] = value
                shown = repr(value)
                print(shown if len(shown) <= MAX_VALUE else f"{shown[:MAX_VALUE]}[… {len(shown)} characters]")
        return True
    except SystemExit as leaving:
        print(f"SystemExit: {leaving.code}")
        return not leaving.code
    except BaseException as error:
        kept = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(type(error), error, kept)
        return False


def main() -> int:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    printed = PrintedOutput()
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.stdout
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    sys.path.insert(0, os.getcwd())
    for line in requests:
        ok = run(json.loads(line)["code"], names)
        sys.stdout.flush()
        replies.write(json.dumps({"ok": ok, "text": printed.take()}) + "\n")
        replies.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
