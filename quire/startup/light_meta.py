"""Torch's meta device without what torch imports for it at first use: a compiler of Python code and an algebra of
symbols, together about two seconds. `rehearsal` installs it: sizes are plain numbers there, nothing is traced.

The modules are stood in for by the few functions that such sizes need. Who asks for anything else gets the real one.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

ALGEBRA = "sympy"
SYMBOLS = "torch.fx.experimental.symbolic_shapes"
TRACER = "torch._dynamo"
ANSWERS = ("guard_or_false", "guard_or_true", "guard_size_oblivious", "expect_true", "statically_known_true")
OF_PLAIN_SIZES: dict[str, Any] = dict.fromkeys(ANSWERS, bool) | {
    "is_nested_int": lambda size: False,
    "sym_and": lambda *parts: all(parts),
    "sym_or": lambda *parts: any(parts),
    "free_unbacked_symbols": lambda tensor: set(),
    "sym_eq": lambda one, other: one == other if isinstance(one, int) else tuple(one) == tuple(other),
}


def install() -> None:
    """Once torch is imported."""
    importlib.import_module("torch.fx.experimental._config")  # small, and counted on beside the first of them
    known = {ALGEBRA: {"Basic": _Expression}, SYMBOLS: OF_PLAIN_SIZES, TRACER: {"disable": _leave_alone}}
    for name, parts in known.items():
        if name not in sys.modules:
            _put(name, _StandIn(name, parts))


def _leave_alone(fn: Any = None, *_: Any, **__: Any) -> Any:
    """As a decorator without arguments, and with them."""
    return (lambda found: found) if fn is None else fn


class _Expression:
    """Nothing is one."""


class _StandIn(ModuleType):
    def __init__(self, name: str, known: dict[str, Any]):
        super().__init__(name)
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        if self.__name__ == SYMBOLS and name == "__path__":
            raise AttributeError(name)  # every import asks, and this is no package
        if self.__name__ == SYMBOLS and name[0].islower():  # functions are often imported and seldom called
            return lambda *args, **kwargs: getattr(self._real(), name)(*args, **kwargs)
        return getattr(self._real(), name)

    def _real(self) -> ModuleType:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
            _put(self.__name__, importlib.import_module(self.__name__))
        return sys.modules[self.__name__]


def _put(name: str, module: ModuleType) -> None:
    """Where both ways of naming a module find it."""
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)
