"""Prints a report of the hostile benchmark: tables of delays, memory and streams, then answers and problems."""

from __future__ import annotations

from quire.bench.stats import Report
from quire.bench.tables import format_count, format_size, print_gates, print_table


def show_hostile(report: Report) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    settings, phases = report["settings"], report["phases"]
    load = f"load {report['load_before']:.1f} before, {report['load_after']:.1f} after, {report['num_cores']} cores"
    title = f"{settings['model']}, {settings['streams']} streams, {settings['seconds']:g} s an attack; {load}"
    delays = ("loop delay", "p50", "p99", "max", "computing p99", "max")
    print_table(console, title, delays, [_delay_line(phase) for phase in phases])
    sizes = ("", "before", "peak", "after", "workers peak")
    print_table(console, "Memory of the HTTP process", sizes, [_memory_line(phase) for phase in phases])
    counts = ("", "tokens", "lost", "wrong", "longest pause", "refused")
    print_table(console, "What the streams got", counts, [_stream_line(phase) for phase in phases])
    for phase in phases[1:]:
        answers = ", ".join(f"{count} {answer}" for answer, count in sorted(phase["answers"].items()))
        console.print(f"{phase['name']}: {format_size(phase['sent_bytes'])} sent; {answers}", soft_wrap=True)
    for phase in report["phases"]:
        wrong = [f"{what} ({count})" for what, count in phase["wrong_answers"].items()]
        for line in (*wrong, *filter(None, [phase["streams"]["problem"]])):
            console.print(f"{phase['name']}: {line}", style="yellow", soft_wrap=True)
    print_gates(console, report["bars"])


def _delay_line(phase: Report) -> tuple[str, ...]:
    delay, computing = phase["delay_s"], phase["computing_s"]
    return (
        phase["name"],
        *(_ms(delay[name]) for name in ("p50", "p99", "max")),
        *(_ms(computing[name]) for name in ("p99", "max")),
    )


def _memory_line(phase: Report) -> tuple[str, ...]:
    memory = phase["memory"]
    return (phase["name"], *(format_size(memory[name]) for name in ("before", "peak", "after", "workers_peak")))


def _stream_line(phase: Report) -> tuple[str, ...]:
    streams = phase["streams"]
    counts = (format_count(streams[name]) for name in ("tokens", "lost", "wrong"))
    pause, refused = f"{streams['longest_pause']:.2f} s", format_count(streams["told_to_come_back"])
    return phase["name"], *counts, pause, refused


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"
