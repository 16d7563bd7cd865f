"""Prints a report of the speculation benchmark: rates of each class, acceptance by position, and the bars."""

from __future__ import annotations

from quire.bench.speculation.report import HEADINGS, row_of
from quire.bench.speculation.run import accepted_shares
from quire.bench.stats import Report
from quire.bench.tables import print_gates, print_table


def show_speculation(report: Report) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    title = f"{report['model']}, speculation {report['speculate']}, {report['isa'] or 'no'} kernels: tok/s of decoding"
    print_table(console, title, HEADINGS, [row_of(result) for result in report["results"]])
    for setting, stats in report["proposers"].items():
        gain = f"{setting}: {stats['speedup']:.3f} times as fast by the times of steps"
        console.print(f"{gain}; {stats['audits']} audits, {stats['audit_share']:.2%} of the time", soft_wrap=True)
        for name, rates in accepted_shares(stats).items():
            shares = " ".join(f"{rate:.2f}" for rate in rates)
            console.print(f"{setting}, {name}: accepted by position {shares}", soft_wrap=True)
    print_gates(console, report["bars"])
