"""Asks at the terminal whether a call may run."""

from __future__ import annotations

from collections.abc import Callable

from quire.agent.permissions import ApprovalRequest, Decision
from quire.agent.tools.seam import Risk
from quire.cli.agent_chat.repl.screen import Screen, diff_text
from quire.cli.output import printable

_WANTS = {
    Risk.READ: "wants to read",
    Risk.WRITE: "wants to write",
    Risk.RUN: "wants to run in the sandbox",
    Risk.OUTSIDE: "wants to run OUTSIDE the sandbox",
}
QUESTION = "Allow? y once, s for this session, n or other words: no > "
_MAX_LINES = 40


class ApprovalPrompt:
    """Implements `AskUser`. Anything but a clear yes is a no, and other words are for the model."""

    def __init__(self, screen: Screen, ask: Callable[[str], str] = input) -> None:
        self._screen, self._ask = screen, ask

    def __call__(self, request: ApprovalRequest) -> tuple[Decision, str]:
        from rich.text import Text

        self._screen.settle()
        shown = Text()
        shown.append(f"{request.tool} ", "bold yellow")
        shown.append(f"{_WANTS[request.risk]}:\n", "yellow")
        lines = printable(request.line).splitlines() or [""]
        for line in lines[:_MAX_LINES]:
            shown.append(f"  {line}\n")
        if len(lines) > _MAX_LINES:
            shown.append(f"  … {len(lines) - _MAX_LINES} lines more\n", "red")
        self._screen.console.print(shown, end="")
        if request.preview is not None and request.preview.diff:
            self._screen.shown_diff = request.preview.diff
            self._screen.console.print(diff_text(request.preview.diff), end="")
        try:
            words = self._ask(QUESTION).strip()
        except EOFError:
            words = ""
        if words.lower() in ("y", "yes"):
            return Decision.ONCE, ""
        if words.lower() in ("s", "session"):
            return Decision.SESSION, ""
        return Decision.NO, "" if words.lower() in ("", "n", "no") else words
