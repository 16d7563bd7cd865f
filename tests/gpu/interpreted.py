"""Run the small kernel checks under Triton's interpreter and print a JSON object: name -> what went wrong, if anything.

`tests/cpu/test_triton_interpreter.py` starts this with TRITON_INTERPRET=1, which Triton reads when it is imported. What
is to have the same bits wherever it stands in a tile has them on a GPU, but not by every processor's BLAS, so products
are summed in float64 here.
"""

from __future__ import annotations

import inspect
import json
import sys
import traceback
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from triton import language
from triton.runtime import interpreter

from tests.gpu.checks import CHECKS
from tests.gpu.where import NotHere, Where, poisoned


def sum_in_float64() -> None:
    multiply = np.matmul

    def matmul(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
        return multiply(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    np.matmul = matmul  # type: ignore[assignment]  # which Triton's interpreter asks for each product


def patch_once() -> None:
    """Whenever a kernel calls a function, the interpreter goes through Triton's language anew for what it must replace,
    though the launch has replaced it and puts it back only at its end: a third of all time. Here that is done once
    per launch for each part of the language. Of a Triton whose interpreter is made otherwise nothing is changed."""
    if not (hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope")):
        return
    patch = interpreter._patch_lang
    replaced: set[ModuleType] = set()

    @cache
    def parts(fn: Callable[..., Any]) -> frozenset[ModuleType]:
        modules = (value for value in fn.__globals__.values() if inspect.ismodule(value))
        return frozenset(module for module in modules if module in (language, language.core))

    def patch_lang(fn: Callable[..., Any]) -> Any:
        scope, seen = interpreter._LangPatchScope(), parts(fn)
        if not seen or seen - replaced:
            scope = patch(fn)
            replaced.update(seen)
        restore = scope.restore

        def restore_all() -> None:  # which only a launch does
            replaced.clear()
            restore()

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_lang


def main() -> None:
    sum_in_float64()
    patch_once()
    outcomes: dict[str, dict[str, str]] = {}
    for name, check in CHECKS.items():
        try:
            # bfloat16 is left out: the interpreter computes garbage in it.
            with poisoned():
                check(Where("cpu", False, (torch.float32, torch.float16), seed=0))
            outcomes[name] = {}
        except NotHere as why:
            outcomes[name] = {"skipped": str(why)}
        except Exception:
            outcomes[name] = {"error": traceback.format_exc()}
    json.dump(outcomes, sys.stdout)


if __name__ == "__main__":
    main()
