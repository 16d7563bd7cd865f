"""The classes of work of the speculation benchmark: requests of users, made from real code and prose.

Each class is drawn from a seed, so that every run and every engine gets the same prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from quire.bench.questions import QUESTIONS
from quire.bench.speculation.texts import Texts

MORE_QUESTIONS = (
    "What is the difference between weather and climate?",
    "Give me three tips for better sleep.",
    "How does a bicycle stay upright?",
    "What should I pack for a weekend in the mountains?",
)


@dataclass(frozen=True, slots=True)
class Task:
    """One conversation of a user."""

    text: str
    tools: list[dict[str, Any]] = field(default_factory=list)  # one of these must be called


@dataclass(frozen=True, slots=True)
class WorkClass:
    """A kind of work, and the ratios that speculation must reach on it."""

    name: str
    make: Callable[[Texts, random.Random], list[Task]]
    bars: dict[str, float]  # instruction set, or "any" -> least ratio
    aim: float | None = None  # on AVX-512
    speculate: str | None = None  # proposers, None: those of the benchmark
    predicts: bool = False  # requests carry a prediction of which nine tenths are right
    streams: int = 1


def _edits(texts: Texts, rng: random.Random) -> list[Task]:
    return _mixed(_code_edits(texts, rng), _prose_edits(texts, rng))


def _code_edits(texts: Texts, rng: random.Random) -> list[Task]:
    return [
        Task(
            f"Rename the function `{one.name}` to `{one.name}_v2` in this code. Answer with the whole code.\n\n"
            f"```python\n{one.code}\n```"
        )
        for one in _shuffled(texts.functions, rng)
    ]


def _prose_edits(texts: Texts, rng: random.Random) -> list[Task]:
    return [
        Task(f"Correct the spelling of this text. Answer with the whole text.\n\n{_misspelt(passage, rng)}")
        for passage in _shuffled(texts.passages, rng)
    ]


def _extracts(texts: Texts, rng: random.Random) -> list[Task]:
    asks = (
        "Copy the sentences of this text that hold a number, word for word, one per line.",
        "List the names of all people and places in this text, one per line.",
        "Extract the facts of this text as a JSON list of quoted sentences.",
    )
    pairs = zip(cycle(asks), _shuffled(texts.passages, rng), strict=False)
    return [Task(f"{ask}\n\n{passage}") for ask, passage in pairs]


def _summaries(texts: Texts, rng: random.Random) -> list[Task]:
    return [Task(f"Summarise this text.\n\n{passage}") for passage in _shuffled(texts.passages, rng)]


def _chats(texts: Texts, rng: random.Random) -> list[Task]:
    return [Task(question) for question in _shuffled([*QUESTIONS, *MORE_QUESTIONS], rng)]


def _tool(name: str, what: str, **parameters: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters, "required": list(parameters), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": what, "parameters": schema}}


TOOLS = (
    _tool(
        "get_weather_forecast",
        "Weather of the next days",
        location={"type": "string", "maxLength": 40},
        temperature_unit={"enum": ["celsius", "fahrenheit"]},
        number_of_days={"type": "integer", "minimum": 1, "maximum": 14},
    ),
    _tool(
        "search_flight_connections",
        "Flights between two cities",
        departure_city={"type": "string", "maxLength": 40},
        destination_city={"type": "string", "maxLength": 40},
        cabin_class={"enum": ["economy", "business", "first"]},
        only_direct_flights={"type": "boolean"},
    ),
    _tool(
        "create_calendar_event",
        "Add an event to the calendar",
        event_title={"type": "string", "maxLength": 60},
        duration_minutes={"type": "integer", "minimum": 5, "maximum": 480},
        reminder_channel={"enum": ["email", "notification", "none"]},
    ),
)
WISHES = (
    "What is the weather in {city} for the next three days?",
    "Find me a flight from {city} to Lisbon.",
    "Put a one hour meeting about {city} into my calendar.",
    "Will it rain in {city} this week?",
    "I want to fly from Oslo to {city} in business class.",
    "Remind me to call the hotel in {city}, half an hour.",
)
CITIES = ("Paris", "Tokyo", "Nairobi", "Lima", "Vienna", "Toronto", "Cairo", "Seoul")


def _tool_calls(texts: Texts, rng: random.Random) -> list[Task]:
    wishes = [wish.format(city=city) for city in CITIES for wish in WISHES]
    return [Task(wish, list(TOOLS)) for wish in _shuffled(wishes, rng)]


def _anything(texts: Texts, rng: random.Random) -> list[Task]:
    kinds = (_chats, _code_edits, _extracts, _prose_edits, _summaries)
    return _mixed(*(kind(texts, rng) for kind in kinds))


# Bars by the instruction set of the machine; "any" holds for all others.
CLASSES: dict[str, WorkClass] = {
    one.name: one
    for one in (
        WorkClass("edit", _edits, {"avx512": 1.5, "avx2": 1.2}, 2.0),
        WorkClass("extract", _extracts, {"avx512": 1.5}, 2.0),
        WorkClass("summarise", _summaries, {}),
        WorkClass("copy", _edits, {"avx512": 1.3, "avx2": 0.98}, speculate="prompt"),
        WorkClass("prediction", _edits, {"avx512": 1.8, "avx2": 1.4}, 2.5, predicts=True),
        WorkClass("tools", _tool_calls, {"avx512": 1.5}),
        WorkClass("chat", _chats, {"any": 0.98}),
        WorkClass("streams", _anything, {"any": 0.98}, streams=16),
    )
}


def draw_tasks(work: WorkClass, texts: Texts, count: int, seed: int) -> list[Task]:
    """Return `count` tasks of a class; a class with fewer prompts repeats none and returns all it has."""
    return work.make(texts, random.Random(f"{seed}/{work.make.__name__}"))[:count]


def nearly_right(text: str, rng: random.Random, share: float = 0.1) -> str:
    """Return a text of which this share of the words is replaced by other words of it."""
    words = text.split(" ")
    for place in range(len(words)):
        if rng.random() < share:
            words[place] = rng.choice(words)
    return " ".join(words)


def _misspelt(text: str, rng: random.Random) -> str:
    """Return a text in which every twelfth long word has two letters exchanged."""
    words = text.split(" ")
    for place, word in enumerate(words):
        if len(word) > 5 and rng.random() < 1 / 12:
            at = rng.randrange(1, len(word) - 2)
            words[place] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)


def _mixed(*kinds: Sequence[Task]) -> list[Task]:
    """Return tasks of all kinds in turn, as many of each."""
    return [task for group in zip(*kinds, strict=False) for task in group]


def _shuffled(items: Sequence[Any], rng: random.Random) -> list[Any]:
    return list(islice(rng.sample(list(items), len(items)), 400))
