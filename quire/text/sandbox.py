"""The Jinja sandbox that chat templates run in. Templates come with models and are untrusted code.

They can't reach Python's internals, change their inputs, build huge values from small ones, or run for long: every loop
iteration and macro call is counted. Only `template` imports this module, when the first template is compiled.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from types import GeneratorType
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_REPEATED = 1 << 20  # items or characters a product may have
MAX_TEXT = 1 << 26  # characters a text built from others may have
MAX_WIDTH = 1 << 16  # characters that padding may reach
MAX_INT_BITS = 4096  # of a product or a power
MAX_TURNS = 5_000_000  # loop iterations and macro calls in one rendering
MAX_SECONDS = 3.0
# The variable that holds the budget. The name is no identifier, so no template can read or replace it.
BUDGET = "quire budget"
# The filter that concatenation applies to its parts; no template can name it.
_PLAIN_TEXT = "quire text"
_PADDED = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_GROWING = frozenset({"append", "extend", "insert", "pop"})  # of lists that the template wrote itself
_WIDTH = re.compile(r"[0-9]{6,}|\*")  # in a format: excessive padding, or a width taken from an argument


class TemplateRefusal(jinja2.TemplateError):
    """The template itself called `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}`, which marks assistant text for training; rendered as a plain block."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's convention)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _OwnList(list[Any]):
    """A list that the template wrote, which it may change. Lists of its inputs are never of this type."""

    def __add__(self, other: Any) -> _OwnList:
        return _OwnList(super().__add__(other))


class RenderBudget:
    """Iterations and processor time of one rendering. The template calls it at every loop iteration."""

    def __init__(self, clock: Callable[[], float] = time.thread_time):
        # Processor time of this thread, so that no rendering is refused because the machine is busy.
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
        """Count one loop iteration. `_count_turns` inserts calls of this method into the template."""
        budget: RenderBudget = context.parent[BUDGET]
        return budget()

    def own_list(self, items: list[Any]) -> list[Any]:
        """The list that a template's literal makes. `_own_lists` inserts calls of this method into the template."""
        return _OwnList(items)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, _OwnList) and attr in _GROWING:
            return True
        return super().is_safe_attribute(obj, attr, value)

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
        if isinstance(owner, _OwnList) and name in _GROWING:
            added = len(args[0]) if name == "extend" and args and hasattr(args[0], "__len__") else 1
            if len(owner) + added > MAX_REPEATED:
                raise OverflowError("a list is too long")
            if name == "extend" and args and not hasattr(args[0], "__len__"):
                raise OverflowError("a list is extended by something of unknown length")
        if isinstance(owner, str):
            if name in _PADDED and any(isinstance(arg, int) and arg > MAX_WIDTH for arg in args):
                raise OverflowError(f"{name} is too wide")
            if name in ("format", "format_map") and _WIDTH.search(owner):
                raise OverflowError("a format is too wide")
            if name == "replace" and len(args) > 1 and (owner.count(str(args[0])) + 1) * len(str(args[1])) > MAX_TEXT:
                raise OverflowError("a replacement is too long")
        return super().call(context, function, *args, **kwargs)


def compile_template(source: str, now: Callable[[], datetime]) -> tuple[jinja2.Template, frozenset[str]]:
    """The template, and the names of the variables that it reads from outside."""
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = lambda form: now().strftime(form)
    for name in ("center", "indent", "wordwrap", "format"):
        sandbox.filters[name] = _narrow(sandbox.filters[name])
    sandbox.filters[_PLAIN_TEXT] = _plain_text
    tree = sandbox.parse(source)
    # The search folds constants inside the tree it is given, so it gets one of its own.
    variables = frozenset(meta.find_undeclared_variables(sandbox.parse(source)) - set(sandbox.globals))
    _count_turns(tree)
    if any(f".{name}(" in source for name in _GROWING):
        _own_lists(tree)
    return sandbox.from_string(tree), variables


def _count_turns(tree: nodes.Template) -> None:
    """Insert a budget call into the body of every loop and macro, and turn concatenations into checked sums."""
    for loop in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [nodes.ContextReference()], [], None, None)
        loop.body.insert(0, nodes.Output([tick]).set_lineno(loop.lineno))  # type: ignore[attr-defined]
    for joined in list(tree.find_all(nodes.Concat)):
        # a ~ b ~ c becomes a sum of texts, whose size is checked: doubling a text thirty times gives a gigabyte
        total: nodes.Expr = _as_text(joined.nodes[0])
        for part in joined.nodes[1:]:
            total = nodes.Add(total, _as_text(part), lineno=joined.lineno)
        joined.nodes = [total]


def _as_text(node: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(node, _PLAIN_TEXT, [], [], None, None, lineno=node.lineno)


def _plain_text(value: Any) -> str:
    """Text without the mark of the filter `safe`, which would make the sum escape its other parts as HTML."""
    return str.__str__(value) if isinstance(value, str) else str(value)


def _own_lists(tree: nodes.Template) -> None:
    """Let the template's own lists grow. Some templates collect in them, which the sandbox refuses for other lists."""

    class Lists(NodeTransformer):
        def visit_List(self, node: nodes.List) -> nodes.Node:
            self.generic_visit(node)
            own = nodes.EnvironmentAttribute("own_list")
            return nodes.Call(own, [node], [], None, None).set_lineno(node.lineno)

    Lists().visit(tree)


def _narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with a bound on the width it pads to."""

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
    """Plain JSON. Jinja's own filter escapes <, > and & for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_as_list,
    )


def _as_list(value: Any) -> list[Any]:
    """The items that a filter such as `map` gives one by one."""
    if isinstance(value, GeneratorType):
        return list(value)
    raise TypeError(f"{type(value).__name__} can't be written as JSON")
