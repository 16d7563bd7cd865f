"""Prints a report of the agent benchmark: each request of the first session, then the sums."""

from __future__ import annotations

from quire.bench.stats import SHARES, Report
from quire.bench.tables import format_latencies, format_seconds, print_gates, print_table

_COLUMNS = ("", "after", "pause", "prompt", "cached", "matched", "answer", "TTFT", "tok/s")


def show_agent(report: Report) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    per_session = len(report["requests"]) // report["sessions"]
    title = f"{report['model']}: {report['trace']}, {report['sessions']} at once"
    rows = [_row(number, one) for number, one in enumerate(report["requests"][:per_session], 1)]
    print_table(console, f"{title}; requests of the first", _COLUMNS, rows)
    times = [("first request", report["first_ttft_s"]), ("later requests", report["later_ttft_s"])]
    print_table(console, "Time to first token", ("", *SHARES), [(name, *format_latencies(one)) for name, one in times])
    computed, prompts = report["computed_tokens"], report["prompt_tokens"]
    console.print(
        f"{prompts} tokens of prompts, {computed} of them computed; {report['output_tokens']} written", end=""
    )
    console.print(f" in {report['wall_s']:.1f} s", soft_wrap=True)
    if report["matched"] is None:
        console.print("The engine does not say how many tokens came from its cache.", soft_wrap=True)
    print_gates(console, report["bars"])


def _row(number: int, one: Report) -> tuple[str, ...]:
    matched = "" if one["matched"] is None else f"{one['matched']:.0%}"
    return (
        str(number),
        "tools" if one["after_tools"] else "user",
        f"{one['delay_s']:.2f} s" if one["delay_s"] else "",
        str(one["prompt_tokens"]),
        str(one["cached_tokens"]),
        matched,
        str(one["output_tokens"]),
        format_seconds(one["ttft_s"]),
        f"{one['tokens_per_s']:.1f}",
    )
