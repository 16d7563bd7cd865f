"""Layouts that `--tool-format` knows by name, for templates that do not show theirs."""

from __future__ import annotations

from quire.text.channels.formats.seam import ToolFormat
from quire.text.channels.layouts import CallFrame, JsonCalls, NamedCalls, TaggedCalls

_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"

HERMES = JsonCalls("hermes", CallFrame(open="<tool_call>\n", close="\n</tool_call>", between="\n"))
QWEN3_CODER = TaggedCalls(
    "qwen3_coder",
    CallFrame(open="<tool_call>\n<function=", close="\n</tool_call>", between="\n"),
    after_name=">",
    key_open="\n<parameter=",
    value_open=">\n",
    value_close="\n</parameter>",
    end="\n</function>",
)
MISTRAL = NamedCalls("mistral", CallFrame(open="[TOOL_CALLS]"), "[ARGS]", call_id="[CALL_ID]\ue0d0")
MISTRAL_LIST = JsonCalls(
    "mistral_list", CallFrame(section_open="[TOOL_CALLS][", between=", ", section_close="]"), is_list=True
)
DEEPSEEK = NamedCalls(
    "deepseek",
    CallFrame(_DEEPSEEK[0], _DEEPSEEK[1], _DEEPSEEK[2], section_close=_DEEPSEEK[3]),
    _SEPARATOR,
)
DEEPSEEK_FENCED = NamedCalls(
    "deepseek_fenced",
    CallFrame(_DEEPSEEK[0], f"{_DEEPSEEK[1]}function{_SEPARATOR}", f"\n```{_DEEPSEEK[2]}", "\n", _DEEPSEEK[3]),
    "\n```json\n",
)
PRESETS = (HERMES, QWEN3_CODER, MISTRAL, MISTRAL_LIST, DEEPSEEK, DEEPSEEK_FENCED)


class GraniteList(JsonCalls):
    """Granite 3: `<|tool_call|>` before a list of calls. Its template only says so in words."""

    __slots__ = ()
    style = None
    answer = None

    def __init__(self) -> None:
        frame = CallFrame(section_open="<|tool_call|>[", between=", ", section_close="]")
        super().__init__("granite", frame, is_list=True)

    def is_taught_by(self, template: str, found: ToolFormat | None) -> bool:
        return found is None and "<|tool_call|>" in template
