"""The engines' Prometheus metrics, read from their last beats at each scrape. Each has the label of its replica."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from quire.engine.host.wire import TierUsage
from quire.engine.limits import SpeculationStats

if TYPE_CHECKING:
    from quire.client.fleet import Fleet, Replica

LABEL = "engine"
Values = Iterable[tuple[tuple[str, ...], float]]  # values of the labels after the replica's, and the figure


class EngineCollector:
    """Collects the figures of all engines for Prometheus."""

    COUNTERS = (
        ("steps", "Steps run"),
        ("computed_tokens", "Tokens computed in all steps (the sum of batch tokens)"),
        ("prompt_tokens", "Prompt tokens computed in all steps"),
        ("rows", "Rows of all steps (the sum of batch sizes)"),
        ("prompt_rows", "Rows of all steps that computed prompt tokens"),
        ("sampled_tokens", "Tokens sampled"),
        ("preemptions", "Preemptions of requests for lack of memory or rows"),
        ("lookup_tokens", "Prompt tokens looked up in the prefix cache"),
        ("hit_tokens", "Prompt tokens found in the prefix cache"),
        ("evicted_units", "Pages and state slots evicted from the prefix cache"),
        ("loaded_tokens", "Prompt tokens found in a tier of the cache below the device"),
        ("refused_loads", "Loads from a store that computing was expected to beat"),
        ("busy_seconds", "Seconds in which the loop had work"),
    )
    GAUGES = (
        ("running", "Requests that hold a row"),
        ("waiting", "Requests in the queue"),
        ("held", "Requests that wait for a prefix that another request computes"),
        ("loading", "Requests that wait for blocks from a store"),
    )

    def __init__(self, fleet: Fleet):
        self._fleet = fleet

    def collect(self) -> Iterator[Any]:
        """Yield each family once, with the figures of all replicas."""
        families: dict[str, Any] = {}
        for replica in self._fleet.replicas:
            for family, values in self._families(replica):
                known = families.setdefault(family.name, family)
                for labels, value in values:
                    if isinstance(value, tuple):
                        known.add_metric([replica.label, *labels], *value)
                    else:
                        known.add_metric([replica.label, *labels], value)
        yield from families.values()

    def _families(self, replica: Replica) -> Iterator[tuple[Any, Values]]:
        client, supervisor = replica.client, replica.supervisor
        states, beat = supervisor.states, client.beat
        errors = [(tuple(key.split("/", 1)), count) for key, count in supervisor.errors.counts.items()]
        state = [((one.value,), float(one is states.state)) for one in type(states.state)]
        yield _gauge("quire_engine_state", "1 for the current state of the engine process, else 0", state, "state")
        moves = _by_name(states.counts)
        yield _counter("quire_engine_moves", "Transitions of the engine process by name", moves, "transition")
        loop_moves = _by_name(beat.transitions)
        yield _counter("quire_loop_moves", "Transitions of the engine's loop by name", loop_moves, "transition")
        yield _counter("quire_errors", "Failures by kind and code", errors, "kind", "code")
        yield _counter("quire_resumed", "Requests resumed by another engine process", _one(client.num_resumed))
        peak = _one(supervisor.peak_memory)
        yield _gauge("quire_engine_peak_memory_bytes", "Peak resident memory of the engine process", peak)
        for name, text in self.COUNTERS:
            yield _counter(f"quire_engine_{name}", text, _one(getattr(beat, name)))
        for name, text in self.GAUGES:
            yield _gauge(f"quire_engine_{name}", text, _one(getattr(beat, name)))
        yield _batch_sizes(beat.batch_sizes, beat.rows)
        per_step = beat.computed_tokens / beat.steps if beat.steps else 0.0
        yield _gauge("quire_engine_batch_tokens", "Mean tokens of a step since the start", _one(per_step))
        yield _gauge("quire_engine_up", "1 while an engine is attached, else 0", _one(client.is_attached))
        age = _one(client.beat_age())
        yield _gauge("quire_engine_step_age_seconds", "Seconds since the engine's last beat", age)
        total = [((group.name,), float(group.num_units)) for group in beat.groups]
        free = [((group.name,), float(group.num_available)) for group in beat.groups]
        yield _gauge("quire_engine_cache_units", "Pages or slots of a group", total, "group")
        yield from _tiers(beat.tiers)
        idle = [((str(stage),), share) for stage, share in enumerate(beat.stage_idle)]
        yield _gauge("quire_engine_stage_idle", "Share of the time that a pipeline stage waited", idle, "stage")
        yield from _speculation(beat.speculation or SpeculationStats())
        yield _gauge(
            "quire_engine_cache_available", "Pages or slots that are free or only in the prefix cache", free, "group"
        )


TIER_GAUGES = (
    ("num_bytes", "bytes", "Bytes of KV cache in a tier"),
    ("num_blocks", "blocks", "Blocks in a tier: units of host memory, files of a store"),
    ("queued", "queued", "Transfers of a tier that are queued or under way"),
)
TIER_COUNTERS = (
    ("hits", "hits", "Blocks loaded from a tier"),
    ("stores", "stores", "Blocks stored in a tier"),
    ("loaded_bytes", "loaded_bytes", "Bytes loaded from a tier"),
    ("stored_bytes", "stored_bytes", "Bytes stored in a tier"),
    ("drops", "drops", "Blocks not stored for lack of room or because the queue was full"),
    ("evictions", "evictions", "Blocks evicted from a tier"),
    ("failures", "failures", "Loads and stores that failed"),
    ("corrupt", "corrupt", "Blocks refused because they were damaged or foreign"),
)


def _tiers(tiers: Sequence[TierUsage]) -> Iterator[tuple[Any, Values]]:
    for make, families in ((_gauge, TIER_GAUGES), (_counter, TIER_COUNTERS)):
        for field, name, text in families:
            values = _by_name({tier.name: getattr(tier, field) for tier in tiers})
            yield make(f"quire_engine_tier_{name}", text, values, "tier")


def _batch_sizes(sizes: Sequence[int], num_rows: int) -> tuple[Any, Any]:
    """The histogram of the rows of steps."""
    bounds = [*(str(float(1 << place)) for place in range(max(0, len(sizes) - 1))), "+Inf"]
    counts = list(accumulate(sizes)) or [0]
    buckets = list(zip(bounds, map(float, counts), strict=True))
    family = HistogramMetricFamily("quire_engine_batch_size", "Rows of a step", labels=[LABEL])
    return family, [((), (buckets, float(num_rows)))]


def _speculation(stats: SpeculationStats) -> Iterator[tuple[Any, Values]]:
    for name, text in (
        ("drafted", "Guessed tokens, verified or not"),
        ("right", "Guessed tokens that equal the tokens that came, verified or not"),
        ("verified", "Guessed tokens that steps have verified"),
        ("accepted", "Guessed tokens that became output"),
    ):
        values: list[tuple[tuple[str, ...], float]] = [
            ((counts.name, str(place)), float(count))
            for counts in stats.proposers
            for place, count in enumerate(getattr(counts, name), start=1)
        ]
        yield _counter(f"quire_engine_{name}_tokens", text, values, "proposer", "position")
    failed = _by_name({counts.name: counts.failed for counts in stats.proposers})
    yield _counter(
        "quire_engine_proposer_failures", "Requests for which a proposer was switched off", failed, "proposer"
    )
    yield _counter("quire_engine_audits", "Steps that took the opposite choice of drafts", _one(stats.audits))
    speedup = "Expected time without drafts over the time with them"
    yield _gauge("quire_engine_speculation_ratio", speedup, _one(stats.speedup))
    yield _gauge("quire_engine_audit_share", "Share of the time that audits have cost", _one(stats.audit_share))


def _one(value: float) -> Values:
    return [((), float(value))]


def _by_name(counts: dict[str, int]) -> Values:
    return [((name,), float(count)) for name, count in counts.items()]


def _counter(name: str, text: str, values: Values, *labels: str) -> tuple[Any, Values]:
    return CounterMetricFamily(name, text, labels=[LABEL, *labels]), values


def _gauge(name: str, text: str, values: Values, *labels: str) -> tuple[Any, Values]:
    return GaugeMetricFamily(name, text, labels=[LABEL, *labels]), values
