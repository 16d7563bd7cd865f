"""Prompts for the routes: encodes conversations and texts, and resolves words in sampling parameters to token ids.

It is the dialects' interface to `textwork`, which does the work in worker processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from quire.edge import Edge
from quire.server.textwork.pool import TextWork
from quire.server.textwork.tasks import (
    CheckBody,
    CheckOutput,
    DecodeTokens,
    EncodeText,
    FindWords,
    RenderChat,
    Setup,
    pack_ids,
    unpack_ids,
)
from quire.text.channels.probe import TemplateFormats
from quire.text.conversation import ChatTurn, Conversation, answer_format, read_formats
from quire.text.resolve import prediction_too_long
from quire.text.template import template_for
from quire.types import GrammarSpec, PromptTooLong, QuireError, SamplingParams

INLINE_CHARS = 256  # texts up to this length are encoded on the event loop, in less than a millisecond
COUNTED_TOKENS = 1 << 20  # token limit of routes that only count or show tokens, which the context does not bound


class ChatPrompts:
    """Makes prompts and resolves parameters for the routes."""

    def __init__(self, edge: Edge, setup: Setup, work: TextWork):
        self._edge, self._work = edge, work
        self._limits = setup.limits
        self._setup = setup
        self._formats = _formats_or_none(edge, setup)

    @property
    def formats(self) -> TemplateFormats | None:
        """The formats of the model's chat template; None without one."""
        return self._formats

    @property
    def tool_format(self) -> str:
        """The name of the format of calls, "template" for one that was read off it, "none" without one."""
        tools = self._formats.tools if self._formats is not None else None
        return tools.name if tools is not None else "none"

    @property
    def format_notes(self) -> list[str]:
        """What was found in the template and how, for a person."""
        return list(self._formats.notes) if self._formats is not None else []

    async def make(self, conversation: Conversation, *, shown: bool = False, room: int = 0) -> ChatTurn:
        """Check, render and encode a conversation. `shown`: for routes that only show or count the prompt. `room`:
        tokens of the context that the prompt must leave free."""
        limit = max(COUNTED_TOKENS, self.max_prompt) if shown else max(1, self.max_prompt - room)
        formats = self._formats if self._formats is not None else _formats_of(self._edge, self._setup)
        made = await self._work.run(RenderChat(conversation, limit, with_text=shown))
        return ChatTurn(
            made.text,
            unpack_ids(made.ids),
            made.grammar,
            made.grammar_param,
            made.show_special,
            answer_format(conversation, formats, made.reasoning_open),
        )

    def reads(self, variable: str) -> bool:
        """Whether the model's chat template reads a variable of this name."""
        return self._formats is not None and variable in self._edge.template().variables

    @property
    def max_prompt(self) -> int:
        return self._edge.max_len - 1  # one token of output must fit

    async def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """A prompt's token ids. Raises for a prompt that exceeds the context."""
        if not isinstance(prompt, str):
            await asyncio.sleep(0)  # yield: a request may hold many such prompts, each takes milliseconds
            return self._edge.encode(prompt)
        if len(prompt) <= INLINE_CHARS:
            return self._edge.encode(prompt)
        return unpack_ids((await self._work.run(EncodeText(prompt, self.max_prompt))).ids)

    async def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        return unpack_ids((await self._work.run(EncodeText(text, COUNTED_TOKENS, add_special))).ids)

    async def detokenize(self, ids: Sequence[int], *, skip_special: bool) -> str:
        text: str = (await self._work.run(DecodeTokens(pack_ids(ids), skip_special))).text
        return text

    async def resolve(self, params: SamplingParams) -> SamplingParams:
        """The effective parameters, with the model's defaults filled in and words as token ids."""
        params = params.resolve(self._edge.defaults)
        if params.prediction:
            task = EncodeText(params.prediction, self.max_prompt, False)
            try:
                ids = unpack_ids((await self._work.run(task)).ids)
            except PromptTooLong as error:
                raise prediction_too_long(error.count, self.max_prompt) from None
            params = replace(params, prediction=None, prediction_ids=tuple(ids))
        breakers = params.dry_breakers if params.dry_multiplier > 0 else ()
        if not params.bad_words and not breakers:
            return params
        found = await self._work.run(FindWords(params.bad_words, breakers))
        return replace(
            params,
            bad_words=(),
            dry_breakers=(),
            bad_token_ids=(*params.bad_token_ids, *found.bad_token_ids),
            dry_breaker_ids=tuple(sorted({*params.dry_breaker_ids, *found.dry_breaker_ids})),
        )

    async def check_output(self, output: GrammarSpec | None, param: str = "response_format") -> GrammarSpec | None:
        """`output` with warnings about parts of the schema that are not enforced."""
        self._limits.check_output(output, param)
        if output is None or output.kind not in ("json_schema", "structural_tag"):
            return output
        found: GrammarSpec = (await self._work.run(CheckOutput(output, param))).grammar
        return found

    async def check_body(self, path: str, body: bytes) -> bytes:
        packed: bytes = (await self._work.run(CheckBody(path, body, self.max_prompt))).packed
        return packed


def _formats_of(edge: Edge, setup: Setup) -> TemplateFormats:
    if edge.tokenizer is None:
        raise QuireError("no_tokenizer", "This model has no tokenizer.")
    return read_formats(template_for(edge.tokenizer, setup.chat_template), setup.tool_format)


def _formats_or_none(edge: Edge, setup: Setup) -> TemplateFormats | None:
    """The formats of the template, or None if the model has none that works; each request then gets the error."""
    try:
        return _formats_of(edge, setup)
    except QuireError as error:
        if error.param == "tool_format":
            raise
        return None
