"""Seventy real chat templates: calls, reasoning and answers are found, and read back as they were rendered.

The table of the results is printed by `pytest -s tests/pure/test_templates.py -k table`; docs/templates.md holds it.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")

from quire.engine.grammar.matcher import Grammar, GrammarCompiler
from quire.text.channels import (
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    ToolSpec,
    make_channel_parser,
    merge,
    opens_reasoning,
    tool_grammar,
)
from quire.text.channels.probe import TemplateFormats, describe_template
from quire.text.conversation.replaying import messages_for_template, template_variables
from quire.text.template import ChatTemplate
from tests.pure.real_templates import NUM_TEMPLATES, templates

SOURCES = templates()
pytestmark = pytest.mark.skipif(not SOURCES, reason="run `python -m tests.pure.real_templates` for the templates")

# Templates without a place for tools: the generic prompt describes the tools.
NO_TOOLS = {
    "HuggingFaceTB-SmolLM3-3B", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1", "google-gemma-2-2b-it", "llama-cpp-rwkv-world", "microsoft-Phi-3.5-mini-instruct",
}  # fmt: skip
# Templates that write one call per message, or refuse more.
ONE_CALL = {
    "GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B", "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct", "openai-gpt-oss-120b",
}  # fmt: skip
# Templates whose models do not reason, or do so without markers.
NO_REASONING = {
    "Apertus-8B-Instruct", "CohereForAI-c4ai-command-r-plus-tool_use", "GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B",
    "Kimi-K2-Instruct", "LFM2-8B-A1B", "MiMo-VL", "MiniMax-M1", "Mistral-Small-3.2-24B-Instruct-2506",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Qwen-Qwen2.5-7B-Instruct", "Qwen3-Coder", "fireworks-ai-llama-3-firefunction-v2", "google-gemma-2-2b-it",
    "ibm-granite-granite-4.0", "ibm-granite-granite-4.1", "meetkai-functionary-medium-v3.1",
    "meetkai-functionary-medium-v3.2", "meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct", "microsoft-Phi-3.5-mini-instruct", "mistralai-Mistral-Nemo-Instruct-2407",
    "moonshotai-Kimi-K2", "unsloth-Apriel-1.5", "unsloth-mistral-Devstral-Small-2507",
}  # fmt: skip

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where."},
        "days": {"type": "integer", "description": "How many."},
        "safe": {"type": "boolean", "description": "Whether."},
        "tags": {"type": "array", "items": {"type": "string"}, "description": "Which."},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
SPECS = (
    ToolSpec("get_weather", WEATHER),
    ToolSpec("clock", {"type": "object", "properties": {}, "additionalProperties": False}),
)
TOOLS = [
    {"type": "function", "function": {"name": spec.name, "description": "A tool.", "parameters": dict(spec.parameters)}}
    for spec in SPECS
]
CALLS = [("get_weather", {"city": 'Aix "en" <P>\nP, 7', "days": 3}), ("clock", {})]
USER = {"role": "user", "content": "What now?"}


@cache
def formats_of(name: str) -> tuple[ChatTemplate, TemplateFormats]:
    template = ChatTemplate(SOURCES[name], {"bos_token": "<bos>", "eos_token": "<eos>"})
    return template, describe_template(template.render, SOURCES[name])


def render(name: str, *messages: dict[str, Any], prompts: bool = False, **variables: Any) -> str:
    template, formats = formats_of(name)
    prepared = messages_for_template([USER, *messages], TOOLS, formats)
    shown = TOOLS if formats.replay.shows_tools else None
    variables = {**template_variables(TOOLS, formats.replay), **variables}
    return template.render(prepared, tools=shown, add_generation_prompt=prompts, **variables)


def message_of(calls: list[tuple[str, Any]], **fields: str) -> dict[str, Any]:
    made = [
        {"id": f"call{index:05d}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for index, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made, **fields}


def read(formats: TemplateFormats, chunks: list[str], **options: Any) -> list[Any]:
    parser = make_channel_parser(
        formats.tools, reasoning=formats.reasoning or False, answer=formats.answer, tools=SPECS, **options
    )
    return merge([event for chunk in chunks for event in parser.push(chunk)] + parser.finish())


def calls_in(events: list[Any]) -> list[tuple[str, Any]]:
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    arguments = dict.fromkeys(range(len(names)), "")
    for event in events:
        if isinstance(event, ToolCallDelta):
            arguments[event.index] += event.arguments
    return [(name, json.loads(arguments[index])) for index, name in enumerate(names)]


def rendered_turn(name: str, message: dict[str, Any]) -> str:
    """What the template writes for a message after the beginning of the model's turn."""
    whole, prompt = render(name, message), render(name, prompts=True)
    said = render(name, {"role": "assistant", "content": "ANSWERTEXT"})
    begun = [text for text in (prompt, said.partition("ANSWERTEXT")[0]) if whole.startswith(text)]
    shared = max(begun, key=len) if begun else ""
    if not shared:  # the prompt opens or closes reasoning, which the message does not have
        shared = "".join(
            a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(whole, said, strict=False))
        )
        cut = max(shared.rfind("\n"), shared.rfind(">") + 1)
        shared = shared[:cut] if not shared.endswith(":") else shared
    end = said.partition("ANSWERTEXT")[2]
    body = whole[len(shared) :]
    return body[: len(body) - len(end)] if end and body.endswith(end) else body


def test_they_are_all_here() -> None:
    assert len(SOURCES) == NUM_TEMPLATES


@pytest.mark.parametrize("name", SOURCES)
def test_tools_are_found(name: str) -> None:
    _, formats = formats_of(name)
    assert formats.tools is not None
    assert formats.is_generic == (name in NO_TOOLS), formats.notes
    text = render(name)
    assert "get_weather" in text and "clock" in text, "the model must see the tools"


@pytest.mark.parametrize("name", SOURCES)
def test_reasoning_is_found(name: str) -> None:
    _, formats = formats_of(name)
    assert (formats.reasoning is None) == (name in NO_REASONING), formats.notes
    style = formats.reasoning
    if style is None:
        return
    assert style.open != style.close and not style.open.startswith("</")
    text = f"{style.open}I think.\n{style.close}\n{formats.answer.open}It is four.{formats.answer.close}"
    events = read(formats, [text])
    said = "".join(event.text for event in events if isinstance(event, TextDelta))
    thought = "".join(event.text for event in events if not isinstance(event, TextDelta))
    assert (thought.strip(), said.strip()) == ("I think.", "It is four."), formats.notes


@pytest.mark.parametrize("name", SOURCES)
def test_rendered_calls_are_read_back(name: str) -> None:
    _, formats = formats_of(name)
    if not formats.replay.shows_calls:
        body = formats.tools.write([(tool, json.dumps(arguments)) for tool, arguments in CALLS])  # type: ignore[union-attr]
        assert body.strip() in render(name, message_of(CALLS)), "an earlier call is in the conversation"
        assert calls_in(read(formats, [body])) == CALLS
        return
    many = CALLS[:1] if name in ONE_CALL else CALLS
    for calls in (many, CALLS[1:]):
        body = rendered_turn(name, message_of(calls))
        events = read(formats, [body])
        assert calls_in(events) == calls, (body, formats.notes)


@pytest.mark.parametrize("name", SOURCES)
def test_any_chunking_gives_the_same_parse(name: str) -> None:
    _, formats = formats_of(name)
    assert formats.tools is not None
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    style = formats.reasoning
    thought = f"{style.open}so so{style.close}" if style else ""
    text = thought + formats.tools.write([(tool, json.dumps(arguments)) for tool, arguments in CALLS])
    whole = read(formats, [text])
    assert calls_in(whole) == CALLS, text
    assert read(formats, list(text)) == whole
    for at in range(1, len(text)):
        assert read(formats, [text[:at], text[at:]]) == whole
    for _ in range(5):
        cuts = [0, *sorted(rng.randrange(len(text)) for _ in range(9)), len(text)]
        assert read(formats, [text[a:b] for a, b in itertools.pairwise(cuts)]) == whole


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler([*(bytes([byte]) for byte in range(256)), b"<eos>"], (256,), special_ids=(256,))
    yield made
    made.close()


def walk(grammar: Grammar, rng: random.Random) -> str | None:
    """A random text that the grammar lets through; None if it did not end soon."""
    tokens: list[int] = []
    usual = {*range(97, 103), *range(48, 58), *b'"{}[]:, \n<>/=|'}
    for _ in range(900):
        mask = grammar.mask(tokens)
        assert grammar.error is None, (bytes(tokens), str(grammar.error))
        found = [i for i in range(257) if mask[i >> 3] >> (i & 7) & 1]
        if 256 in found and (len(found) == 1 or rng.random() < 0.5):
            return bytes(tokens).decode("utf-8", "replace")
        choices = [i for i in found if i in usual] or [i for i in found if i != 256]
        closing = [i for i in choices if i in b'"}<]]']
        tokens.append(rng.choice(closing if closing and rng.random() < 0.7 else choices))
    return None


@pytest.mark.parametrize("name", SOURCES)
def test_calls_that_a_grammar_binds_are_read_back(name: str, compiler: GrammarCompiler) -> None:
    _, formats = formats_of(name)
    assert formats.tools is not None
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng, finished = random.Random(seed), 0
    for choice, parallel in (("required", True), ("get_weather", False), ("clock", False)):
        spec = tool_grammar(formats.tools, SPECS, choice, parallel=parallel)
        assert spec is not None
        grammar = compiler.compile(spec)
        for _ in range(3):
            text = walk(grammar, rng)
            if text is None:
                continue
            finished += 1
            found = calls_in(read(formats, [text], must_call=True))
            assert found and (parallel or len(found) == 1), text
            for tool, arguments in found:
                assert choice in ("required", tool) and tool in ("get_weather", "clock"), text
                assert tool == "clock" or (isinstance(arguments["city"], str) and isinstance(arguments["days"], int)), (
                    text
                )
                assert tool == "get_weather" or arguments == {}, text
    assert finished


@pytest.mark.parametrize("name", SOURCES)
def test_reasoning_that_the_prompt_opens_is_read_as_such(name: str) -> None:
    _, formats = formats_of(name)
    prompt = render(name, prompts=True, enable_thinking=True)
    style = formats.reasoning
    if style is None or not opens_reasoning(prompt, style):
        pytest.skip("the prompt does not open reasoning")
    events = read(formats, [f"so so{style.close}four"], reasoning_open=True)
    assert [event.text for event in events] == ["so so", "four"]


KINDS = {"JsonCalls": "JSON", "NamedCalls": "name, then JSON", "TaggedCalls": "tagged arguments"}


def table() -> list[str]:
    """One row per template, as docs/templates.md shows them."""
    rows = []
    for name in SOURCES:
        _, formats = formats_of(name)
        tools, style = formats.tools, formats.reasoning
        assert tools is not None
        kind = KINDS.get(type(tools).__name__, tools.name) if not formats.is_generic else "generic prompt"
        if formats.is_generic and formats.replay.shows_calls:
            kind = KINDS[type(tools).__name__] + ", generic prompt"
        trigger = tools.trigger.replace("|", "\\|") or "a JSON object" if tools.plain_key else tools.trigger
        shown = (trigger or ">>>").replace("|", "\\|").replace("\\\\|", "\\|")
        reasoning = f"`{style.open} … {style.close}`".replace("|", "\\|") if style else "none"
        two = "one call per message" if name in ONE_CALL else "both"
        rows.append(f"| {name} | {kind} | `{shown}` | {reasoning} | {two} |")
    return rows


def test_the_table_in_the_documents() -> None:
    text = (Path(__file__).parents[2] / "docs" / "templates.md").read_text(encoding="utf-8")
    missing = [row for row in table() if row not in text]
    assert not missing, "\n".join(missing)


if __name__ == "__main__":
    print("\n".join(table()))
