"""Renders chat messages to prompt text by the model's Jinja template. The front ends hold one `ChatTemplate` per model.

A template that fails or refuses raises `template_error` with the template's message; a model without one raises
`no_chat_template`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from quire.text.tokenizer import Tokenizer
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.text.sandbox import RenderBudget

MAX_PROMPT_CHARS = 32_000_000
MAX_SOURCE_CHARS = 1_000_000
_CUT = "\ue0c1continues-here\ue0c1"  # end of the message to continue; its code point is private
_PROBE = "content-probe"

ContentForm = Literal["string", "list", "either"]
Message = dict[str, Any]


class ChatTemplate:
    """A compiled chat template with the model's special tokens."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        max_chars: int = MAX_PROMPT_CHARS,
        now: Callable[[], datetime] = datetime.now,
    ):
        from quire.text.sandbox import compile_template

        if len(source) > MAX_SOURCE_CHARS:
            raise QuireError("template_error", f"The chat template is {len(source)} characters long.", "Use another.")
        try:
            self._template, self.variables = compile_template(source, now)
        except Exception as error:
            line = getattr(error, "lineno", None)
            raise _template_error(f"has a mistake{f' in line {line}' if line else ''}: {error}") from None
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._forms: dict[str, ContentForm] = {}  # by role; filled at first use

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text with special tokens written out; encode it with `add_special=False`.

        `continue_final_message` leaves the last message open for the model to continue and adds no generation prompt.
        Other keyword arguments are variables of the template, such as `enable_thinking`.
        """
        from quire.text.sandbox import RenderBudget

        _check_messages(messages)
        budget = RenderBudget()  # one budget for the whole call, including the trial of content forms
        prepared = [self._with_fitting_content(message, budget) for message in messages]
        if continue_final_message:
            add_generation_prompt = False
            prepared[-1] = _marked(prepared[-1])
        variables = {"tools": tools, "documents": documents, **kwargs}
        text = self._run(prepared, budget, add_generation_prompt=add_generation_prompt, **variables)
        if continue_final_message:
            text, mark, _ = text.rpartition(_CUT)
            if not mark:
                raise _template_error("does not show the final message, so it can't be continued")
        return text

    def _run(self, messages: list[Message], budget: RenderBudget, **variables: Any) -> str:
        from quire.text.sandbox import BUDGET, TemplateRefusal

        context = {**self._special_tokens, **variables, "messages": messages, BUDGET: budget}
        pieces, num_chars = [], 0
        try:
            for piece in self._template.generate(context):
                num_chars += len(piece)
                if num_chars > self._max_chars:
                    raise OverflowError(f"the prompt is longer than {self._max_chars} characters")
                pieces.append(piece)
        except TemplateRefusal as refusal:
            raise _template_error(f"refused the messages: {refusal}") from None
        except Exception as error:  # a template's expressions can raise any exception
            line = _template_line(error.__traceback__)
            raise _template_error(
                f"failed{f' in line {line}' if line else ''}: {str(error) or type(error).__name__}"
            ) from None
        return "".join(pieces)

    # -- content as a list of text parts

    def _with_fitting_content(self, message: Message, budget: RenderBudget) -> Message:
        """The message with content in a form that the template renders: text parts are joined by line breaks for a
        template that takes strings only, a string becomes a list of one part for a template that takes lists only."""
        content = message.get("content")
        form = self._content_form(message["role"], budget)
        if isinstance(content, str) and form == "list":
            return {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, list) and form == "string":
            return {**message, "content": "\n".join(_text_of(part) for part in content)}
        return message

    def _content_form(self, role: str, budget: RenderBudget) -> ContentForm:
        """The forms of content that the template renders for a role, found by rendering a tiny conversation in both."""
        if role not in ("system", "user", "assistant"):
            return "list" if self._content_form("user", budget) == "list" else "string"
        if role not in self._forms:
            self._forms[role] = self._try_forms(role, budget)
        return self._forms[role]

    def _try_forms(self, role: str, budget: RenderBudget) -> ContentForm:
        as_string = self._try(role, _PROBE, budget)
        as_list = self._try(role, [{"type": "text", "text": _PROBE}], budget)
        # A template without support for lists prints the list's repr or fails.
        shows_list = _PROBE in as_list and not any(f"{quote}{_PROBE}{quote}" in as_list for quote in "'\"")
        if not shows_list:
            return "string"
        return "either" if _PROBE in as_string else "list"

    def _try(self, role: str, content: Any, budget: RenderBudget) -> str:
        """The tiny conversation's text, or an empty one if the template fails on it."""
        empty = "-" if isinstance(content, str) else [{"type": "text", "text": "-"}]
        user, probe = {"role": "user", "content": empty}, {"role": role, "content": content}
        conversation = {"system": [probe, user], "user": [probe], "assistant": [user, probe, user]}[role]
        try:
            return self._run(conversation, budget, add_generation_prompt=False, tools=None, documents=None)
        except QuireError:
            if budget.is_spent:
                raise
            return ""


def template_for(tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate:
    """The model's template, or `override`: Jinja text or the path of a file with it."""
    if override is not None:
        return ChatTemplate(_read_override(override), tokenizer.special_tokens)
    if tokenizer.chat_template is None:
        raise QuireError(
            "no_chat_template",
            "The model has no chat template, so it is not known how to write a conversation for it.",
            "Give one with --chat-template, or let `quire run --raw` or /v1/completions continue plain text.",
        )
    return ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)


def template_source(tokenizer: Tokenizer | None, override: str | None) -> str:
    """The source of the template in use; empty if there is none."""
    if override is not None:
        return _read_override(override)
    return (tokenizer.chat_template if tokenizer is not None else None) or ""


def _read_override(override: str) -> str:
    if "{{" in override or "{%" in override:
        return override
    try:
        return Path(override).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        hint = "Give a file, or the Jinja text itself."
        why = error.strerror if isinstance(error, OSError) else error
        raise QuireError(
            "invalid_parameter", f"The chat template {override[:200]} can't be read: {why}.", hint
        ) from None


def _check_messages(messages: list[Message]) -> None:
    if not isinstance(messages, list) or not messages:
        raise _bad_messages("must be a list with at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _bad_messages(f"[{index}] must be an object with role and content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise _bad_messages(f"[{index}] has no role")
        if content is None and not message.get("tool_calls"):
            raise _bad_messages(f"[{index}] (role {role!r}) has no content")
        if not isinstance(content, (str, list, type(None))):
            raise _bad_messages(f"[{index}] content must be text or a list of parts")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                raise _bad_messages(f"[{index}] content holds a part without a type")
            if part["type"] == "text" and not isinstance(part.get("text"), str):
                raise _bad_messages(f"[{index}] content holds a text part without text")


def _bad_messages(why: str) -> QuireError:
    return QuireError("invalid_parameter", f"messages{'' if why.startswith('[') else ' '}{why}.", param="messages")


def _text_of(part: dict[str, Any]) -> str:
    if part["type"] != "text":
        raise QuireError(
            "invalid_parameter",
            f"The model's chat template takes text only, and a message holds a part of type {part['type']!r}.",
            "Send text parts only.",
            param="messages",
        )
    text: str = part["text"]
    return text


def _marked(message: Message) -> Message:
    """The message with `_CUT` appended to its text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _CUT}
    if isinstance(content, list) and content and content[-1]["type"] == "text":
        last = {**content[-1], "text": content[-1]["text"] + _CUT}
        return {**message, "content": [*content[:-1], last]}
    raise _bad_messages("can't be continued: the final message does not end with text")


def _template_error(what: str) -> QuireError:
    what = " ".join(what.split())[:500].removesuffix(".")
    return QuireError("template_error", f"The chat template {what}.", "Check the messages, or try --chat-template.")


def _template_line(traceback: TracebackType | None) -> int | None:
    """The line of the template that raised an error. Jinja gives its frames the template's line numbers."""
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
