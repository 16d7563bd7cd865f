"""Formats read off small chat templates of every shape, and how a conversation comes back to them."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("jinja2")

from quire.text.channels import opens_reasoning
from quire.text.channels.layouts import JsonCalls, NamedCalls, TaggedCalls
from quire.text.channels.probe import TemplateFormats, describe_template
from quire.text.channels.reasoning import THINK
from quire.text.conversation.replaying import messages_for_template, tool_prompt
from quire.text.template import ChatTemplate

HEAD = (
    "{% if tools %}{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
)
CALLS = "{% for call in m.tool_calls %}"
TAIL = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"


def template(calls: str) -> str:
    return f"{HEAD}{THOUGHT}{calls}{TAIL}"


TEMPLATES = {
    "hermes": template(
        CALLS + "{{ '<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + "
        "'\\n</tool_call>' }}{% endfor %}"
    ),
    "list": template(
        "{% if m.tool_calls %}[CALLS][" + CALLS + '{"tool_name": "{{ call.function.name }}", "parameters": '
        "{{ call.function.arguments | tojson }}}{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}"
    ),
    "named": template(
        "{% if m.tool_calls %}<|calls|>" + CALLS + "<|call|>fn.{{ call.function.name }}:{{ loop.index0 }}<|args|>"
        "{{ call.function.arguments | tojson }}<|call_end|>{% endfor %}<|calls_end|>{% endif %}"
    ),
    "tagged": template(
        CALLS + "<call name=\"{{ call.function.name }}\">{% for key, value in call.function.arguments | items %}"
        "<arg name=\"{{ key }}\">{{ value if value is string else value | tojson }}</arg>{% endfor %}"
        "</call>{% endfor %}"
    ),
    "text": template(
        "{% for call in m.tool_calls %}<f>{{ call.function.name + '|' + call.function.arguments }}</f>{% endfor %}"
    ),
}  # fmt: skip
KINDS = {"hermes": JsonCalls, "list": JsonCalls, "named": NamedCalls, "tagged": TaggedCalls, "text": NamedCalls}
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]


def describe(source: str, configured: str | None = None) -> TemplateFormats:
    return describe_template(ChatTemplate(source, {}).render, source, configured)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_layout_is_read(name: str) -> None:
    found = describe(TEMPLATES[name])
    assert isinstance(found.tools, KINDS[name]) and found.reasoning is THINK
    assert not found.is_generic and found.replay.shows_calls
    assert found.replay.form.arguments_as_text == (name == "text")
    assert found.tools.name == ("hermes" if name == "hermes" else "template")


def test_what_is_written_is_what_the_template_renders() -> None:
    arguments = {"city": "Aix", "days": 2}
    for name, source in TEMPLATES.items():
        found = describe(source)
        assert found.tools is not None
        call = {"id": "call00000", "type": "function", "function": {"name": "find", "arguments": json.dumps(arguments)}}
        messages: list[Any] = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
        text = ChatTemplate(source, {}).render(messages_for_template(messages, TOOLS, found), tools=TOOLS)
        written = found.tools.write([("find", json.dumps(arguments))])
        assert written in text, (name, written, text)


def test_a_template_without_tools_gets_them_in_a_message() -> None:
    found = describe(PLAIN)
    assert found.is_generic and found.tools is not None and found.tools.name == "hermes"
    call = {"id": "a", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "42"},
    ]
    prepared = messages_for_template(messages, TOOLS, found)
    assert (
        prepared[0]["content"].startswith("Be kind.\n\n") and tool_prompt(TOOLS, found.tools) in prepared[0]["content"]
    )
    assert prepared[2]["content"].startswith("I look.<tool_call>") and "tool_calls" not in prepared[2]
    assert messages_for_template(messages[1:2], TOOLS, found)[0]["role"] == "system"
    assert messages_for_template(messages[1:2], [], found) == messages[1:2]


def test_none_leaves_tools_out_as_before() -> None:
    found = describe(PLAIN, "none")
    assert found.tools is None and not found.is_generic
    assert messages_for_template([{"role": "user", "content": "x"}], TOOLS, found) == [{"role": "user", "content": "x"}]


def test_a_configured_format_is_used() -> None:
    found = describe(TEMPLATES["tagged"], "mistral")
    assert found.tools is not None and found.tools.name == "mistral" and "configured" in found.notes[0]


def test_a_broken_template_is_described_as_such() -> None:
    found = describe("{{ raise_exception('no') }}")
    assert found.tools is not None and found.reasoning is None and not found.replay.takes_system


def test_a_slow_template_is_given_up() -> None:
    source = "{% for a in range(9000) %}{% for b in range(500) %}{% endfor %}{% endfor %}" + PLAIN
    renders = 0
    compiled = ChatTemplate(source, {})

    def render(*args: Any, **options: Any) -> str:
        nonlocal renders
        renders += 1
        return compiled.render(*args, **options)

    ticks = iter(range(0, 1000, 2))
    found = describe_template(render, source, clock=lambda: float(next(ticks)))
    assert renders <= 2 and found.tools is not None


def test_a_prompt_that_opens_the_reasoning_itself() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n", THINK)
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINK)
    assert not opens_reasoning("what is <think>?<|im_end|>\n<|im_start|>assistant\n", THINK)
    assert not opens_reasoning("<think>", None)
