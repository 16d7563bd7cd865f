"""The result of a chaos run: counts, and whether it passed; as a table, as JSON or as Markdown."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from quire.bench.online.streamed_chat import StreamedReply
from quire.chaos.compare import MAX_TIE_GAP, Divergence, ReplyDifference
from quire.chaos.traffic import ScriptedRequest
from quire.files.progress import format_bytes

MAX_EXAMPLES = 20


@dataclass(slots=True)
class Report:
    settings: Any = None
    seconds: float = 0.0
    num_requests: int = 0
    num_tokens: int = 0
    num_refused: int = 0  # replies 429 and 503, after which the client repeated the request
    by_kind: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    failed: int = 0  # requests that ended with an error without a fault of their own
    lost: int = 0
    duplicated: int = 0
    wrong: int = 0
    leaked: int = 0
    accepted: int = 0  # drafts that became output, as the replies' usage tells
    rejected: int = 0
    shift: float = 0.0  # largest change of a token's log-probability by batch composition alone
    hostile_sent: Counter[str] = field(default_factory=Counter)  # hostile requests by kind
    hostile_wrong: Counter[str] = field(default_factory=Counter)  # wrongly answered ones, by kind and answer
    near_ties: list[Divergence] = field(default_factory=list)
    resumed: int = 0
    restarts: int = 0
    longest_pause: float = 0.0
    recovery_seconds: list[float] = field(default_factory=list)
    regroup_seconds: list[float] = field(default_factory=list)  # from a fault of a rank to steps again
    engine_peak_bytes: int = 0
    server_peak_bytes: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    log: str = ""

    def count(self, script: ScriptedRequest, seen: StreamedReply, difference: ReplyDifference) -> None:
        self.num_requests += 1
        self.by_kind[script.kind] += 1
        self.num_tokens += sum(len(choice.tokens) for choice in seen.choices.values())
        self.longest_pause = max(self.longest_pause, seen.longest_pause)
        details = (seen.usage or {}).get("completion_tokens_details") or {}
        self.accepted += details.get("accepted_prediction_tokens", 0)
        self.rejected += details.get("rejected_prediction_tokens", 0)
        self.lost += difference.lost
        self.duplicated += difference.duplicated
        self.wrong += difference.wrong
        self.near_ties += difference.near_ties
        if not difference.is_clean:
            self.problems.append(f"{script.name} ({script.kind}): {difference.detail}")

    def fail(self, script: ScriptedRequest, why: str, expected: StreamedReply) -> None:
        """Count a failed request; all tokens of its expected reply are lost."""
        self.num_requests += 1
        self.failed += 1
        self.lost += sum(len(choice.tokens) for choice in expected.choices.values())
        self.problems.append(f"{script.name} ({script.kind}) failed: {why}")

    @property
    def passed(self) -> bool:
        zero = self.failed + self.lost + self.duplicated + self.wrong + self.leaked + self.hostile_wrong.total()
        return not zero and not self.problems and self.num_requests > 0

    def rows(self) -> list[tuple[str, str]]:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.by_kind.items()))
        ties = ", ".join(f"{tie.gap:.1e}" for tie in sorted(self.near_ties, key=lambda tie: -tie.gap)[:8])
        return [
            ("requests", f"{self.num_requests} ({kinds})"),
            ("tokens", str(self.num_tokens)),
            ("drafts accepted", f"{self.accepted} of {self.accepted + self.rejected}"),
            ("faults", f"{self.faults.total()} of {len(self.faults)} kinds"),
            ("engines replaced", str(self.restarts)),
            ("requests resumed", str(self.resumed)),
            ("longest pause of a stream", f"{self.longest_pause:.1f} s"),
            ("innocent requests failed", str(self.failed)),
            ("tokens lost", str(self.lost)),
            ("tokens duplicated", str(self.duplicated)),
            ("wrong bytes", str(self.wrong)),
            ("leaked pages", str(self.leaked)),
            ("hostile requests", f"{self.hostile_sent.total()} of {len(self.hostile_sent)} kinds"),
            ("hostile requests answered wrongly", _shown(self.hostile_wrong)),
            (
                "shift by batch composition",
                f"{self.shift:.1e} nats at most (near-ties are within twice that and {MAX_TIE_GAP})",
            ),
            ("diverged at near-ties", f"{len(self.near_ties)}{f' (gaps {ties})' if ties else ''}"),
            ("recovery p50 / p99", _percentiles(self.recovery_seconds)),
            ("group rebuilt p50 / p99", _percentiles(self.regroup_seconds)),
            (
                "peak memory",
                f"engine {format_bytes(self.engine_peak_bytes)}, server {format_bytes(self.server_peak_bytes)}",
            ),
            ("time", f"{self.seconds:.0f} s"),
        ]

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "settings"}
        plain |= {"near_ties": [asdict(tie) for tie in self.near_ties], "passed": self.passed}
        recovery = self.recovery_seconds
        plain |= {"recovery_p50": percentile(recovery, 50), "recovery_p99": percentile(recovery, 99)}
        return {**plain, "settings": None if self.settings is None else asdict(self.settings)}

    def to_markdown(self, command: str) -> str:
        lines = [f"`{command}`: {'passed' if self.passed else 'FAILED'}", "", "| | |", "| --- | --- |"]
        lines += [f"| {name} | {value} |" for name, value in self.rows()]
        lines += ["", "| fault | injected |", "| --- | --- |"]
        lines += [f"| {kind} | {count} |" for kind, count in sorted(self.faults.items())]
        if self.near_ties:
            lines += ["", "| diverged | token | gap |", "| --- | --- | --- |"]
            lines += [f"| {tie.script} | {tie.token} | {tie.gap:.2e} |" for tie in self.near_ties[:200]]
        if self.problems:
            lines += ["", "Problems:", "", *(f"- {problem}" for problem in self.problems[:MAX_EXAMPLES])]
        return "\n".join(lines) + "\n"


def _percentiles(seconds: list[float]) -> str:
    return f"{percentile(seconds, 50):.2f} s / {percentile(seconds, 99):.2f} s"


def _shown(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.most_common(MAX_EXAMPLES)) or "0"


def percentile(values: list[float], percent: float) -> float:
    """Return the nearest-rank percentile of sorted values; 0 without values."""
    if not values:
        return 0.0
    return values[min(len(values) - 1, max(0, -(-len(values) * int(percent) // 100) - 1))]
