"""Measures the classes of work: two engines of one model in this process, one with speculation, turn about.

Both get each prompt once per temperature and seed, so they must give the same tokens. Rates are those of decoding, from
the first token of an answer to its last, since speculation does not change a prompt's time; many streams are timed as a
whole. Requests of different prompts share nothing: neither cached prefixes nor outputs of earlier requests.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from quire.bench.speculation.tasks import CLASSES, Task, WorkClass, draw_tasks, nearly_right
from quire.bench.speculation.texts import Texts
from quire.bench.stats import Bar, Report
from quire.types import SamplingParams

if TYPE_CHECKING:
    from quire.edge import Output
    from quire.llm import LLM

OpenEngine = Callable[[str], AbstractContextManager["LLM"]]  # the setting `speculate` -> an engine
WARM_UP = Task("Count from one to twenty in words, twice.")


@dataclass(frozen=True, slots=True)
class SpeculationWork:
    """The settings of a measurement."""

    classes: tuple[str, ...] = tuple(CLASSES)
    prompts: int = 20  # per class and temperature
    temperatures: tuple[float, ...] = (0.0, 0.7)
    max_tokens: int = 160
    seed: int = 0
    speculate: str = "auto"


@dataclass(slots=True)
class _Side:
    """The time and tokens of one engine for the same answers."""

    decode_s: list[float] = field(default_factory=list)  # per turn
    whole_s: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    accepted: int = 0
    rejected: int = 0

    def add(self, outputs: Sequence[Output], seconds: float) -> None:
        timings = [output.timing for output in outputs]
        alone = len(outputs) == 1
        self.decode_s.append(timings[0].total - timings[0].first_token if alone else seconds)
        self.whole_s.append(seconds)
        for output in outputs:
            self.answers.append(output.token_ids)
            self.accepted += output.usage.accepted_prediction_tokens
            self.rejected += output.usage.rejected_prediction_tokens


def bench_speculation(
    open_engine: OpenEngine, texts: Texts, work: SpeculationWork, *, isa: str, say: Callable[[str], None] = print
) -> Report:
    """Measure each class at each temperature. `isa` chooses the bars: an instruction set of the CPU kernels, or ""."""
    results: list[Report] = []
    stats: Report = {}
    with ExitStack() as held:
        engines: dict[str, LLM] = {}
        for name in work.classes:
            one = CLASSES[name]
            setting = one.speculate or work.speculate
            for speculate in ("off", setting):
                if speculate not in engines:
                    engines[speculate] = held.enter_context(open_engine(speculate))
                    _answer(engines[speculate], [WARM_UP], [SamplingParams(max_tokens=32, temperature=0.0)], "warm-up")
            for temperature in work.temperatures:
                result = _measure(engines["off"], engines[setting], one, texts, temperature, work)
                results.append(result)
                say(
                    f"{name}, temperature {temperature:g}: {result['off_tps']:.1f} → {result['on_tps']:.1f} tok/s, "
                    f"{result['ratio']:.2f}; {result['tokens_per_step']:.2f} tokens a step"
                )
        model = next(iter(engines.values())).config.model.model
        stats = {setting: _stats_of(llm) for setting, llm in engines.items() if setting != "off"}
    bars = [bar.to_report() for result in results for bar in _bars(result, isa)]
    return {
        "benchmark": "speculation",
        "model": model,
        "isa": isa,
        "speculate": work.speculate,
        "prompts": work.prompts,
        "max_tokens": work.max_tokens,
        "seed": work.seed,
        "results": results,
        "proposers": stats,
        "bars": bars,
        "pass": all(bar["pass"] for bar in bars),
    }


def _stats_of(llm: LLM) -> Report:
    """Return the counters of speculation of one engine."""
    stats = llm.engine.scheduler.speculation
    return {
        "speedup": stats.speedup,
        "audits": stats.audits,
        "audit_share": stats.audit_share,
        "proposers": {one.name: msgspec.structs.asdict(one) for one in stats.proposers},
    }


def accepted_shares(stats: Report) -> dict[str, list[float]]:
    """Return the share of verified guesses that were accepted, by proposer and position."""
    return {
        name: [accepted / verified for accepted, verified in zip(_padded(one), one["verified"], strict=True)]
        for name, one in stats["proposers"].items()
        if one["verified"]
    }


def _padded(counts: Report) -> list[int]:
    return [*counts["accepted"], *[0] * (len(counts["verified"]) - len(counts["accepted"]))]


def _measure(off: LLM, on: LLM, one: WorkClass, texts: Texts, temperature: float, work: SpeculationWork) -> Report:
    count = -(-work.prompts // one.streams) * one.streams
    tasks = draw_tasks(one, texts, count, work.seed)
    sides = {"off": _Side(), "on": _Side()}
    for turn, first in enumerate(range(0, len(tasks), one.streams)):
        group = tasks[first : first + one.streams]
        params = [
            SamplingParams(temperature=temperature, max_tokens=work.max_tokens, seed=work.seed + first + place)
            for place in range(len(group))
        ]
        salt = f"{one.name}/{temperature}/{first}"
        if one.predicts:
            params = _with_predictions(off, group, params, f"{salt}/prediction", work.seed)
        pairs = [("off", off), ("on", on)]
        for name, llm in pairs if turn % 2 else reversed(pairs):
            begin = time.perf_counter()
            outputs = _answer(llm, group, params, salt)
            sides[name].add(outputs, time.perf_counter() - begin)
    return _result(one, temperature, sides["off"], sides["on"])


def _with_predictions(
    llm: LLM, tasks: Sequence[Task], params: Sequence[SamplingParams], salt: str, seed: int
) -> list[SamplingParams]:
    """Return parameters whose predictions are the coming answers with one word in ten replaced."""
    from dataclasses import replace

    answers = _answer(llm, tasks, params, salt)
    rng = random.Random(f"{seed}/{salt}")
    return [replace(p, prediction=nearly_right(a.text, rng)) for p, a in zip(params, answers, strict=True)]


def _answer(llm: LLM, tasks: Sequence[Task], params: Sequence[SamplingParams], salt: str) -> list[Output]:
    conversations = [[{"role": "user", "content": task.text}] for task in tasks]
    tools: dict[str, Any] = {"tools": tasks[0].tools, "tool_choice": "required"} if tasks[0].tools else {}
    return llm.chat(conversations, list(params), salt=salt.encode(), **tools)


def _result(one: WorkClass, temperature: float, off: _Side, on: _Side) -> Report:
    num_tokens = sum(map(len, off.answers))
    decoded = num_tokens - len(off.answers) if one.streams == 1 else num_tokens  # first tokens come with the prompts
    num_steps = max(decoded - on.accepted, 1)
    return {
        "class": one.name,
        "temperature": temperature,
        "streams": one.streams,
        "prompts": len(off.answers),
        "tokens": num_tokens,
        "off_tps": decoded / sum(off.decode_s),
        "on_tps": decoded / sum(on.decode_s),
        "ratio": sum(off.decode_s) / sum(on.decode_s),
        "median_ratio": median(a / b for a, b in zip(off.decode_s, on.decode_s, strict=True) if b > 0),
        "whole_ratio": sum(off.whole_s) / sum(on.whole_s),
        "turns": [round(a / b, 4) for a, b in zip(off.decode_s, on.decode_s, strict=True) if b > 0],
        "tokens_per_step": decoded / num_steps,
        "accepted": on.accepted,
        "rejected": on.rejected,
        "different_answers": sum(a != b for a, b in zip(off.answers, on.answers, strict=True)),
    }


def _bars(result: Report, isa: str) -> list[Bar]:
    what = f"{result['class']}, temperature {result['temperature']:g}"
    bars = CLASSES[result["class"]].bars
    least = bars.get(isa, bars.get("any"))
    found = [Bar(f"{what}: answers that differ", result["different_answers"], 0, "at most")]
    return found if least is None else [Bar(f"{what}: speed-up", result["ratio"], least, "at least"), *found]
