"""Turns a conversation into a prompt: checks, renders and encodes it, and builds the grammar of its answer.

The formats of calls, reasoning and answer are read off the model's chat template. The server renders in its text
worker, `LLM.chat` in the calling thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from quire.text.channels import (
    ChannelParser,
    ToolSpec,
    answer_grammar,
    closes_reasoning,
    format_named,
    opens_reasoning,
    tool_grammar,
)
from quire.text.channels.probe import TemplateFormats, describe_template
from quire.text.channels.structural import structural_grammar
from quire.text.conversation.answer import AnswerFormat, AssistantMessage
from quire.text.conversation.replaying import messages_for_template, template_variables
from quire.text.conversation.request import Conversation, ConversationLimits, check_tools
from quire.text.prompts import encode_chat, render_chat
from quire.text.schema import with_schema_warnings
from quire.text.stream import TextStream
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.types import GrammarSpec, QuireError, SamplingParams


@dataclass(slots=True)
class ChatTurn:
    """A conversation's prompt, the grammar of its answer, and the format in which the answer is parsed."""

    text: str
    tokens: list[int]
    grammar: GrammarSpec | None
    grammar_param: str  # the caller's name for the field that the grammar comes from, for errors
    show_special: bool  # the model's markers are special tokens, so they must reach the parser
    format: AnswerFormat

    def make_parser(self) -> ChannelParser:
        return self.format.make_parser()

    def fit(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with this turn's grammar, and with special tokens shown where the parser needs them."""
        shown = params.skip_special_tokens and not self.show_special
        return replace(params, grammar=self.grammar, skip_special_tokens=shown)

    def parse(
        self,
        token_ids: Sequence[int],
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        stop_ids: Collection[int],
        cut: bool,
    ) -> AssistantMessage:
        """Parse an answer's tokens. `cut`: the answer ended at a limit, not by the model."""
        stream = TextStream(tokenizer, self.fit(params), stop_ids)
        text = stream.push(token_ids)
        text += stream.finish()
        return self.format.parse(text, cut=cut or isinstance(stream.stop_reason, str))


@dataclass(frozen=True, slots=True)
class ChatRenderer:
    """Renders conversations for one model, in the formats of its chat template."""

    tokenizer: Tokenizer
    template: ChatTemplate
    formats: TemplateFormats
    specials: Mapping[str, int]  # special tokens that the formats' markers hold
    limits: ConversationLimits | None  # None: the caller is trusted
    special_in_content: bool

    @classmethod
    def from_template(
        cls,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        tool_format: str | None = None,
        limits: ConversationLimits | None = None,
        special_in_content: bool = False,
    ) -> ChatRenderer:
        """Return a renderer for the formats in the template. `tool_format` overrides the template's format of calls."""
        formats = read_formats(template, tool_format)
        specials = _specials_in(tokenizer, formats)
        return cls(tokenizer, template, formats, specials, limits, special_in_content)

    def render(self, conversation: Conversation, max_tokens: int) -> ChatTurn:
        """Return the turn's prompt, of at most `max_tokens` tokens. Raises `QuireError` for an invalid conversation."""
        if self.limits is not None:
            self.limits.check(conversation, self.template.variables)
        check_tools(conversation)
        tools = conversation.tools if conversation.tool_choice != "none" else []
        shows_tools = self.formats.replay.shows_tools
        segments = render_chat(
            self.template,
            self.tokenizer,
            messages_for_template(conversation.messages, tools, self.formats),
            special_in_content=self.special_in_content,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final,
            tools=tools if tools and shows_tools else None,
            **template_variables(tools, self.formats.replay),
            **conversation.template_kwargs,
        )
        text = "".join(segments)
        tokens = encode_chat(self.tokenizer, segments, max_tokens)
        form = answer_format(conversation, self.formats, opens_reasoning(text, self.formats.reasoning))
        calls = self._call_grammar(conversation, form)
        output = conversation.output
        if calls is None and output is not None:
            if output.kind == "structural_tag":
                output = structural_grammar(output, self.tokenizer, conversation.output_param)
            output = with_schema_warnings(output, conversation.output_param)
            if not conversation.continue_final:
                output = answer_grammar(output, form.answer, form.tool_format, self.specials)
        return ChatTurn(
            text,
            tokens,
            self._after_reasoning(conversation, calls or output, text),
            "tools" if calls is not None else conversation.output_param,
            _holds_special(form, self.specials),
            form,
        )

    def _call_grammar(self, conversation: Conversation, form: AnswerFormat) -> GrammarSpec | None:
        """Return the grammar that enforces required calls and the format of calls; None: nothing is enforced."""
        if form.tool_format is None or not form.tools or conversation.tool_choice == "none":
            return None
        try:
            return tool_grammar(
                form.tool_format,
                form.tools,
                conversation.tool_choice,
                parallel=conversation.parallel_tools,
                specials=self.specials,
                leads=self.formats.reasoning is not None,
                answer=conversation.output,
            )
        except QuireError as error:
            raise QuireError(error.code, error.what, error.hint, error.param or "tools") from None

    def _after_reasoning(
        self, conversation: Conversation, grammar: GrammarSpec | None, prompt: str
    ) -> GrammarSpec | None:
        """Return the grammar with the markers of reasoning, which stays free, and with its token budget."""
        tokenizer, style = self.tokenizer, self.formats.reasoning
        is_open = opens_reasoning(prompt, style)
        answers = conversation.continue_final or closes_reasoning(prompt, style)
        if style is None or (answers and not is_open):
            return grammar
        budget = _thinking_budget(conversation)
        if grammar is None and budget is None:
            return None
        close = tuple(tokenizer.encode(style.close, add_special=False))
        # If the prompt does not open reasoning, the model may open it or answer directly.
        opening = () if is_open else tuple(tokenizer.encode(style.open, add_special=False))
        return replace(grammar or GrammarSpec("free"), after_reasoning=close, opens_reasoning=opening, budget=budget)


def read_formats(template: ChatTemplate, configured: str | None) -> TemplateFormats:
    """Return the formats of a template, with the configured format of calls in place of its own."""
    if configured is not None:
        format_named(configured)  # raises for an unknown name, with the list of formats
    return _read_formats(template, configured)


@lru_cache(maxsize=8)
def _read_formats(template: ChatTemplate, configured: str | None) -> TemplateFormats:
    return describe_template(template.render, template.source, configured)


def answer_format(conversation: Conversation, formats: TemplateFormats, reasoning_open: bool) -> AnswerFormat:
    """Return the answer format of this conversation for a model that writes in these formats."""
    looks_for_calls = bool(conversation.tools) and conversation.tool_choice != "none"
    functions = [tool["function"] for tool in conversation.tools] if looks_for_calls else []
    return AnswerFormat(
        formats.tools if looks_for_calls or formats.reads_all else None,
        formats.reasoning,
        formats.answer,
        reasoning_open,
        tuple(ToolSpec(f["name"], f.get("parameters") or {}, bool(f.get("strict"))) for f in functions),
        must_call=conversation.tool_choice not in ("auto", "none"),
    )


def _marker_texts(form: AnswerFormat | TemplateFormats) -> str:
    """All markers of a format in one text."""
    tools = form.tool_format if isinstance(form, AnswerFormat) else form.tools
    style, answer = form.reasoning, form.answer
    own = tools.markers if tools is not None else ()
    return "\n".join([*own, *((style.open, style.close) if style else ()), answer.open, answer.close])


def _specials_in(tokenizer: Tokenizer, formats: TemplateFormats) -> dict[str, int]:
    """The special tokens of the model that its markers hold, by spelling."""
    texts = _marker_texts(formats)
    found = {}
    for spelling in tokenizer.special_spellings:
        if spelling in texts:
            ids = tokenizer.encode(spelling, add_special=False)
            if len(ids) == 1 and tokenizer.is_special(ids[0]):
                found[spelling] = ids[0]
    return found


def _holds_special(form: AnswerFormat, specials: Mapping[str, int]) -> bool:
    texts = _marker_texts(form)
    return any(spelling in texts for spelling in specials)


def _thinking_budget(conversation: Conversation) -> int | None:
    """Return the caller's reasoning budget, or the one in its template variables."""
    if conversation.thinking_budget is not None:
        return conversation.thinking_budget
    budget = conversation.template_kwargs.get("thinking_budget")
    return budget if isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0 else None
