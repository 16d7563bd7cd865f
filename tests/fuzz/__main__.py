"""`python -m tests.fuzz --cases N [--seed S] [--targets a,b]`: N cases for each target; exit 1 if anything was found.

A case that takes longer than a few seconds, or a process that grows, is a finding too. Findings are written to
`tests/fuzz/findings`, where `tests/pure/test_fuzz.py` tries them again for ever.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.fuzz.amplify import Amplification
from tests.fuzz.packed import PackedCheckpoint
from tests.fuzz.targets import TARGETS as WITHOUT_TORCH
from tests.fuzz.targets import scratch, try_case

TARGETS = (*WITHOUT_TORCH, Amplification, PackedCheckpoint)

FINDINGS = Path(__file__).with_name("findings")
CASE_SECONDS = 10
MAX_GROWTH = 512 << 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--targets", default=",".join(target.name for target in TARGETS))
    args = parser.parse_args()
    wanted = set(args.targets.split(","))
    found = total = 0
    signal.signal(signal.SIGALRM, _too_long)
    for kind in (kind for kind in TARGETS if kind.name in wanted):
        target, rng, begun = kind(scratch()), random.Random(f"{args.seed}/{kind.name}"), time.monotonic()
        before, known = _memory(), set[str]()
        for _ in range(args.cases):
            case = target.make(rng)
            signal.alarm(CASE_SECONDS)
            problem = try_case(target, case)
            signal.alarm(0)
            total += 1
            if problem is not None and problem[:40] not in known:
                known.add(problem[:40])  # one example of each is enough
                found += 1
                name = f"{kind.name}-{hashlib.sha256(case).hexdigest()[:12]}"
                (FINDINGS / name).write_bytes(case)
                print(f"{name}: {problem}")
        growth = _memory() - before
        seconds = time.monotonic() - begun
        print(f"{kind.name}: {args.cases} cases in {seconds:.1f} s, grew by {growth >> 20} MiB", flush=True)
        if growth > MAX_GROWTH:
            found += 1
            print(f"{kind.name}: memory grew by {growth} bytes")
    print(f"{total} cases, {found} findings, seed {args.seed}")
    return 1 if found else 0


def _too_long(signum: int, frame: Any) -> None:
    raise TimeoutError(f"a case took longer than {CASE_SECONDS} s")


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
