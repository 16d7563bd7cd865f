"""A rehearsal of a start on a Hopper card, on a machine without one: `python -m tests.cpu.fake_hopper`, in the place of
`quire.startup.dry_run`; FEW_KERNELS names those it is to tell of.

With an argument it reads a list from stdin instead, and prints a line of JSON for each entry. `start`: settings, from
which it does what the start itself would: what it would tell of, under which names Triton would look for each on disk,
and what went wrong. `work`: what `start` would tell of, compiled in another order: under which names each would lie on
disk. Only FEW_KERNELS of the first start are compiled in truth, and looked up. `steps`: settings and sizes of steps;
which kernels those need that the rehearsal did not.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import torch

from quire.config import Config
from quire.config_build import override_config
from quire.kernels.triton.compile_worker import compile_kernel
from quire.startup import dry_run as rehearsal
from quire.startup import light_meta

FEW = os.environ.get("FEW_KERNELS", "").split(",")


def stand_in() -> None:
    card = SimpleNamespace(multi_processor_count=132, total_memory=150 << 30)
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device=None: card  # type: ignore[assignment, return-value]


def tell_few() -> None:
    record_launches = rehearsal.record_launches

    def note_few(tell: rehearsal.Report) -> None:
        record_launches(lambda kernel: tell(kernel) if kernel["name"] in FEW else None)

    rehearsal.record_launches = note_few


class Compiler:
    """In the place of Triton's: it only works out where a kernel would lie."""

    def __init__(self) -> None:
        import triton.compiler
        from triton import knobs
        from triton.backends.nvidia import driver

        self.names: list[str] = []
        self.found: list[str] = []
        self.few = FEW if sys.argv[1:] == ["start"] else []
        self._compile = triton.compiler.compile
        triton.compiler.compile = self.compile
        driver.CudaLauncher = lambda *args: None
        knobs.compilation.listener = self._listen

    def compile(self, src: Any, target: Any = None, options: Any = None) -> Any:
        from triton.compiler import compiler

        backend = compiler.make_backend(target)
        parsed = backend.parse_options({**options, **src.parse_options()})
        name = compiler.get_cache_key(src, backend, parsed, env_vars=compiler.get_cache_invalidating_env_vars())
        self.names.append(hashlib.sha256(name.encode()).hexdigest())
        if src.name in self.few:
            return self._compile(src, target=target, options=options)
        return SimpleNamespace(src=src, metadata=None)

    def _listen(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            self.found.append(src.name)

    def take(self) -> dict[str, list[str]]:
        taken = {"names": self.names, "found": self.found}
        self.names, self.found, self.few = [], [], []
        return taken


def start(settings: dict[str, Any], compiler: Compiler) -> dict[str, Any]:
    from triton import knobs

    told: list[dict[str, Any]] = []
    trouble: list[str] = []
    rehearsal.record_launches(told.append)
    note = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = lambda **what: not note(**what)  # and compile it
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            next(rehearsal.run_on_meta(override_config(Config(), settings)), None)
        except Exception as error:
            trouble.append(f"{type(error).__name__}: {error}")
    trouble += [str(each.message) for each in caught]
    heavy = [name for name in ("sympy.core", "torch._dynamo.eval_frame") if name in sys.modules]
    return {"told": told, "trouble": trouble, "imported": heavy, **compiler.take()}


def steps(asked: tuple[dict[str, Any], list[tuple[int, int]]]) -> dict[str, Any]:
    settings, sizes = asked
    told: list[dict[str, Any]] = []
    runners: list[Any] = []
    make = rehearsal.Runner
    rehearsal.Runner = lambda *args, **knobs: runners.append(make(*args, **knobs)) or runners[0]  # type: ignore
    rehearsal.record_launches(told.append)
    for _ in rehearsal.run_on_meta(override_config(Config(), settings)):
        pass
    rehearsal.Runner = make  # type: ignore[misc]
    num_told, found = len(told), []
    for num_decodes, num_tokens in sizes:
        before = len(told)
        runners[0].warm_up(num_decodes, num_tokens)
        found += [(kernel["name"], num_decodes, num_tokens) for kernel in told[before:]]
    return {"told": num_told, "found": found}


def compile_only() -> None:
    from triton.runtime import JITFunction

    run = JITFunction.run

    def run_without_launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = run_without_launch  # type: ignore[method-assign]


def work(told: list[dict[str, Any]], compiler: Compiler) -> dict[str, Any]:
    for job in reversed(told):
        compile_kernel(job)
    return compiler.take()


if __name__ == "__main__":
    stand_in()
    if sys.argv[1:] == ["steps"]:
        light_meta.install()
        for each in json.loads(sys.stdin.readline()):
            print(json.dumps(steps(each)), flush=True)
    elif sys.argv[1:] in (["start"], ["work"]):
        light_meta.install()
        compile_only()
        compiler = Compiler()
        for each in json.loads(sys.stdin.readline()):
            print(json.dumps((start if sys.argv[1] == "start" else work)(each, compiler)), flush=True)
    else:
        tell_few()
        rehearsal.main()
