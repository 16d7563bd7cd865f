"""`quire bench growth`: resident memory after few and after many requests; it must not grow.

A KV cache that fills up is not a leak, so it gets few enough pages to be full before the first reading. From then on
pages are evicted, and resident memory must stay constant.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.bench.memory import resident_bytes, settle_memory
from quire.bench.progress import progress_bar
from quire.bench.stats import Bar, Report
from quire.config import Config
from quire.config_build import override_config
from quire.types import SamplingParams

if TYPE_CHECKING:
    from quire.llm import LLM

MAX_RATIO = 1.02
BATCH = 50  # requests per `generate` call
NUM_REPEATED = 8  # repeated prompts; every other request uses one
OUTPUT_LEN = 2


def fit_cache(config: Config, first: int) -> Config:
    """Return `config` with a cache that `first` requests fill, unless it sets the cache's size itself."""
    if config.cache.num_pages is not None or config.cache.cache_memory is not None:
        return config
    return override_config(config, {"num_pages": max(64, first // 2)})


def bench_growth(open_llm: Callable[[], LLM], *, first: int = 200, last: int = 2000, seed: int = 0) -> Report:
    """Run `last` requests and report resident memory after `first` and after all. Half of the prompts are new and evict
    pages, half repeat and hit the prefix cache."""
    readings: list[Report] = []
    with open_llm() as llm, progress_bar("requests", last) as advance:
        prompts = _Prompts(llm, seed)
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
        done = 0
        for until in (first, last):
            while done < until:
                count = min(BATCH, until - done)
                llm.generate([prompts.next() for _ in range(count)], params)
                done += count
                advance(done)
            before = resident_bytes()
            settle_memory()
            readings.append({"requests": until, "rss_bytes": resident_bytes(), "rss_unsettled_bytes": before})
        stats = llm.engine.scheduler.cache.stats
        report = {
            "benchmark": "growth",
            "model": llm.config.model.model,
            "cache_units": [pool.num_units - 1 for pool in llm.engine.scheduler.cache.pools],
            "evicted_units": stats.evicted_units,
            "cache_hit_tokens": stats.hit_tokens,
        }
    early, late = (reading["rss_bytes"] for reading in readings)
    bar = Bar("resident memory, late over early", late / early, MAX_RATIO, "at most")
    return {
        **report,
        "readings": readings,
        "ratio": bar.value,
        "bars": [bar.to_report()],
        "pass": bar.passed,
    }


class _Prompts:
    """Prompts of one page and a few tokens: new and repeated ones alternate."""

    def __init__(self, llm: LLM, seed: int):
        self._rng = random.Random(seed)
        self._vocab_size = llm.edge.vocab_size
        self._page_tokens = llm.engine.scheduler.cache.page_tokens
        self._repeated = [self._draw() for _ in range(NUM_REPEATED)]
        self._count = 0

    def next(self) -> list[int]:
        self._count += 1
        return self._draw() if self._count % 2 else self._rng.choice(self._repeated)

    def _draw(self) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(self._page_tokens + self._rng.randint(1, 4))]
