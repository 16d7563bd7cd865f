"""Finds calls in an answer's text: in the markers of all known formats, in a code block, or as the whole answer.

A payload is the text between two markers. It is read as JSON, as XML parameters, as a name with JSON behind it, or as
Python calls; the first form that its beginning shows decides.
"""

from __future__ import annotations

import ast
import re
from typing import Any, NamedTuple

from quire.agent.repair.call_shapes import NamedCall, Schemas, calls_of, known_name, object_of, unknown_tool
from quire.agent.repair.lenient_json import MalformedCall, parse_json

# Pairs of markers, with spaces and bars as models vary them. An end may be missing.
_PAIRS = (
    (r"<\s*(?:[a-z]+:)?(?:tool|function)_?-?calls?\s*>", r"<\s*/\s*(?:[a-z]+:)?(?:tool|function)_?-?calls?\s*>"),
    (r"<\s*tool_use\s*>", r"<\s*/\s*tool_use\s*>"),
    (r"<\s*tools\s*>", r"<\s*/\s*tools\s*>"),
    (
        r"<\|?tool_calls?(?:_section)?(?:_start|_begin)?\|?>",
        r"<\|?/tool_calls?(?:_section)?\|?>|<\|?tool_calls?(?:_section)?_end\|?>|<tool_calls?\|>",
    ),
    (r"<\|START_ACTION\|>", r"<\|END_ACTION\|>"),
    (r"<\|tools_prefix\|>", r"<\|tools_suffix\|>"),
    (r"<start_function_call>", r"<end_function_call>"),
    (r"<\|action_start\|>\s*<\|plugin\|>", r"<\|action_end\|>"),
    (r"<[|｜]tool▁calls▁begin[|｜]>", r"<[|｜]tool▁calls▁end[|｜]>"),
    (r"<[|｜]tool▁call▁begin[|｜]>", r"<[|｜]tool▁call▁end[|｜]>"),
    (r"<\|python_tag\|>", r"<\|eom_id\|>|<\|eot_id\|>"),
    (r"\[TOOL_CALLS?\]", r"\[/TOOL_CALLS?\]|</s>"),
    (r"\bfunctools(?=\[)", r"(?!x)x"),
    (r"(?:<\|start\|>assistant)?<\|channel\|>commentary(?= to=)", r"<\|call\|>"),
    (r"(?=<function=|<function name=|<invoke name=)", r"(?!x)x"),
    (r"(?m:^)(?=Action:\s*\S+\s*\n\s*Action Input:)", r"(?m:^)Observation:"),
)
_OPENINGS = re.compile("|".join(f"(?P<m{index}>{opening})" for index, (opening, _) in enumerate(_PAIRS)), re.IGNORECASE)
_CLOSINGS = tuple(re.compile(closing, re.IGNORECASE) for _, closing in _PAIRS)
_FENCE = re.compile(r"```[ \t]*(?P<kind>[\w\-]*)[ \t]*\n(?P<body>.*?)(?:\n```|```|\Z)", re.DOTALL)
_INLINE_CODE = re.compile(r"(?<!`)`[^`\n]+`(?!`)")
_FUNCTION_TAG = re.compile(
    r"<function(?:=|\s+name=)\s*[\"']?([\w.:\-]+)[\"']?\s*>|<invoke\s+name=[\"']?([\w.:\-]+)[\"']?\s*>"
)
_FUNCTION_END = re.compile(r"</function>|</invoke>")
_PARAMETER = re.compile(
    r"<parameter(?:=|\s+name=)\s*[\"']?([\w.\-]+)[\"']?(?:\s+[\w:]+=\"[^\"]*\")*\s*>(.*?)</parameter>", re.DOTALL
)
_ARG_KEY = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_NAME_THEN = re.compile(
    r"\s*(?:to=|call:|function(?![\w.])\s*)?(?:<[|｜]tool▁sep[|｜]>)?\s*([A-Za-z_][\w.\-]*(?::\d+)?)\s*"
    r"(?:<[|｜]tool▁sep[|｜]>|\[ARGS\]|\[CALL_ID\]\w+\[ARGS\]|<\|tool_call_argument_begin\|>|"
    r"(?:<\|constrain\|>\s*\w+|\s+\w+)?\s*<\|message\|>|:)?\s*(?:```(?:json)?\s*)?(?=[{\[])"
)
_REACT = re.compile(r"Action:\s*(\S+)\s*\n\s*Action Input:\s*(.*)", re.DOTALL)
_BETWEEN = re.compile(r"[\s,;}\]`]*")
_CALL_EXPRESSION = re.compile(r"\s*\[?\s*(?:print\()?[A-Za-z_][\w.]*\(")


class FoundCalls(NamedTuple):
    calls: list[NamedCall]
    before: str  # the answer's text before the first call


def find_calls(text: str, schemas: Schemas) -> FoundCalls | None:
    """Returns the calls in an answer's text; None if it holds none. Raises `MalformedCall` for text that was meant as a
    call and can't be read as one for certain."""
    marked = _marked(text)
    if marked is not None:
        before, payloads = marked
        return FoundCalls([call for payload in payloads for call in read_payload(payload, schemas)], before)
    return _unmarked(text, schemas)


def _marked(text: str) -> tuple[str, list[str]] | None:
    """The text before the first marker, and the payloads."""
    shown = _INLINE_CODE.sub(lambda found: "\0" * len(found.group()), text)
    first = _OPENINGS.search(shown)
    if first is None:
        return None
    fence = next((one for one in _FENCE.finditer(text) if one.start() < first.start() < one.end()), None)
    if fence is not None and (text[: fence.start()].strip() or text[fence.end() :].strip()):
        raise MalformedCall("the call stands in a code block with text around it; write the call alone")
    before = text[: fence.start() if fence else first.start()].strip()
    payloads, at = [], first.start()
    while (opening := _OPENINGS.search(shown, at)) is not None:
        index = int((opening.lastgroup or "m0")[1:])
        closing = _CLOSINGS[index].search(shown, opening.end())
        following = _OPENINGS.search(shown, max(opening.end(), opening.start() + 1))
        end = closing.start() if closing else (following.start() if following and index < 14 else len(text))
        payload = text[opening.end() : end]
        nested = _OPENINGS.match(payload.lstrip()) if payload.strip() else None
        if nested is not None and nested.end() > nested.start():
            inner = _marked(payload)
            payloads += inner[1] if inner else []
        elif payload.strip():
            payloads.append(payload)
        elif closing is not None:
            raise MalformedCall("the call is empty")
        at = max(closing.end() if closing else end, opening.start() + 1)
    if not payloads:
        raise MalformedCall("the call is empty")
    return before, payloads


def read_payload(payload: str, schemas: Schemas) -> list[NamedCall]:
    """Reads all calls of one payload."""
    text = payload.strip()
    fence = _FENCE.fullmatch(text)
    if fence is not None:
        text = fence["body"].strip()
    if text.startswith(('{\\"', '[{\\"')):
        text = text.replace('\\"', '"')  # the quotes of this JSON were escaped twice
    react = _REACT.match(text)
    if react is not None:
        return [_named(react[1], _first_object(react[2]), schemas)]
    if _FUNCTION_TAG.search(text) is not None and not text.startswith(("{", "[")):
        return _read_function_tags(text, schemas)
    if "<arg_key>" in text:
        return _read_arg_keys(text, schemas)
    if text.startswith(("{", "[")) and not _CALL_EXPRESSION.match(text):
        return _read_values(text, schemas)
    named = _NAME_THEN.match(text)
    if named is not None:
        return _read_named(text, schemas)
    if _CALL_EXPRESSION.match(text):
        return _read_python(text, schemas)
    if known_name(text, schemas) is not None:
        return [_named(text, {}, schemas)]
    raise MalformedCall("it is neither JSON nor another known form of a call")


def _unmarked(text: str, schemas: Schemas) -> FoundCalls | None:
    """A call without a marker: the whole answer, or one code block that is the whole answer."""
    body = text.strip()
    fence = _FENCE.fullmatch(body)
    fences = list(_FENCE.finditer(body))
    if fence is None and len(fences) == 1 and _could_be_call(fences[0]["body"], schemas):
        raise MalformedCall("the call stands in a code block with text around it; write the call alone")
    if fence is not None:
        body = fence["body"].strip()
    if _could_be_call(body, schemas):
        return FoundCalls(read_payload(body, schemas), "")
    if not fences and _has_call_in_text(body, schemas):
        raise MalformedCall("the call has text around it; write the call alone")
    return None


def _names(schemas: Schemas) -> str:
    """A pattern of the tools' names, also with hyphens."""
    names = sorted(schemas, key=len, reverse=True)
    return "|".join(re.sub(r"[-_]", "[-_]", re.escape(name).replace("\\-", "-")) for name in names) or "(?!x)x"


_PREFIX = r"(?:functions\.|default_api\.|tools\.)?"
_QUOTE = r"[\"'“”‘’`\\]*"
_NAME_KEY = rf"{_QUOTE}(?:name|tool|tool_name|function|function_name|action|recipient_name){_QUOTE}\s*[:=]\s*{_QUOTE}"
_ARGUMENTS_KEY = rf"{_QUOTE}(?:arguments|parameters|args|tool_input|action_input){_QUOTE}\s*[:=]\s*[\"'{{]"

_CALLS_KEY = r"[\"']tool_calls[\"']\s*:\s*\[\s*\{"


def _could_be_call(body: str, schemas: Schemas) -> bool:
    """Whether a text without markers is meant as a call: it begins like one and names a tool where a name stands, or
    has both a name and arguments."""
    body, names = body.strip(), _names(schemas)
    if body.startswith(("{", "[{", "[ {", "[\n")):
        if re.search(rf"{_NAME_KEY}{_PREFIX}(?:{names})\b", body, re.IGNORECASE):
            return True
        if re.match(rf"\[?\s*\{{\s*(?:{_NAME_KEY}[\w.\-]+{_QUOTE}\s*,\s*{_ARGUMENTS_KEY}|{_CALLS_KEY})", body):
            return True  # of an unknown tool
        return re.match(rf"\{{\s*[\"'](?:{names})[\"']\s*:\s*\{{", body, re.IGNORECASE) is not None
    if re.match(rf"\[\s*{_PREFIX}(?:(?:{names})\s*\(|[\w.\-]+\(\w+=)", body, re.IGNORECASE):
        return True
    if re.match(rf"(?:print\()?{_PREFIX}(?:{names})\s*\(", body):
        return body.rstrip().endswith(")")
    return re.match(rf"{_PREFIX}(?:{names})\s*(?:\n\s*\"?|:\s*|\s)?(?:```json\s*)?\{{", body, re.IGNORECASE) is not None


def _has_call_in_text(body: str, schemas: Schemas) -> bool:
    """Whether a line behind other text begins a call of a known tool."""
    names = _names(schemas)
    as_json = rf"^\s*\[?\s*\{{\s*{_NAME_KEY}{_PREFIX}(?:{names})\b{_QUOTE}\s*,\s*{_ARGUMENTS_KEY}"
    as_python = rf"^\s*\[\s*{_PREFIX}(?:{names})\(\w+="
    as_name = rf"^{_PREFIX}(?:{names})\s*\n\s*\{{\s*\""
    pattern = rf"{as_json}|{as_python}|{as_name}|^\s*\{{\s*{_CALLS_KEY}"
    return re.search(pattern, body, re.MULTILINE) is not None


def _read_values(text: str, schemas: Schemas) -> list[NamedCall]:
    """Reads JSON values, one behind the other."""
    calls: list[NamedCall] = []
    at = 0
    while at < len(text):
        value, at = parse_json(text, at)
        calls += calls_of(value, schemas)
        between = _BETWEEN.match(text, at)
        at = between.end() if between else at
        if at < len(text) and text[at] not in "{[":
            raise MalformedCall(f"text follows the call: {text[at : at + 30]!r}")
    return calls


def _read_named(text: str, schemas: Schemas) -> list[NamedCall]:
    """Reads a name with JSON behind it, several in a row."""
    calls: list[NamedCall] = []
    at = 0
    while (named := _NAME_THEN.match(text, at)) is not None:
        value, at = parse_json(text, named.end())
        calls.append(_named(named[1], object_of(value), schemas))
        between = _BETWEEN.match(text, at)
        at = between.end() if between else at
    if text[at:].strip():
        raise MalformedCall(f"text follows the call: {text[at : at + 30].strip()!r}")
    return calls


def _read_function_tags(text: str, schemas: Schemas) -> list[NamedCall]:
    calls: list[NamedCall] = []
    found = list(_FUNCTION_TAG.finditer(text))
    if text[: found[0].start()].strip():
        raise MalformedCall(f"text stands before the call: {text[:30]!r}")
    for index, tag in enumerate(found):
        stop = found[index + 1].start() if index + 1 < len(found) else len(text)
        end = _FUNCTION_END.search(text, tag.end(), stop)
        if end is None:
            raise MalformedCall("the call ends before the end of its function")  # parameters may be missing
        body = text[tag.end() : end.start()]
        calls.append(_named(tag[1] or tag[2], _parameters(body), schemas))
    return calls


def _parameters(body: str) -> dict[str, Any]:
    """The parameters between tags, or a JSON object in their place."""
    if body.strip().startswith("{"):
        return _first_object(body)
    found: dict[str, Any] = {}
    rest = _PARAMETER.sub("", body)
    if "<parameter" in rest:
        raise MalformedCall("a parameter has no end")
    if rest.strip():
        raise MalformedCall(f"text stands between the parameters: {rest.strip()[:30]!r}")
    for name, value in _PARAMETER.findall(body):
        if name in found:
            raise MalformedCall(f"the parameter {name!r} is there twice")
        found[name] = _value_of_tag(value)
    return found


def _value_of_tag(value: str) -> str:
    """The text of a tag without the pair of line breaks that some formats put around it."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == "\n" else value


def _read_arg_keys(text: str, schemas: Schemas) -> list[NamedCall]:
    name, found = text.partition("<arg_key>")[0].strip(), {}
    rest = _ARG_KEY.sub("", text[text.index("<arg_key>") :])
    if rest.strip():
        raise MalformedCall(f"text stands between the arguments: {rest.strip()[:30]!r}")
    for key, value in _ARG_KEY.findall(text):
        if key.strip() in found:
            raise MalformedCall(f"the argument {key.strip()!r} is there twice")
        found[key.strip()] = value
    return [_named(name, found, schemas)]


def _read_python(text: str, schemas: Schemas) -> list[NamedCall]:
    """Reads `shell(command="ls")`, alone, in a list, in print(), or one per line. Values must be literals."""
    try:
        tree = ast.parse(text.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise MalformedCall("it is no valid Python call") from None
    calls: list[NamedCall] = []
    todo: list[ast.AST] = [node.value if isinstance(node, ast.Expr) else node for node in tree.body]
    for node in todo:
        for one in node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node]:
            if isinstance(one, ast.Call) and ast.unparse(one.func) == "print" and len(one.args) == 1:
                one = one.args[0]
            calls.append(_python_call(one, schemas))
    return calls


def _python_call(node: ast.AST, schemas: Schemas) -> NamedCall:
    if not isinstance(node, ast.Call):
        raise MalformedCall("more than calls stands there")
    name = ast.unparse(node.func)
    tool = known_name(name, schemas)
    if tool is None:
        raise unknown_tool(name, schemas)
    if node.args:
        raise MalformedCall("arguments need their names")
    try:
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    except (ValueError, TypeError, RecursionError):
        raise MalformedCall("an argument is no literal value") from None
    if any(keyword.arg is None for keyword in node.keywords) or len(arguments) != len(node.keywords):
        raise MalformedCall("arguments need their names, each once")
    return NamedCall(tool, arguments)


def _first_object(text: str) -> dict[str, Any]:
    text = text.strip()
    fence = _FENCE.fullmatch(text)
    text = fence["body"].strip() if fence else text
    value, end = parse_json(text)
    between = _BETWEEN.match(text, end)
    if between and text[between.end() :].strip():
        raise MalformedCall(f"text follows the arguments: {text[end : end + 30].strip()!r}")
    return object_of(value)


def _named(name: str, arguments: dict[str, Any], schemas: Schemas) -> NamedCall:
    tool = known_name(name, schemas)
    if tool is None:
        raise unknown_tool(name, schemas)
    return NamedCall(tool, arguments)
