"""What is counted, and that the dashboard asks only for what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from quire.client.engine_client import EngineClient
from quire.client.fleet import Fleet, Replica
from quire.client.supervisor import Supervisor, SupervisorLimits
from quire.engine.host.wire import Beat, GroupUsage, TierUsage
from quire.engine.limits import ProposerCounts, SpeculationStats
from quire.server.metrics import Metrics
from quire.types import Timing, Usage

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"


class FakeClient(EngineClient):
    is_attached = True  # type: ignore[assignment]

    def beat_age(self) -> float:
        return 0.5


def make_text() -> str:
    metrics = Metrics()
    client = FakeClient()
    client.beat = Beat(
        steps=4,
        computed_tokens=100,
        rows=7,
        batch_sizes=[2, 1, 0, 1],
        running=2,
        groups=[GroupUsage("full", 10, 7)],
        transitions={"turn": 5},
        tiers=[TierUsage("disk", num_bytes=4096, hits=3, corrupt=2)],
        loaded_tokens=48,
        stage_idle=[0.25, 0.5],
        speculation=SpeculationStats([ProposerCounts("suffix", [9, 4], [7, 2], [5, 3], [4, 1], 2)], 1.5, 6, 0.004),
    )
    supervisor = Supervisor(client, lambda settings: None, {}, SupervisorLimits(1, 1.0, 1.0, None, "same"))
    supervisor.errors.put("engine", "engine_lost", "gone")
    metrics.watch(Fleet({"m": [Replica("0", client, supervisor)]}))
    metrics.http_opened()
    metrics.http_closed("/r", "POST", 200, 0.1)
    metrics.failed("/r", "code")
    metrics.disconnected("/r")
    metrics.first_token("/r", 0.1)
    metrics.loop_delayed(0.2, 0.01)
    metrics.sample_ended("/r", Usage(7, 5, 3), Timing(0.01, 0.1, 0.2), 0.05, 0.2)
    return metrics.render().decode()


def test_engine_figures_come_from_the_last_beat() -> None:
    text = make_text()
    assert 'quire_engine_batch_tokens{engine="0"} 25.0' in text and 'quire_engine_running{engine="0"} 2.0' in text
    assert (
        'quire_engine_cache_available{engine="0",group="full"} 7.0' in text
        and 'quire_engine_stage_idle{engine="0",stage="1"} 0.5' in text
        and 'quire_engine_up{engine="0"} 1.0' in text
    )


def test_steps_are_counted_by_rows() -> None:
    text = make_text()
    for bound, count in (("1.0", 2), ("2.0", 3), ("4.0", 3), ("+Inf", 4)):
        assert f'quire_engine_batch_size_bucket{{engine="0",le="{bound}"}} {count}.0' in text, text
    assert 'quire_engine_batch_size_sum{engine="0"} 7.0' in text


def test_drafts_are_counted_by_proposer_and_position() -> None:
    text = make_text()
    for line in (
        'quire_engine_drafted_tokens_total{engine="0",position="2",proposer="suffix"} 4.0',
        'quire_engine_right_tokens_total{engine="0",position="1",proposer="suffix"} 7.0',
        'quire_engine_verified_tokens_total{engine="0",position="1",proposer="suffix"} 5.0',
        'quire_engine_accepted_tokens_total{engine="0",position="2",proposer="suffix"} 1.0',
        'quire_engine_proposer_failures_total{engine="0",proposer="suffix"} 2.0',
        'quire_engine_audits_total{engine="0"} 6.0',
        'quire_engine_speculation_ratio{engine="0"} 1.5',
        'quire_engine_audit_share{engine="0"} 0.004',
    ):
        assert line in text, line


def test_states_moves_and_failures_are_counted() -> None:
    text = make_text()
    for line in (
        'quire_engine_state{engine="0",state="starting"} 1.0',
        'quire_engine_state{engine="0",state="failed"} 0.0',
        'quire_engine_moves_total{engine="0",transition="lost"} 0.0',
        'quire_loop_moves_total{engine="0",transition="turn"} 5.0',
        'quire_errors_total{code="engine_lost",engine="0",kind="engine"} 1.0',
        'quire_resumed_total{engine="0"} 0.0',
    ):
        assert line in text, line


def test_tokens_are_counted_by_route() -> None:
    text = make_text()
    for line in ("quire_prompt_tokens_total", "quire_cached_tokens_total", "quire_output_tokens_total"):
        assert f'{line}{{route="/r"}}' in text


def test_loop_delay_is_counted_by_the_clock_and_by_the_processor() -> None:
    text = make_text()
    assert 'quire_http_loop_delay_seconds_bucket{le="0.15"} 0.0' in text
    assert 'quire_http_loop_computing_seconds_bucket{le="0.01"} 1.0' in text


def test_the_dashboard_asks_only_for_what_there_is() -> None:
    known = set(re.findall(r"^(quire_\w+)", make_text(), re.MULTILINE))
    expressions = [t["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for t in panel["targets"]]
    asked = {name for expression in expressions for name in re.findall(r"quire_\w+", expression)}
    assert asked and asked <= known, asked - known
