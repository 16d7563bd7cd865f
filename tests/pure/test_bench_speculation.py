"""The speculation benchmark: its prompts, its report and its page, on an engine that answers from a script."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

import pytest

from quire.bench.speculation.report import render_speculation
from quire.bench.speculation.run import SpeculationWork, bench_speculation
from quire.bench.speculation.tables import show_speculation
from quire.bench.speculation.tasks import CLASSES, draw_tasks, nearly_right
from quire.bench.speculation.texts import CodeSample, Texts
from quire.edge import Output
from quire.engine.limits import ProposerCounts, SpeculationStats
from quire.types import SamplingParams, Timing, Usage

TEXTS = Texts(
    [CodeSample(f"name{i}", f"def name{i}():\n    return {i}\n" * 20) for i in range(40)],
    [f"The number {i} is remarkable for its beautiful properties and history. " * 8 for i in range(40)],
)


class ScriptedLLM:
    """Answers each prompt with the same tokens; with speculation twice as fast, or with other tokens."""

    def __init__(self, speculate: str, wrong: bool = False):
        self.speculate, self._wrong = speculate, wrong
        self.calls: list[tuple[bytes, SamplingParams, dict[str, Any]]] = []
        self.engine = self.scheduler = self
        self.config = self.model = self
        counts = ProposerCounts("suffix", [9, 9], [4, 2], [4, 4], [3])
        self.speculation = SpeculationStats([counts, ProposerCounts("grammar")], 1.5, 3, 0.004)

    def __str__(self) -> str:
        return "scripted"

    def chat(self, conversations: list[Any], params: list[SamplingParams], salt: bytes, **more: Any) -> list[Output]:
        outputs = []
        for place, (messages, one) in enumerate(zip(conversations, params, strict=True)):
            self.calls.append((salt, one, more))
            tokens = [len(messages[0]["content"]), *range(place, place + 20)]
            if self._wrong:
                tokens[-1] += 1
            on = self.speculate != "off"
            usage = Usage(10, 0, 21, 10 if on else 0, 3 if on else 0)
            outputs.append(Output("r", [], "some text", tokens, usage=usage, timing=Timing(0, 1.0, 2.0 if on else 3.0)))
        return outputs


def measure(work: SpeculationWork, wrong: bool = False, isa: str = "avx512") -> tuple[Any, dict[str, ScriptedLLM]]:
    opened: dict[str, ScriptedLLM] = {}

    @contextmanager
    def open_engine(speculate: str) -> Iterator[Any]:
        opened[speculate] = ScriptedLLM(speculate, wrong and speculate != "off")
        yield opened[speculate]

    report = bench_speculation(open_engine, TEXTS, work, isa=isa, say=lambda what: None)
    report["model"] = "scripted"
    return report, opened


def test_every_class_is_measured_turn_about_and_compared() -> None:
    report, opened = measure(SpeculationWork(prompts=3))
    assert set(opened) == {"off", "auto", "prompt"}
    assert {(r["class"], r["temperature"]) for r in report["results"]} == {(c, t) for c in CLASSES for t in (0.0, 0.7)}
    alone = [r for r in report["results"] if r["streams"] == 1]
    assert all(r["ratio"] == pytest.approx(2.0) and r["tokens_per_step"] == pytest.approx(2.0) for r in alone)
    assert all(r["prompts"] == (16 if r["streams"] == 16 else 3) for r in report["results"])
    assert report["pass"] or all("streams" in bar["name"] for bar in report["bars"] if not bar["pass"])


def test_no_two_prompts_share_a_salt_and_predictions_come_from_an_answer() -> None:
    _, opened = measure(SpeculationWork(("prediction", "tools"), prompts=3))
    salts = [salt for salt, _, _ in opened["auto"].calls]
    assert len(set(salts)) == len(salts)
    predicted = [params for salt, params, _ in opened["auto"].calls if salt.startswith(b"prediction")]
    assert predicted and all(params.prediction for params in predicted)
    tools = [more for salt, _, more in opened["auto"].calls if salt.startswith(b"tools")]
    assert all(more["tool_choice"] == "required" for more in tools)


def test_answers_that_differ_and_slow_classes_miss_their_bars() -> None:
    report, _ = measure(SpeculationWork(("edit",), prompts=2), wrong=True)
    missed = {bar["name"] for bar in report["bars"] if not bar["pass"]}
    assert missed == {f"edit, temperature {t}: answers that differ" for t in ("0", "0.7")} and not report["pass"]
    slow, _ = measure(SpeculationWork(("edit",), prompts=2), isa="")
    assert not any("speed-up" in bar["name"] for bar in slow["bars"]), "no bar where the instruction set is unknown"


def test_the_page_is_well_formed_and_shows_every_class(capsys: pytest.CaptureFixture[str]) -> None:
    report, _ = measure(SpeculationWork(prompts=2))
    page = render_speculation(report)
    ElementTree.fromstring(page.split("\n", 1)[1])
    for name in CLASSES:
        assert f">{name}<" in page
    assert "suffix" in page and "grammar" not in page.split("Decoding, tokens")[0].split("Speed-up of each turn")[1]
    show_speculation(report)
    shown = capsys.readouterr().out
    assert "accepted by position 0.75 0.00" in shown and "edit, 0.7" in shown


def test_prompts_are_the_same_for_one_seed() -> None:
    for one in CLASSES.values():
        tasks = draw_tasks(one, TEXTS, 20, 3)
        assert len(tasks) == 20 == len({task.text for task in tasks})
        assert tasks == draw_tasks(one, TEXTS, 20, 3) != draw_tasks(one, TEXTS, 20, 4)


def test_nine_tenths_of_a_prediction_are_right() -> None:
    text = " ".join(f"word{i}" for i in range(1000))
    changed = nearly_right(text, random.Random(1)).split(" ")
    same = sum(a == b for a, b in zip(changed, text.split(" "), strict=True))
    assert len(changed) == 1000 and 870 <= same <= 930
