"""Makes torch's meta device usable without torch.dynamo and sympy, whose import at first use takes two seconds.

`dry_run` installs it: its sizes are plain integers and nothing is traced. Replacement modules provide the few functions
that such sizes need; any other attribute imports the real module.
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
SIZE_FUNCTIONS: dict[str, Any] = dict.fromkeys(ANSWERS, bool) | {
    "is_nested_int": lambda size: False,
    "sym_and": lambda *parts: all(parts),
    "sym_or": lambda *parts: any(parts),
    "free_unbacked_symbols": lambda tensor: set(),
    "sym_eq": lambda one, other: one == other if isinstance(one, int) else tuple(one) == tuple(other),
}


def install() -> None:
    """Installs the replacement modules. Torch must be imported already."""
    importlib.import_module("torch.fx.experimental._config")  # small, and used together with SYMBOLS
    known = {ALGEBRA: {"Basic": _Expression}, SYMBOLS: SIZE_FUNCTIONS, TRACER: {"disable": _leave_alone}}
    for name, parts in known.items():
        if name not in sys.modules:
            _register(name, _LazyModule(name, parts))


def _leave_alone(fn: Any = None, *_: Any, **__: Any) -> Any:
    """Replaces the decorator `torch._dynamo.disable`, with or without arguments: returns the function unchanged."""
    return (lambda found: found) if fn is None else fn


class _Expression:
    """Replaces `sympy.Basic`; no object is an instance."""


class _LazyModule(ModuleType):
    """A module with some attributes, which imports the real module for any other."""

    def __init__(self, name: str, known: dict[str, Any]):
        super().__init__(name)
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        if self.__name__ == SYMBOLS and name == "__path__":
            raise AttributeError(name)  # the import system probes it, and the module is not a package
        if self.__name__ == SYMBOLS and name[0].islower():  # often imported, seldom called: import later
            return lambda *args, **kwargs: getattr(self._real(), name)(*args, **kwargs)
        return getattr(self._real(), name)

    def _real(self) -> ModuleType:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
            _register(self.__name__, importlib.import_module(self.__name__))
        return sys.modules[self.__name__]


def _register(name: str, module: ModuleType) -> None:
    """Registers a module in `sys.modules` and as an attribute of its parent."""
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)
