"""The Jinja environment chat templates run in. Templates come with models, so they are treated as strangers' code.

They can't reach Python's insides, change their inputs, build huge values out of small ones, or run for long: every turn
of a loop and every call of a macro is counted. Only `template` imports this module, when the first one is compiled.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_REPEATED = 1 << 20  # items or characters a product may have
MAX_TEXT = 1 << 26  # characters a text built from others may have
MAX_WIDTH = 1 << 16  # that a text may be padded to
MAX_INT_BITS = 4096  # of a product or a power
MAX_TURNS = 5_000_000  # of loops and macros in one rendering
MAX_SECONDS = 3.0
# The variable that holds a rendering's budget. It is no identifier, so no template can read it or set another.
BUDGET = "quire budget"
_PADDED = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_WIDTH = re.compile(r"[0-9]{6,}|\*")  # in a format: as much padding as nobody needs, or a width from elsewhere


class TemplateRefusal(jinja2.TemplateError):
    """The template itself called `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's own words for training; for us it is only a block."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own way)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class RenderBudget:
    """What one rendering may take. The template calls it at every turn of a loop."""

    def __init__(self, clock: Callable[[], float] = time.thread_time):
        # Processor time of this thread: a rendering is not refused because the machine is busy with other work.
        self._clock = clock
        self._until = clock() + MAX_SECONDS
        self._turns = 0

    @property
    def is_spent(self) -> bool:
        return self._turns > MAX_TURNS or self._clock() > self._until

    def __call__(self) -> str:
        self._turns += 1
        if self._turns > MAX_TURNS:
            raise OverflowError(f"its loops take more than {MAX_TURNS} turns")
        if not self._turns & 255 and self._clock() > self._until:
            raise OverflowError(f"it takes more than {MAX_SECONDS:.0f} seconds")
        return ""


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def tick(self, context: Any) -> str:
        """Count one turn of a loop. `_count_turns` writes calls of this method into the template."""
        budget: RenderBudget = context.parent[BUDGET]
        return budget()

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if hasattr(left, "__len__") and hasattr(right, "__len__") and len(left) + len(right) > MAX_TEXT:
                raise OverflowError("a sum is too long")
        elif operator == "%":
            if isinstance(left, str) and _WIDTH.search(left):
                raise OverflowError("a format is too wide")
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > MAX_INT_BITS:
                raise OverflowError("a product is too large")
        elif operator == "*":
            for count, repeated in ((left, right), (right, left)):
                if isinstance(count, int) and hasattr(repeated, "__len__") and count * len(repeated) > MAX_REPEATED:
                    raise OverflowError(f"a product of {count} times {len(repeated)} is too long")
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(right, 0) > MAX_INT_BITS:
            raise OverflowError("a power is too large")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name in _PADDED and any(isinstance(arg, int) and arg > MAX_WIDTH for arg in args):
                raise OverflowError(f"{name} is too wide")
            if name in ("format", "format_map") and _WIDTH.search(owner):
                raise OverflowError("a format is too wide")
            if name == "replace" and len(args) > 1 and (owner.count(str(args[0])) + 1) * len(str(args[1])) > MAX_TEXT:
                raise OverflowError("a replacement is too long")
        return super().call(context, function, *args, **kwargs)


def compile_template(source: str, now: Callable[[], datetime]) -> jinja2.Template:
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = lambda form: now().strftime(form)
    for name in ("center", "indent", "wordwrap", "format"):
        sandbox.filters[name] = _narrow(sandbox.filters[name])
    tree = sandbox.parse(source)
    _count_turns(tree)
    return sandbox.from_string(tree)


def _count_turns(tree: nodes.Template) -> None:
    """A call of the budget at the start of every loop's and macro's body, and around what is strung together."""
    for loop in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [nodes.ContextReference()], [], None, None)
        loop.body.insert(0, nodes.Output([tick]).set_lineno(loop.lineno))  # type: ignore[attr-defined]
    for joined in list(tree.find_all(nodes.Concat)):
        # a ~ b ~ c as a sum of texts, which is checked: doubling a text thirty times would be a gigabyte
        total: nodes.Expr = _as_text(joined.nodes[0])
        for part in joined.nodes[1:]:
            total = nodes.Add(total, _as_text(part), lineno=joined.lineno)
        joined.nodes = [total]


def _as_text(node: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(node, "string", [], [], None, None, lineno=node.lineno)


def _narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pads, within reason."""

    @wraps(function)
    def narrow(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, int) and arg > MAX_WIDTH for arg in (*args, *kwargs.values())):
            raise OverflowError("a filter is too wide")
        if any(isinstance(arg, str) and len(arg) < 4096 and _WIDTH.search(arg) and "%" in arg for arg in args):
            raise OverflowError("a format is too wide")
        return function(*args, **kwargs)

    return narrow


def _refuse(message: str) -> None:
    raise TemplateRefusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter would escape <, > and & for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
