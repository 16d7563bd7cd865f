"""Prints a report of the speculation benchmark: rates of each class, acceptance by position, and the bars."""

from __future__ import annotations

from quire.bench.speculation.report import HEADINGS, row_of
from quire.bench.stats import Report
from quire.bench.tables import print_gates, print_table


def show_speculation(report: Report) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    title = f"{report['model']}, speculation {report['speculate']}, {report['isa'] or 'no'} kernels: tok/s of decoding"
    print_table(console, title, HEADINGS, [row_of(result) for result in report["results"]])
    for setting, stats in report["proposers"].items():
        for name, rates in stats["by_position"].items():
            if rates:
                shares = " ".join(f"{rate:.2f}" for rate in rates)
                console.print(f"{setting}, {name}: right by position {shares}", soft_wrap=True)
    print_gates(console, report["bars"])
