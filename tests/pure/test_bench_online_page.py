"""The pages: well-formed, self-contained, and right about what they show."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from quire.bench.online.compare import compare_runs
from quire.bench.online.plots import HEIGHT, WIDTH, Axis, Line, cdf_plot, course_plot, dots_plot
from quire.bench.online.report import render_comparison, render_run, warnings
from quire.bench.online.run import Targets
from tests.pure.test_bench_online_compare import load, make_report

SEED = int(os.environ.get("TEST_SEED", "7"))


def parse(page: str) -> ElementTree.Element:
    assert page.startswith("<!doctype html>\n")
    return ElementTree.fromstring(page.removeprefix("<!doctype html>\n"))


def check_self_contained(page: str) -> None:
    """Nothing that a browser would fetch, run or follow; URLs may be shown as text only."""
    root = parse(page)
    tags = {element.tag for element in root.iter()}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "image", "use", "a", "form"}
    names = {name for element in root.iter() for name in element.attrib}
    assert not {name for name in names if name in ("src", "href", "srcset", "action") or name.startswith("on")}
    style = "".join(element.text or "" for element in root.iter("style"))
    assert "url(" not in style and "@import" not in style
    for element in root.iter():
        assert not any("://" in value for value in element.attrib.values())


def text_of(page: str) -> str:
    return " ".join(" ".join(parse(page).itertext()).split())


def check_inside(svg: str) -> None:
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        for name, limit in (("x", WIDTH), ("x1", WIDTH), ("x2", WIDTH), ("cx", WIDTH), ("y", HEIGHT), ("cy", HEIGHT)):
            if name in element.attrib:
                assert -1 <= float(element.attrib[name]) <= limit + 1, ElementTree.tostring(element)
        if "d" in element.attrib:
            assert "nan" not in element.attrib["d"] and "inf" not in element.attrib["d"]


@pytest.mark.parametrize("options", [{}, {"count": 1}, {"failing": 0.3}, {"targets": Targets(0.2, 0.02)}])
def test_a_page_of_a_run(options: dict[str, Any]) -> None:
    report = make_report(**options)
    page = render_run(report)
    check_self_contained(page)
    assert page.count("<svg") == 6
    text = text_of(page)
    assert f"{report['answered']} of {len(report['requests'])}" in text
    assert ("HTTP 500" in text) == bool(report["failed"])
    assert ("good requests" in text) == ("targets" in options)


def test_what_servers_say_can_not_break_the_page() -> None:
    evil = "</style><script src='http://evil.test'>alert(1)</script>\0\x1b[31m&\ud800"
    report = make_report(failing=0.5)
    report["failures"][0] |= {"example": evil, "outcome": evil}
    report |= {"model": evil, "url": evil}
    report["work"]["prompts"] = evil
    page = render_run(report)
    check_self_contained(page)
    assert "alert(1)" in text_of(page) and page.encode("utf-8")


def test_a_page_of_two_runs(tmp_path: Path) -> None:
    a, b = load(tmp_path, "a", targets=Targets(0.2)), load(tmp_path, "b", slower=1.5, count=250, jitter=1)
    page = render_comparison(a.report, b.report, compare_runs(a, b))
    check_self_contained(page)
    assert "B is worse than A." in text_of(page) and page.count('class="line b"') == 4
    same = render_comparison(a.report, a.report, compare_runs(a, a))
    check_self_contained(same)
    assert "B is not worse than A." in text_of(same)


def test_warnings() -> None:
    report = make_report()
    assert warnings(report) == []
    report["client"] |= {"held_back": 3}
    report |= {"without_usage": 2, "short_answers": 1}
    assert [re.sub(r"\D*(\d+).*", r"\1", text) for text in warnings(report)] == ["3", "2", "1"]
    report["client"] |= {"held_back": 0, "lag_s": {"p50": 0, "p90": 0, "p99": 5.0, "max": 6.0}}
    assert "sent late" in warnings(report)[0]
    report["cached_tokens"] = report["prompt_tokens"] // 2
    assert "50% of the prompts" in warnings(report)[1]
    report["work"]["shares_prefixes"] = True
    assert not any("cache" in text for text in warnings(report)), "there it is as it should be"


# -- plots


def test_plots_stay_inside_whatever_they_show() -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    samples: list[list[float]] = [[0.5], [0.0, 0.0], [1e-6, 50.0], [0.2, 0.2, 0.2], [0.0, 3.0]]
    samples += [
        [rng.lognormvariate(0, rng.choice([0.1, 3])) for _ in range(rng.choice([2, 30, 1000]))] for _ in range(20)
    ]
    for values in samples:
        check_inside(cdf_plot("x", [Line("", "a", values)]))
        check_inside(cdf_plot("x", [Line("A", "a", values), Line("B", "b", values[:1])], target=rng.uniform(0.01, 5)))
        check_inside(course_plot("x", "tok/s", [0.1], [Line("", "a", values)]))
        check_inside(dots_plot("x", [(rng.uniform(0, 9), value) for value in values], [1.0] * rng.choice([0, 1, 4000])))
    check_inside(cdf_plot("x", [Line("", "a", [])]))
    check_inside(dots_plot("x", [], []))


@pytest.mark.parametrize("log", [False, True])
def test_ticks_lie_on_the_axis_and_are_few(log: bool) -> None:
    rng = random.Random(SEED)
    for _ in range(300):
        low = 10 ** rng.uniform(-4, 2) if log else 0.0
        scale = Axis(low, (low or 1e-4) * 10 ** rng.uniform(1.1, 5), 0.0, 100.0, log)
        ticks = scale.ticks()
        assert 1 <= len(ticks) <= 7 and ticks == sorted(set(ticks)), (scale, ticks)
        assert all(-0.5 <= scale(tick) <= 100.5 for tick in ticks)


def test_the_curve_passes_through_the_shares() -> None:
    """Four values: after the second, half of the requests are done."""
    svg = cdf_plot("x", [Line("", "a", [1.0, 2.0, 3.0, 4.0])])
    path = next(element.attrib["d"] for element in ElementTree.fromstring(svg).iter("path"))
    heights = [float(place) for place in re.findall(r"V([\d.]+)", path)]
    assert len(heights) == 4
    bottom, top = float(re.findall(r"M[\d.]+ ([\d.]+)", path)[0]), heights[-1]
    assert heights == pytest.approx([bottom + (top - bottom) * share for share in (0.25, 0.5, 0.75, 1)], abs=0.1)
