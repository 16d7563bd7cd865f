"""Tool calls as small models write them wrongly: calls in the formats of real templates, each damaged in one way.

A case knows which calls were meant. `None` says that they can't be told, so that running anything is wrong.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Meant = tuple[str, dict[str, Any]]

CALLS: tuple[Meant, ...] = (
    ("shell", {"command": "ls -la src | grep 'a b' && echo \"done\""}),
    ("read_file", {"path": "src/main.py", "start": 3, "lines": 20}),
    ("write_file", {"path": "notes/è.md", "content": '# Title\n\n- {"a": [1, 2]}\n- it\'s <b> & more\n'}),
    ("edit_file", {"path": "calc.py", "old": "return a - b", "new": "return a + b", "all": True}),
    ("search", {"pattern": "def \\w+\\(", "path": "."}),
)


@dataclass(frozen=True, slots=True)
class MalformedCase:
    name: str  # format, damage, tool
    form: str  # of FORMATS
    text: str  # what the model wrote
    meant: tuple[Meant, ...] | None


# -- formats: how a well-formed call looks


def _object(meant: Meant, arguments: str = "arguments") -> str:
    return json.dumps({"name": meant[0], arguments: meant[1]}, ensure_ascii=False)


def _tags(meant: Meant, tool: str, parameter: str, end: str) -> str:
    body = "".join(
        f"<{parameter.format(name)}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for name, value in meant[1].items()
    )
    return f"<{tool.format(meant[0])}>\n{body}</{end}>"


def _pythonic(meant: Meant) -> str:
    return f"{meant[0]}({', '.join(f'{name}={value!r}' for name, value in meant[1].items())})"


def _arg_keys(meant: Meant) -> str:
    pairs = "\n".join(
        f"<arg_key>{name}</arg_key>\n<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>"
        for name, value in meant[1].items()
    )
    return f"<tool_call>{meant[0]}\n{pairs}\n</tool_call>"


def _with_json(start: str, end: str, arguments: str = "arguments") -> Callable[[Meant], str]:
    return lambda meant: start + _object(meant, arguments) + end


def _named(start: str, middle: str, end: str) -> Callable[[Meant], str]:
    return lambda meant: start + meant[0] + middle + json.dumps(meant[1], ensure_ascii=False) + end


JSON_FORMS: dict[str, Callable[[Meant], str]] = {
    "hermes": _with_json("<tool_call>\n", "\n</tool_call>"),
    "hermes, other tag": _with_json("<function_call>", "</function_call>"),
    "bare": _with_json("", ""),
    "bare parameters": _with_json("", "", "parameters"),
    "fenced": _with_json("```json\n", "\n```"),
    "python tag": _with_json("<|python_tag|>", "", "parameters"),
    "mistral list": _with_json("[TOOL_CALLS] [", "]"),
    "granite": _with_json("<|tool_call|>[", "]"),
    "nemotron": _with_json("<TOOLCALL>[", "]</TOOLCALL>"),
    "jamba": _with_json("<tool_calls>[", "]</tool_calls>"),
    "phi": _with_json(" functools[", "]"),
    "xlam": _with_json("[", "]"),
    "internlm": _with_json("<|action_start|><|plugin|>\n", "<|action_end|>\n", "parameters"),
    "openai": lambda meant: json.dumps(
        {"tool_calls": [{"type": "function", "function": {"name": meant[0], "arguments": json.dumps(meant[1])}}]}
    ),
    "mistral": _named("[TOOL_CALLS]", "[ARGS]", ""),
    "deepseek": _named(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek fenced": _named(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi": _named(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "harmony": _named("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"),
    "functionary": _named("", "\n", ""),
    "react": _named("Thought: I look.\nAction: ", "\nAction Input: ", "\nObservation:"),
}
OTHER_FORMS: dict[str, Callable[[Meant], str]] = {
    "qwen coder": lambda meant: f"<tool_call>\n{_tags(meant, 'function={}', 'parameter={}', 'function')}\n</tool_call>",
    "minimax": lambda meant: (
        "<minimax:tool_call>\n"
        + _tags(meant, 'invoke name="{}"', 'parameter name="{}"', "invoke")
        + "\n</minimax:tool_call>"
    ),
    "invoke": lambda meant: (
        "<function_calls>\n" + _tags(meant, 'invoke name="{}"', 'parameter name="{}"', "invoke") + "\n</function_calls>"
    ),
    "glm": _arg_keys,
    "pythonic": lambda meant: f"<|tool_call_start|>[{_pythonic(meant)}]<|tool_call_end|>",
    "bare pythonic": lambda meant: f"[{_pythonic(meant)}]",
}
FORMATS = {**JSON_FORMS, **OTHER_FORMS}

# -- damages: (text, meant) -> (damaged text, what is meant now), or None where the damage does not apply

Damaged = tuple[str, tuple[Meant, ...] | None] | None
Damage = Callable[[str, Meant], Damaged]


def _replace(old: str, new: str) -> Damage:
    return lambda text, meant: (text.replace(old, new), (meant,)) if old in text else None


def _last(char: str) -> Damage:
    """The last of these characters is missing."""

    def damage(text: str, meant: Meant) -> Damaged:
        at = text.rfind(char)
        return None if at < 0 else (text[:at] + text[at + 1 :], (meant,))

    return damage


def _cut(share: float) -> Damage:
    """The text ends early, perhaps before arguments that were meant; unless only markers are missing."""

    def damage(text: str, meant: Meant) -> Damaged:
        kept = text[: int(len(text) * share)]
        is_whole = json.dumps(meant[1], ensure_ascii=False) in kept or _pythonic(meant) in kept
        return kept, ((meant,) if is_whole else None)

    return damage


def _renamed(change: Callable[[str], str]) -> Damage:
    return lambda text, meant: (text.replace(meant[0], change(meant[0]), 1), (meant,))


def _unknown(text: str, meant: Meant) -> Damaged:
    return text.replace(meant[0], "delete_everything", 1), None


def _missing(text: str, meant: Meant) -> Damaged:
    """The first argument has another name."""
    first = next(iter(meant[1]))
    return (text.replace(first, "wrong_name", 1), None) if text.count(first) == 1 else None


def _raw_newlines(text: str, meant: Meant) -> Damaged:
    return (text.replace("\\n", "\n"), (meant,)) if "\\n" in text and "\\\\n" not in text else None


def _single_quotes(text: str, meant: Meant) -> Damaged:
    shown = json.dumps(meant[1], ensure_ascii=False)
    return (text.replace(shown, repr(meant[1]), 1), (meant,)) if shown in text else None


def _unescaped_quotes(text: str, meant: Meant) -> Damaged:
    """Quotes inside a text are not escaped: where the text ends can't be told for certain."""
    return (text.replace('\\"', '"'), None) if '\\"' in text and '\\\\"' not in text else None


def _no_key_quotes(text: str, meant: Meant) -> Damaged:
    made = text
    for key in ("name", "arguments", "parameters", *meant[1]):
        made = made.replace(f'"{key}":', f"{key}:")
    return (made, (meant,)) if made != text else None


def _commented(text: str, meant: Meant) -> Damaged:
    shown = json.dumps(meant[1], ensure_ascii=False)
    return (text.replace(shown, "{ // the arguments\n" + shown[1:], 1), (meant,)) if shown in text else None


def _trailing_comma(text: str, meant: Meant) -> Damaged:
    shown = json.dumps(meant[1], ensure_ascii=False)
    return (text.replace(shown, shown[:-1] + ",}", 1), (meant,)) if shown in text else None


def _as_text(text: str, meant: Meant) -> Damaged:
    shown = json.dumps(meant[1], ensure_ascii=False)
    return (text.replace(shown, json.dumps(shown, ensure_ascii=False), 1), (meant,)) if shown in text else None


def _numbers_as_text(text: str, meant: Meant) -> Damaged:
    return (text.replace("3,", '"3",').replace(": 20", ': "20"'), (meant,)) if ": 20" in text else None


def _escaped(text: str, meant: Meant) -> Damaged:
    """Formats do not escape HTML, so what stands there is what was meant: a file may hold it."""
    if "<b> & more" not in text:
        return None
    old, new = "<b> & more", html.escape("<b> & more")
    return text.replace(old, new), ((meant[0], {**meant[1], "content": meant[1]["content"].replace(old, new)}),)


def _twice(text: str, meant: Meant) -> Damaged:
    return text + "\n" + text, (meant, meant)


def _missing_comma(text: str, meant: Meant) -> Damaged:
    return (text.replace('", "', '" "', 1), None) if '", "' in text else None


def _key_twice(text: str, meant: Meant) -> Damaged:
    first = json.dumps(next(iter(meant[1])))
    shown = json.dumps(meant[1], ensure_ascii=False)
    return (text.replace(shown, "{" + first + ': "other", ' + shown[1:], 1), None) if shown in text else None


def _of_text(text: str, meant: Meant) -> Damaged:
    """Only prose about the call: nothing may run."""
    return f"I would use `{meant[0]}` next, as in the example above.", None


JSON_ONLY = ("last brace missing",)  # elsewhere a brace is part of a text
DAMAGES: dict[str, Damage] = {
    "well formed": lambda text, meant: (text, (meant,)),
    "words before": lambda text, meant: (f"I do that now.\n\n{text}", (meant,)),
    "words behind": lambda text, meant: (f"{text}\n\nI wait for the result.", (meant,)),
    "last brace missing": _last("}"),
    "end marker missing": lambda text, meant: (
        text[: text.rindex("<")] if text.rstrip().endswith(">") and text.rfind("<") > 0 else text.rstrip()[:-1],
        (meant,),
    ),
    "trailing comma": _trailing_comma,
    "single quotes": _single_quotes,
    "typographic quotes": lambda text, meant: (
        (text.replace(f'"{meant[0]}"', f"“{meant[0]}”", 1), (meant,)) if f'"{meant[0]}"' in text else None
    ),
    "keys without quotes": _no_key_quotes,
    "Python's literals": _replace(": true", ": True"),
    "comment": _commented,
    "raw line breaks": _raw_newlines,
    "quotes not escaped": _unescaped_quotes,
    "arguments as text": _as_text,
    "numbers as text": _numbers_as_text,
    "comma missing": _missing_comma,
    "key twice": _key_twice,
    "other key": _replace('"arguments"', '"tool_input"'),
    "name with prefix": _renamed(lambda name: f"functions.{name}"),
    "name in capitals": _renamed(str.upper),
    "name with hyphen": _renamed(lambda name: name.replace("_", "-")),
    "unknown tool": _unknown,
    "unknown argument": _missing,
    "cut at half": _cut(0.5),
    "cut at four fifths": _cut(0.8),
    "HTML escapes": _escaped,
    "two calls": _twice,
    "prose alone": _of_text,
}


def malformed_cases() -> Iterator[MalformedCase]:
    for form, write in FORMATS.items():
        for damage_name, damage in DAMAGES.items():
            for meant in CALLS:
                made = damage(write(meant), meant)
                if made is not None and (form in JSON_FORMS or damage_name not in JSON_ONLY):
                    yield MalformedCase(f"{form}: {damage_name}: {meant[0]}", form, *made)
