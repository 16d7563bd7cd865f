"""The Jinja environment chat templates run in. Templates come with models, so they are treated as strangers' code.

They can't reach Python's insides, change their inputs, or build huge values out of small ones. Only `template` imports
this module, when the first template is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_REPEATED = 1 << 20  # items or characters a product may have
MAX_POWER_BITS = 4096


class TemplateRefusal(jinja2.TemplateError):
    """The template itself called `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's own words for training; for us it is only a block."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own way)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for count, repeated in ((left, right), (right, left)):
                if isinstance(count, int) and hasattr(repeated, "__len__") and count * len(repeated) > MAX_REPEATED:
                    raise OverflowError(f"a product of {count} times {len(repeated)} is too long")
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(right, 0) > MAX_POWER_BITS:
            raise OverflowError("a power is too large")
        return super().call_binop(context, operator, left, right)


def compile_template(source: str, now: Callable[[], datetime]) -> jinja2.Template:
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = lambda form: now().strftime(form)
    return sandbox.from_string(source)


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
