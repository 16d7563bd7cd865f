"""However a text is cut into chunks, the channels say the same; and they say it as early as it is certain."""

from __future__ import annotations

import itertools
import random

import pytest

from quire.text.channels import FORMATS, Event, TextDelta, ToolCallDelta, make_channel_parser, merge
from tests.pure.test_channels_cases import CASES, REASONING, TOOLS

FORMAT_NAMES = [*FORMATS, "none"]


def parse(name: str, chunks: list[str], **options: bool) -> list[Event]:
    parser = make_channel_parser(name, tools=TOOLS, **options)
    events = [event for chunk in chunks for event in parser.push(chunk)]
    return merge(events + parser.finish())


def texts(name: str) -> list[str]:
    bodies = CASES[name]
    return bodies + [think.format(body=body[:40]) + body for think in REASONING for body in bodies[:3]]


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_every_split_in_two(name: str) -> None:
    for text in CASES[name]:
        whole = parse(name, [text])
        for cut in range(1, len(text)):
            assert parse(name, [text[:cut], text[cut:]]) == whole, (text, cut)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("think", REASONING)
def test_every_split_of_reasoning(think: str, is_open: bool) -> None:
    for body in CASES["hermes"][1:4]:
        text = think.format(body=body[:40]) + body
        whole = parse("hermes", [text], reasoning=True, reasoning_open=is_open)
        for cut in range(1, len(text)):
            chunks = [text[:cut], text[cut:]]
            assert parse("hermes", chunks, reasoning=True, reasoning_open=is_open) == whole, (text, cut)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_character_by_character_and_random_chunks(name: str) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for text in texts(name):
        whole = parse(name, [text], reasoning=True)
        assert parse(name, list(text), reasoning=True) == whole, text
        for _ in range(8):
            cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 12)))
            edges = [0, *cuts, len(text)]
            chunks = [text[a:b] for a, b in itertools.pairwise(edges)]
            assert parse(name, chunks, reasoning=True) == whole, (text, chunks)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_random_mixtures_of_fragments(name: str) -> None:
    """Markers and pieces of JSON thrown together: no crash, no chunking that shows, and nothing of it lost."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    pieces = ["{", "}", '"name"', ":", '"get_weather"', '"arguments"', "{}", ",", " ", "\n", "[", "]", "\\", '"', "<",
              "word", "<think>", "</think>", *(FORMATS[name].markers if name in FORMATS else ()), "<function=f>",
              "<parameter=p>", "</parameter>", "</function>", "get_weather", "```json", '{"name": "get_weather", '
              '"arguments": {"a": 1}}', "a.call(b=1)"]  # fmt: skip
    for _ in range(150):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 25)))
        whole = parse(name, [text], reasoning=True)
        assert parse(name, list(text), reasoning=True) == whole, text
        cut = rng.randrange(len(text) + 1)
        assert parse(name, [text[:cut], text[cut:]], reasoning=True) == whole, text


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_long_runs_stay_bounded_and_chunk_free(name: str) -> None:
    opening = FORMATS[name].trigger if name in FORMATS else ""
    for text in (
        "a" + " " * 5000 + opening + "b",
        opening + '{"name": "get_weather", "x": "' + "y" * 40_000 + '"}' + opening,
        opening + '{"arguments": {"a": "' + "y" * 40_000 + '"}, "name": "get_weather"}' + opening + "z",
        opening + "[" * 3000 + "]" * 3000,
        opening + '{"name": "get_weather", "arguments": ' + '{"a":' * 2000,
    ):
        whole = parse(name, [text])
        chunks = [text[i : i + 997] for i in range(0, len(text), 997)]
        assert parse(name, chunks) == whole


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_text_is_out_at_once(name: str) -> None:
    """Each word is out when its last character came in; only white space waits for what follows it."""
    parser = make_channel_parser(name, tools=TOOLS, reasoning=True)
    text, shown = "Some words, a < b, [ok] and {x}. Then more", ""
    for end, char in enumerate(text, 1):
        shown += "".join(event.text for event in parser.push(char) if isinstance(event, TextDelta))
        assert shown.rstrip() == text[:end].rstrip() or text[:end].endswith(("<", "["))


@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek", "llama3", "json", "qwen3_coder"])
def test_arguments_are_out_at_once(name: str) -> None:
    text = next(case for case in CASES[name] if "Aix" in case)
    parser, shown = make_channel_parser(name, tools=TOOLS), ""
    for char in text[: text.index("Aix") + 2]:
        shown += "".join(event.arguments for event in parser.push(char) if isinstance(event, ToolCallDelta))
    assert shown.endswith('"Ai')
