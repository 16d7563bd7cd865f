"""Chat turns without a server: what the prompt says, what binds the answer, and how the answer is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from quire.files.tiny_model import TEMPLATE, make_tiny_model
from quire.text.conversation import ChatRenderer, ConversationLimits, make_conversation
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.types import QuireError, SamplingParams

THINKS = TEMPLATE + "{# <think></think> #}"
HERMES = TEMPLATE + """{% if tools %}<tool_call>{% endif %}{# {"name": 1, "arguments": 2} #}"""
HELLO = [{"role": "user", "content": "hello"}]
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


def renderer(tokenizer: Tokenizer, template: str, **options: Any) -> ChatRenderer:
    return ChatRenderer.from_template(tokenizer, ChatTemplate(template, tokenizer.special_tokens), **options)


def parse(tokenizer: Tokenizer, template: str, text: str, *, cut: bool = False, **options: Any) -> Any:
    turn = renderer(tokenizer, template).render(make_conversation(HELLO, **options), 500)
    ids = tokenizer.encode(text, add_special=False)
    return turn.parse(ids, tokenizer, SamplingParams(stop=("STOP",)), stop_ids=(), cut=cut)


def test_reasoning_content_and_calls_are_told_apart(tokenizer: Tokenizer) -> None:
    message = parse(tokenizer, THINKS, "<think>so so</think>\nfour")
    assert (message.reasoning, message.content, message.tool_calls) == ("so so", "four", [])
    call = '<tool_call>\n{"name": "search", "arguments": {"q": "x"}}\n</tool_call>'
    message = parse(tokenizer, HERMES, f"see:\n{call}", tools=[SEARCH])
    assert message.content == "see:" and [(c.name, c.arguments) for c in message.tool_calls] == [
        ("search", '{"q": "x"}')
    ]
    assert parse(tokenizer, HERMES, call).content == call, "without tools a call is text"


def test_a_call_that_was_cut_is_not_complete(tokenizer: Tokenizer) -> None:
    begin = '<tool_call>\n{"name": "search", "arguments": {"q": "'
    for text, cut in ((begin, True), (begin + "STOP", False)):
        message = parse(tokenizer, HERMES, text, cut=cut, tools=[SEARCH])
        assert [call.is_complete for call in message.tool_calls] == [False] and message.content == ""


def test_what_binds_the_answer(tokenizer: Tokenizer) -> None:
    render = renderer(tokenizer, HERMES).render
    free = render(make_conversation(HELLO, tools=[SEARCH]), 500)
    bound = render(make_conversation(HELLO, tools=[SEARCH], tool_choice="required"), 500)
    assert free.grammar is None and bound.grammar is not None and bound.grammar_param == "tools"
    assert free.tokens == bound.tokens and "<tool_call>" in bound.text and '"name": "search"' in bound.text
    assert bound.fit(SamplingParams()).grammar == bound.grammar


def test_limits_and_the_list_of_variables_are_for_clients(tokenizer: Tokenizer) -> None:
    conversation = make_conversation(HELLO * 3, template_kwargs={"mood": "kind"})
    assert renderer(tokenizer, TEMPLATE).render(conversation, 500).tokens
    for limits, code in (
        (ConversationLimits(2, 1, 64), "too_many_messages"),
        (ConversationLimits(9, 1, 64), "invalid_value"),
    ):
        with pytest.raises(QuireError) as caught:
            renderer(tokenizer, TEMPLATE, limits=limits).render(conversation, 500)
        assert caught.value.code == code


def test_an_unknown_format_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(QuireError, match="'xml' is not known") as caught:
        renderer(tokenizer, TEMPLATE, tool_format="xml")
    assert caught.value.param == "tool_format"


def test_it_needs_neither_torch_nor_the_server() -> None:
    script = (
        "import sys, quire.text.conversation\n"
        "print([name for name in sys.modules if name == 'torch' or name.startswith(('quire.server', 'fastapi'))])"
    )
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
