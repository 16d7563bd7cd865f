"""Quire: an inference and serving engine for language models.

Public names are imported at first use, so that `import quire` is fast and needs no dependency.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.llm import LLM
    from quire.types import GrammarSpec, QuireError, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "GrammarSpec", "QuireError", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "quire.llm",
    "AsyncLLM": "quire.async_llm",
    "GrammarSpec": "quire.types",
    "QuireError": "quire.types",
    "SamplingParams": "quire.types",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
