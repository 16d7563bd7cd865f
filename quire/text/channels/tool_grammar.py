"""Turns `tool_choice` into a grammar, so that required, named and strict calls are enforced.

Front ends build it once per request and send the `GrammarSpec` to the engine, which compiles it. It is written in the
Lark dialect of the grammar engine, in the format that the model's channel parser reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from quire.text.channels.events import ToolSpec
from quire.text.channels.formats.seam import ToolFormat
from quire.text.channels.grammar_text import GrammarText, call_schema, schema_of
from quire.text.channels.reasoning import AnswerMarkers
from quire.types import GrammarSpec, QuireError

SPACE_AFTER_REASONING = r"/[ \n\t]{0,4}/"


def tool_grammar(
    tool_format: ToolFormat,
    tools: Sequence[ToolSpec],
    choice: str,
    *,
    parallel: bool = True,
    specials: Mapping[str, int] = MappingProxyType({}),
    leads: bool = False,
    answer: GrammarSpec | None = None,
) -> GrammarSpec | None:
    """The grammar for `choice`: "auto", "required", "none", or a tool's name. Returns None if nothing is enforced.

    `specials` maps the spellings of special tokens to their ids; a marker that is one is written as that token only.
    `leads`: reasoning may precede, so leading white space is allowed. With "auto", strict tools give a grammar in which
    text is free and the format's trigger must begin a call. With a constrained `answer`, the output is either calls or
    such an answer.
    """
    is_bound = answer is not None and _can_join(tool_format, tools, answer)
    if choice == "none" or (choice == "auto" and not is_bound and not any(tool.strict for tool in tools)):
        return None
    if choice not in ("auto", "required"):
        tools = [tool for tool in tools if tool.name == choice]
        if not tools:
            what = f"tool_choice names {choice!r}, which is not among the tools."
            raise QuireError("invalid_parameter", what, "Name one of them.", "tool_choice")
    if not tools:
        what = f"tool_choice is {choice!r} but there are no tools."
        raise QuireError("invalid_parameter", what, "Send tools, or tool_choice none.", "tool_choice")
    text = GrammarText(specials)
    after_trigger = text.rule(tool_format.grammar(text, tools, parallel=parallel))
    if choice == "auto" and not is_bound:
        start = tool_format.free(text, after_trigger, parallel=parallel)
    else:
        one = f"{text.spelled(tool_format.trigger)} {after_trigger}" if tool_format.trigger else after_trigger
        one = text.rule(one)
        start = f'{one} ("\\n"? {one})*' if parallel and tool_format.repeats else one
        if choice == "auto" and answer is not None:
            start = _call_or(text, tool_format, tools, start, answer)
        if leads:
            start = f"{text.rule(SPACE_AFTER_REASONING)} {start}"
    return GrammarSpec("ebnf", text.finish(start), warnings=tuple(dict.fromkeys(text.warnings)))


def _can_join(tool_format: ToolFormat, tools: Sequence[ToolSpec], answer: GrammarSpec) -> bool:
    """Whether calls and this answer fit into one grammar. An EBNF answer does not; nor do schemas with references where
    calls and answer become one JSON schema."""
    if answer.kind in ("ebnf", "structural_tag"):
        return False
    texts = [answer.value, *(json.dumps(dict(tool.parameters)) for tool in tools)]
    return not tool_format.plain_key or not any('"$ref"' in text for text in texts)


def _call_or(
    text: GrammarText, tool_format: ToolFormat, tools: Sequence[ToolSpec], calls: str, answer: GrammarSpec
) -> str:
    """The grammar of calls or an answer of that kind."""
    if not tool_format.plain_key or answer.kind not in ("json_object", "json_schema"):
        return f"({text.rule(calls)} | {text.answer(answer)})"
    # Both are JSON, and the grammar engine's lexer would commit to one of them at the first brace, so they share a
    # schema.
    return text.json(
        {"anyOf": [*(call_schema(tool, tool_format.plain_key) for tool in tools), schema_of(answer)]},
        strict=answer.strict and all(tool.strict for tool in tools),
    )


def answer_grammar(
    output: GrammarSpec, answer: AnswerMarkers, tool_format: ToolFormat | None, specials: Mapping[str, int]
) -> GrammarSpec:
    """The grammar of an answer that the model writes after a marker, which may be missing. An EBNF grammar is the
    caller's own and stays as it is."""
    if not answer.open or output.kind in ("ebnf", "free"):
        return output
    text = GrammarText(specials)
    body = text.answer(output)
    opens = _openings(text, answer, tool_format)
    return replace(output, kind="ebnf", value=text.finish(f"({opens})? {body}"))


def _openings(text: GrammarText, answer: AnswerMarkers, tool_format: ToolFormat | None) -> str:
    """The ways in which an answer begins: its marker, or for a format that frames messages also a part of it."""
    whole = text.spelled(answer.open)
    if tool_format is None or not tool_format.frames_text:
        return whole
    rest = answer.open.partition("assistant")[2]
    return f"{whole} | {text.spelled(rest)}" if rest else whole
