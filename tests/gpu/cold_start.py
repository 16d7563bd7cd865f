"""A start to its tenth token in a process of its own, and then its chores: `python -m tests.gpu.cold_start <folder>`.
Prints in JSON the tokens, which kernels were compiled here and which were found on disk, whether any were compiled
beside it, how many trials were made, and what was still compiled for the chores. It leaves to the others whatever they
know of, however long that takes: a start on a busy machine would sooner do some of it itself.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from quire import LLM, SamplingParams
from quire.kernels.validation.trial_results import Findings
from quire.startup import Compilers
from quire.startup import compile_ahead as compilers
from quire.startup import early_init as beginning


def main(folder: str) -> None:
    start_compilers = beginning.start_compilers
    beside: list[Compilers | None] = []
    compiled: list[str] = []
    found: list[str] = []
    tried: list[Any] = []
    plain_attempt = Findings.attempt

    def start(config: Any) -> Compilers | None:
        from triton import knobs

        beside.append(start_compilers(config))
        knobs.compilation.listener = listen
        return beside[0]

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        (found if cache_hit else compiled).append(src.name)

    def attempt(self: Findings, trial: Any) -> None:
        plain_attempt(self, lambda: (tried.append(trial), trial())[1])

    compilers.LIST_WAIT_SECONDS = compilers.COMPILE_WAIT_SECONDS = 600.0
    Compilers._is_stuck = lambda self, key: False  # type: ignore[method-assign]
    beginning.start_compilers = start
    Findings.attempt = attempt  # type: ignore[method-assign]
    with LLM(folder, random_weights=True, num_pages=200) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
        (output,) = llm.generate([list(range(1, 17))], params)
        told = {"tokens": output.token_ids, "compiled": [*compiled], "found": [*found], "beside": beside[0] is not None,
                "tried": len(tried)}  # fmt: skip
        compiled.clear()
        if beside[0] is not None:
            beside[0].wait()
        llm.prepare()
    print(json.dumps(told | {"for chores": compiled}))


if __name__ == "__main__":
    main(sys.argv[1])
