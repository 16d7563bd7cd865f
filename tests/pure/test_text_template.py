"""Chat templates of the shapes models really have, and templates that misbehave."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from quire.text.template import ChatTemplate, template_for
from quire.text.tokenizer import Tokenizer
from quire.types import QuireError
from tests.pure.test_text_support import gguf_of, gpt2_words, train_byte_level

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Header blocks, trimmed content, a date, and text that is indented in the source.
HEADERS = """{{- bos_token }}
{%- set today = strftime_now("%d %b %Y") %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = "" %}
    {%- set rest = messages %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\nToday: " + today + "\\n" + system + "<|eot|>" }}
{%- for message in rest %}
    {{- "<|start|>" ~ message.role ~ "<|end|>\\n\\n" ~ message.content | trim ~ "<|eot|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start|>assistant<|end|>\\n\\n" }}
{%- endif %}
"""
# Strict turns, no system role, the assistant is called "model".
TURNS = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant') }}
{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<turn>' + role + '\n' + message['content'] | trim + '</turn>' }}
{% endfor %}
{% if add_generation_prompt %}{{'<turn>model\n'}}{% endif %}
"""
TOOLS = """{%- if tools %}TOOLS:{% for tool in tools %}{{ tool | tojson }};{% endfor %}
{% endif -%}
{%- set ns = namespace(last_user=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor -%}
{%- for message in messages %}
{%- if message.tool_calls %}[{{ message.role }}]
{%- for call in message.tool_calls %}<call>{{ call.function.arguments | tojson }}</call>{% endfor %}
{%- else %}[{{ message.role }}{{ '*' if loop.index0 == ns.last_user }}]{{ message.content }}
{%- endif %}
{%- endfor %}"""
THINKING = """{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
PARTS_OR_TEXT = """{% for message in messages %}
{{- message.role }}: {% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}
{%- endif %};{% endfor %}"""
PARTS_ONLY = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %};{% endfor %}"
)
PRINTS_ANYTHING = "{% for message in messages %}{{ message.role }}: {{ message.content }};{% endfor %}"

USER = {"role": "user", "content": "Hi <b> & ünï"}
TALK = [USER, {"role": "assistant", "content": " Yes "}, {"role": "user", "content": "Go"}]
SYSTEM = {"role": "system", "content": "Be kind. "}


def template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, **options)


def error_of(source: str, messages: Any = None, **options: Any) -> QuireError:
    with pytest.raises(QuireError) as caught:
        template(source, **options).render([USER] if messages is None else messages)
    assert "\n" not in str(caught.value)
    return caught.value


def test_chatml() -> None:
    assert template(CHATML).render(TALK) == (
        "<|im_start|>user\nHi <b> & ünï<|im_end|>\n<|im_start|>assistant\n Yes <|im_end|>\n"
        "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template(CHATML).render([USER], add_generation_prompt=False).endswith("<|im_end|>\n")


def test_headers_and_date() -> None:
    text = template(HEADERS, now=lambda: datetime(2024, 7, 26)).render([SYSTEM, *TALK])
    assert text == (
        "<s><|start|>system<|end|>\n\nToday: 26 Jul 2024\nBe kind.<|eot|>"
        "<|start|>user<|end|>\n\nHi <b> & ünï<|eot|><|start|>assistant<|end|>\n\nYes<|eot|>"
        "<|start|>user<|end|>\n\nGo<|eot|><|start|>assistant<|end|>\n\n"
    )


def test_blocks_leave_no_white_space_behind() -> None:
    assert template(TURNS).render(TALK) == (
        "<s><turn>user\nHi <b> & ünï</turn>\n<turn>model\nYes</turn>\n<turn>user\nGo</turn>\n<turn>model\n"
    )


@pytest.mark.parametrize(
    ("messages", "words"),
    [([SYSTEM, USER], "System role not supported"), ([USER, USER], "Roles must alternate user/assistant")],
)
def test_the_template_may_refuse_in_its_own_words(messages: list, words: str) -> None:
    error = error_of(TURNS, messages)
    assert error.code == "template_error" and words in error.what


def test_tools_are_plain_json() -> None:
    tools = [{"type": "function", "function": {"name": "f<T>", "description": "é & 'q'"}}]
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": "<1>"}}}],
    }
    text = template(TOOLS).render([USER, call, {"role": "tool", "content": "42"}], tools=tools)
    assert text == (
        'TOOLS:{"type": "function", "function": {"name": "f<T>", "description": "é & \'q\'"}};'
        '[user*]Hi <b> & ünï[assistant]<call>{"x": "<1>"}</call>[tool]42'
    )


def test_further_variables_reach_the_template() -> None:
    assert template(THINKING).render([USER], enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert template(THINKING).render([USER]).endswith("assistant\n")
    assert template("{{ documents[0] }}{{ extra }}").render([USER], documents=[{"a": 1}], extra="!") == "{'a': 1}!"


def test_generation_blocks_and_loop_controls() -> None:
    source = (
        "{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}"
        "{% generation %}{{ message.content }}{% endgeneration %}"
        "{% if loop.index > 1 %}{% break %}{% endif %}{% endfor %}"
    )
    assert template(source).render([SYSTEM, *TALK]) == USER["content"]


# -- a final message to be continued


@pytest.mark.parametrize("source", [CHATML, TURNS, HEADERS, THINKING, PARTS_OR_TEXT, PARTS_ONLY])
@pytest.mark.parametrize("final", ["Sure, here", "Sure: ", "<think>a</think>\nSo", "Hi <b> & ünï"])
def test_a_final_message_is_left_open(source: str, final: str) -> None:
    messages = [USER, {"role": "assistant", "content": final}]
    text = template(source).render(messages, continue_final_message=True)
    shown = final.split("</think>\n")[-1] if source == THINKING else final
    assert text.endswith(shown) and "continues" not in text
    closed = template(source).render(messages, add_generation_prompt=False)
    assert closed.startswith(text.rstrip()) and len(closed) > len(text.rstrip())


def test_parts_can_be_continued_too() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages: list[dict[str, Any]] = [USER, {"role": "assistant", "content": parts}]
    assert template(PARTS_OR_TEXT).render(messages, continue_final_message=True).endswith("assistant: onetwo")
    assert template(CHATML).render(messages, continue_final_message=True).endswith("assistant\none\ntwo")
    assert parts == [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def test_what_is_not_shown_can_not_be_continued() -> None:
    with pytest.raises(QuireError, match="final message"):
        template("{{ messages[0].content }}").render(TALK, continue_final_message=True)
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(QuireError, match="does not end with text"):
        template(TOOLS).render([USER, call], continue_final_message=True)


# -- content as text or as parts


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, "<|im_start|>user\na\nb<|im_end|>\n"),  # fails on lists: joined
        (PRINTS_ANYTHING, "user: a\nb;"),  # would print the list itself: joined
        ("{{ messages | tojson }}", '[{"role": "user", "content": "a\\nb"}]'),  # so would this
        (PARTS_OR_TEXT, "user: ab;"),
        (PARTS_ONLY, "user: ab;"),
    ],
)
def test_parts_are_passed_on_or_joined(source: str, expected: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template(source).render([{"role": "user", "content": parts}], add_generation_prompt=False) == expected


def test_text_becomes_parts_where_only_parts_are_shown() -> None:
    assert template(PARTS_ONLY).render(
        [SYSTEM, {"role": "user", "content": "ab"}, {"role": "tool", "content": "c"}]
    ) == ("system: Be kind. ;user: ab;tool: c;")


def test_each_role_is_tried_on_its_own() -> None:
    source = (
        "{% for message in messages %}{% if message.role == 'system' %}{{ 'S:' + message.content }}"
        "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %};{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}]
    assert template(source).render([{"role": "system", "content": parts}, {"role": "user", "content": "b"}]) == "S:a;b;"


def test_pictures_need_a_template_that_shows_them() -> None:
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}
    assert template(PARTS_OR_TEXT).render([message]) == "user: <image>what?;"
    error = error_of(CHATML, [message])
    assert error.code == "invalid_parameter" and "image" in error.what


# -- bad input and bad templates


@pytest.mark.parametrize(
    "messages",
    [
        [], "hi", {"role": "user"}, ["hi"], [{"content": "x"}], [{"role": "", "content": "x"}],
        [{"role": 1, "content": "x"}], [{"role": "user"}], [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}], [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "text"}]}],
    ],
)  # fmt: skip
def test_messages_are_checked(messages: Any) -> None:
    error = error_of(PRINTS_ANYTHING, messages)
    assert error.code == "invalid_parameter" and error.param == "messages"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("ok\n{% for %}", "line 2"),
        ("{% nonsense %}", "nonsense"),
        ("\n\n{{ messages[0].content + 1 }}", "line 3"),
        ("{{ nothing.at.all }}", "nothing"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{{ messages.__class__.__init__.__globals__ }}", "unsafe"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Range"),
        ("{{ 'x' * 10**9 }}", "too long"),
        ("{{ 'x' * (messages | length) * 999999999 }}", "too long"),
        ("{{ [0] * 10**9 }}", "too long"),
        ("{{ 9 ** 9 ** 9 ** 9 ** 9 }}", "too large"),
        ("{% for i in range(1000) %}{{ 'x' * 1000 }}{% endfor %}", "longer than 100000"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_bad_template_is_one_clear_line(source: str, words: str) -> None:
    error = error_of(source, max_chars=100_000)
    assert error.code == "template_error"
    assert words in error.what


def test_ordinary_arithmetic_is_let_through() -> None:
    assert template("{{ 6 * 7 }} {{ '-' * 3 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 2.5 * 2 }}").render([USER]) == (
        "42 --- 1024 0.5 5.0"
    )


def test_render_leaves_the_messages_alone() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    template(CHATML).render(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


# -- which template


def tokenizer_with(chat_template: str | None) -> Tokenizer:
    metadata = gguf_of(train_byte_level(gpt2_words(), vocab_size=270), "gpt-2")
    return Tokenizer.from_gguf(metadata | ({"tokenizer.chat_template": chat_template} if chat_template else {}))


def test_the_models_own_template_and_special_tokens() -> None:
    assert template_for(tokenizer_with("{{ bos_token }}{{ eos_token }}")).render([USER]) == "<|im_start|><|im_end|>"


def test_a_template_given_instead(tmp_path: Path) -> None:
    tokenizer = tokenizer_with("own")
    assert template_for(tokenizer, "{{ messages[0].role }}").render([USER]) == "user"
    (tmp_path / "t.jinja").write_text("from a file: {{ messages[0].role }}", encoding="utf-8")
    assert template_for(tokenizer, str(tmp_path / "t.jinja")).render([USER]) == "from a file: user"
    with pytest.raises(QuireError) as caught:
        template_for(tokenizer, str(tmp_path / "missing.jinja"))
    assert caught.value.code == "invalid_parameter" and "missing.jinja" in caught.value.what


def test_a_model_without_a_template() -> None:
    with pytest.raises(QuireError) as caught:
        template_for(tokenizer_with(None))
    assert caught.value.code == "no_chat_template"
    assert "--raw" in str(caught.value) and "--chat-template" in str(caught.value)


# -- what real templates do that a plain sandbox refuses


def test_a_template_may_collect_in_its_own_lists_only() -> None:
    source = "{% set ns = namespace(ids=[]) %}{% set _ = ns.ids.append('a') %}{% set _ = ns.ids.extend(['b', 'c']) %}"
    assert template(source + "{{ ns.ids.pop(0) }}{{ ns.ids | join }}{{ (['d'] + ns.ids) | length }}").render(
        [USER]
    ) == ("abc3")
    for change in ("messages.append(1)", "[].append(1) or messages.pop()", "tools.extend([1])"):
        with pytest.raises(QuireError, match="unsafe"):
            template("{{ " + change + " }}").render([USER], tools=[{"a": 1}])
    grow = "{% set own = [0] %}{% for i in range(40) %}{% set _ = own.extend(own) %}{% endfor %}"
    assert "too long" in error_of(grow).what


def test_concatenation_does_not_escape_what_stands_beside_safe_text() -> None:
    assert template("{{ '<a>' ~ ('<b>' | safe) ~ '</a>' }}").render([USER]) == "<a><b></a>"


def test_json_of_what_a_filter_gives_one_by_one() -> None:
    assert template("{{ messages | map(attribute='role') | tojson }}").render([USER]) == '["user"]'
    assert "can't be written as JSON" in error_of("{{ raise_exception | tojson }}").what
