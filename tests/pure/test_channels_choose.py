"""Which format and which reasoning markers a chat template teaches. The templates here are short ones of the same shape
as real models'."""

from __future__ import annotations

import pytest

from quire.text.channels import choose_format, choose_reasoning, opens_reasoning
from quire.text.channels.reasoning import THINK

LIST_OF_TOOLS = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
HERMES = (
    '{{- \'Call a function as <tool_call>\\n{\\"name\\": <its-name>, \\"arguments\\": <an-object>}\\n</tool_call>\' }}'
)
TEMPLATES = {
    "hermes": LIST_OF_TOOLS + HERMES,
    "hermes ": '{{ \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}{{ call.arguments | tojson }}',
    "qwen3_coder": "{{ '<tool_call>\\n<function=' + call.name + '>\\n<parameter=' + key + '>\\n' + value }}" + HERMES,
    "mistral": "{{ '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments | tojson }}",
    "mistral_list": "{{ '[TOOL_CALLS][' }}{{ call.function | tojson }}{{ ']' }}",
    "deepseek": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments }}",
    "deepseek_fenced": "{{ '<｜tool▁call▁begin｜>' + kind + '<｜tool▁sep｜>' + name + '\\n```json\\n' + arguments }}",
    "llama3": """{{ 'Write {"name": function name, "parameters": its arguments}.' }}{{ "<|python_tag|>" }}""",
}
OTHERS = [
    "{{ messages[0].content }}",
    "{{ '<tool_call>' + name + '<arg_key>' + key + '</arg_key>' }}",
    '{{ \'<tool_call>\\n<invoke name="\' + name }}{{ \'"name": x, "arguments": y\' }}',
    "{{ '<tool_calls>[{\"name\": \"' + name + '\", \"arguments\": ' }}{{ '<tool_call>' }}",
    "{{ '<function=' + name + '>' + arguments + '</function>' }}",
    "{{ '<|channel|>commentary to=' + name }}",
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_formats(name: str) -> None:
    assert choose_format(TEMPLATES[name]) == name.strip()


@pytest.mark.parametrize("template", OTHERS)
def test_unknown_formats_are_not_guessed(template: str) -> None:
    assert choose_format(template) is None


def test_reasoning() -> None:
    assert choose_reasoning("{% if '</think>' in content %}{% endif %}") is THINK
    assert choose_reasoning("{{ '[THINK]' + thoughts + '[/THINK]' }}").open == "[THINK]"  # type: ignore[union-attr]
    assert choose_reasoning("{% set enable_thinking = true %}") is None


def test_a_prompt_that_opens_the_reasoning_itself() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n", THINK)
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINK)
    assert not opens_reasoning("what is <think>?<|im_end|>\n<|im_start|>assistant\n", THINK)
    assert not opens_reasoning("<think>", None)
