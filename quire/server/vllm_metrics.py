"""The figures of `/metrics` under vLLM's names, for gateways, autoscalers and dashboards that ask for those.

With `--metric-names vllm` they stand beside Quire's own. Histograms are summed over routes; figures that have no
counterpart here are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

if TYPE_CHECKING:
    from quire.client.fleet import Fleet

LABELS = ("model_name", "engine")
HISTOGRAMS = {
    "quire_ttft_seconds": ("vllm:time_to_first_token_seconds", "Seconds to the first token"),
    "quire_tpot_seconds": ("vllm:request_time_per_output_token_seconds", "Seconds per output token after the first"),
    "quire_e2e_seconds": ("vllm:e2e_request_latency_seconds", "Seconds from a request to its last token"),
    "quire_queue_seconds": ("vllm:request_queue_time_seconds", "Seconds from a request to its admission"),
}
COUNTERS = {
    "quire_prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens"),
    "quire_output_tokens": ("vllm:generation_tokens", "Tokens generated"),
}
BEAT_GAUGES = {
    "running": ("vllm:num_requests_running", "Requests that hold a row"),
    "waiting": ("vllm:num_requests_waiting", "Requests in the queue"),
}
BEAT_COUNTERS = {
    "preemptions": ("vllm:num_preemptions", "Preemptions of requests"),
    "lookup_tokens": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    "hit_tokens": ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache"),
}


class VllmCollector:
    """Collects vLLM's metrics from those of the server and from the engines' last beats."""

    def __init__(self, source: CollectorRegistry, fleet: Fleet, model_name: str):
        self._source, self._fleet, self._model = source, fleet, model_name

    def collect(self) -> Iterator[Any]:
        found = {family.name: family for family in self._source.collect()}
        for name, (theirs, text) in HISTOGRAMS.items():
            family = HistogramMetricFamily(theirs, text, labels=LABELS)
            buckets, total = _summed(found[name])
            family.add_metric([self._model, "0"], buckets, total)
            yield family
        for name, (theirs, text) in COUNTERS.items():
            counter = CounterMetricFamily(theirs, text, labels=LABELS)
            samples = [sample.value for sample in found[name].samples if sample.name.endswith("_total")]
            counter.add_metric([self._model, "0"], sum(samples))
            yield counter
        yield from self._of_engines()

    def _of_engines(self) -> Iterator[Any]:
        beats = [(replica.label, replica.client.beat) for replica in self._fleet.replicas]
        for name, (theirs, text) in BEAT_GAUGES.items():
            gauge = GaugeMetricFamily(theirs, text, labels=LABELS)
            for label, beat in beats:
                gauge.add_metric([self._model, label], getattr(beat, name))
            yield gauge
        for name, (theirs, text) in BEAT_COUNTERS.items():
            counter = CounterMetricFamily(theirs, text, labels=LABELS)
            for label, beat in beats:
                counter.add_metric([self._model, label], getattr(beat, name))
            yield counter
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of the KV cache that requests hold", labels=LABELS)
        for label, beat in beats:
            shares = [1 - group.num_available / group.num_units for group in beat.groups if group.num_units]
            usage.add_metric([self._model, label], max(shares, default=0.0))
        yield usage


def _summed(family: Any) -> tuple[list[tuple[str, float]], float]:
    """A histogram's buckets and sum over all routes."""
    buckets: dict[str, float] = {}
    total = 0.0
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            bound = sample.labels["le"]
            buckets[bound] = buckets.get(bound, 0.0) + sample.value
        elif sample.name.endswith("_sum"):
            total += sample.value
    ordered = sorted(buckets.items(), key=lambda one: float(one[0]))
    return ordered or [("+Inf", 0.0)], total
