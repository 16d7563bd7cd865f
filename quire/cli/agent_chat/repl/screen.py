"""Shows a session's events at a terminal: answers as Markdown, reasoning dimmed, calls as compact blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.agent.loop import events
from quire.cli.agent_chat.repl.markdown import LiveArea, MarkdownStream
from quire.cli.output import one_line, print_error, print_note, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

OUTPUT_LINES = 8  # of a call's output that stay on the screen
_TAIL = 4000  # characters of a running call's output


class Screen:
    """Takes events. Threads of tools call `take` one at a time."""

    def __init__(self, console: Console | None = None) -> None:
        if console is None:
            from rich.console import Console

            console = Console(highlight=False)
        self.console = console
        self.shows_reasoning = True
        self._area = LiveArea(console)
        self._answer: MarkdownStream | None = None
        self._reasoning, self._has_reasoned = "", False
        self.shown_diff = ""  # the one that an approval has shown
        self._running: dict[str, tuple[str, str]] = {}  # item id -> (call in one line, end of its output)

    def take(self, event: events.Event) -> None:
        kind, item = event["type"], event.get("item") or {}
        if kind == events.TURN_STARTED:
            self._wait("thinking …")
        elif kind == events.TURN_FAILED:
            self.settle()
            self._failed(event["error"])
        elif kind == events.TURN_COMPLETED:
            self.settle()
        elif item.get("type") == "agent_message":
            self._take_answer(kind, item)
        elif item.get("type") == "reasoning":
            self._take_reasoning(kind, item)
        elif "tool" in item or item.get("id") in self._running:
            self._take_call(kind, item)
        elif item.get("type") == "error":
            self.settle()
            print_note(item["message"])

    def settle(self) -> None:
        """Prints what is still being written, and stops redrawing: something else may write now."""
        self._end_reasoning()
        if self._answer is not None:
            self._answer.finish()
            self._answer = None
        self._area.clear()

    def _wait(self, text: str) -> None:
        from rich.text import Text

        self._area.show(Text(text, "dim"))

    def _failed(self, error: dict[str, Any]) -> None:
        if error.get("status") == "interrupted":
            self.console.print("stopped", style="dim")
        else:
            print_error(error["message"])

    # -- text

    def _take_answer(self, kind: str, item: dict[str, Any]) -> None:
        if kind == events.ITEM_STARTED:
            self._end_reasoning()
            self._answer = MarkdownStream(self._area)
        elif kind == events.ITEM_UPDATED and self._answer is not None:
            self._answer.feed(printable(item["delta"]))
        elif self._answer is not None:
            self._answer.finish()
            self._answer = None

    def _take_reasoning(self, kind: str, item: dict[str, Any]) -> None:
        if kind == events.ITEM_UPDATED:
            self._reasoning += printable(item["delta"])
            whole, line_end, rest = self._reasoning.rpartition("\n")
            if line_end and self.shows_reasoning:
                self._reasoning = rest
                self._print_reasoning(whole)
            self._wait(rest if self.shows_reasoning else "thinking …")
        elif kind == events.ITEM_COMPLETED:
            self._end_reasoning()

    def _end_reasoning(self) -> None:
        rest, self._reasoning = self._reasoning, ""
        if self.shows_reasoning:
            self._print_reasoning(rest)
        if self._has_reasoned:
            self.console.print()
            self._has_reasoned = False

    def _print_reasoning(self, text: str) -> None:
        from rich.text import Text

        self._area.clear()
        if text.strip():
            self._has_reasoned = True
            self.console.print(Text(text.strip("\n"), "dim italic"))

    # -- calls

    def _take_call(self, kind: str, item: dict[str, Any]) -> None:
        if kind == events.ITEM_STARTED:
            self.settle()
            self._running[item["id"]] = (call_title(item), "")
        elif kind == events.ITEM_UPDATED:
            title, tail = self._running.get(item["id"], ("", ""))
            self._running[item["id"]] = (title, (tail + printable(item.get("delta") or ""))[-_TAIL:])
        else:
            self._running.pop(item["id"], None)
            self._area.clear()
            was_shown, self.shown_diff = bool(self.shown_diff) and item.get("diff") == self.shown_diff, ""
            self.console.print(call_block({**item, "diff": ""} if was_shown else item))
        if self._running and kind != events.ITEM_STARTED:  # a call that has just begun may wait for an approval
            self._area.show(self._running_calls())

    def _running_calls(self) -> Text:
        from rich.text import Text

        shown = Text()
        for title, tail in self._running.values():
            shown.append(f"○ {title}\n", "cyan")
            for line in tail.rstrip("\n").splitlines()[-OUTPUT_LINES:]:
                shown.append(f"  {line}\n", "dim")
        return shown


def call_title(item: dict[str, Any]) -> str:
    return one_line(f"{item['tool']} {item.get('command') or ''}")[:200].rstrip()


def call_block(item: dict[str, Any]) -> Text:
    """Returns a call that ended: its line with time and exit code, then its change or the end of its output."""
    from rich.text import Text

    failed = item.get("status") == "failed"
    shown = Text()
    shown.append("● ", "red" if failed else "green")
    shown.append(call_title(item), "bold")
    shown.append(f" · {item.get('seconds') or 0.0:.1f} s", "dim")
    code = item.get("exit_code")
    if code is not None:
        shown.append(f" · exit code {code}", "red" if code else "dim")
    diff = printable(item.get("diff") or "")
    lines = (diff or printable(str(item.get("output") or ""))).rstrip("\n").splitlines()
    most = 40 if diff else OUTPUT_LINES
    kept = lines[:most] if diff else lines[-most:]
    left_out = len(lines) - len(kept)
    if left_out and not diff:
        shown.append(f"\n  … {left_out} lines above", "dim")
    for line in kept:
        shown.append(f"\n  {line}", _diff_style(line) if diff else "dim")
    if left_out and diff:
        shown.append(f"\n  … {left_out} lines more", "dim")
    shown.append("\n")
    return shown


def _diff_style(line: str) -> str:
    if line.startswith(("+++", "---", "@@")):
        return "dim"
    return {"+": "green", "-": "red"}.get(line[:1], "dim")


def diff_text(diff: str) -> Text:
    from rich.text import Text

    shown = Text()
    for line in printable(diff).rstrip("\n").splitlines():
        shown.append(f"  {line}\n", _diff_style(line))
    return shown
