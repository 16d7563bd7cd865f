"""`quire bench hostile`: a server under every known kind of hostile input, beside streams that must continue.

Starts `quire serve`, records each stream's answer undisturbed, then runs each kind of attack alone and all kinds
together. The report holds for each phase: the event loop's delay, the memory of the HTTP process and of its text
workers, the answers to the attacks, and the tokens that the streams lost.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from quire.bench.hostile.attacks import KINDS, Tally
from quire.bench.hostile.requests import Target, costly_template
from quire.bench.hostile.sender import AttackOrder
from quire.bench.hostile.streams import Streams
from quire.bench.hostile.watch import MemoryWatch, quantile, read_histograms, subtract
from quire.bench.offline import load_average
from quire.bench.online.stream_client import ClientConnection, Endpoint, parse_url
from quire.bench.stats import Bar, Report
from quire.files.source import resolve_model
from quire.files.tiny_model import make_tiny_model
from quire.text.loading import load_tokenizer
from quire.text.template import template_source
from quire.types import QuireError

KEY = "sk-hostile"
START_SECONDS, STOP_SECONDS, ORDER_SECONDS, METRICS_SECONDS = 300.0, 60.0, 600.0, 180.0
SETTLE_SECONDS = 1.0  # between the end of an attack and the last memory reading
MAX_DELAY_MS = 50.0
# Limit on the growth of the HTTP process. It holds at most 256 MiB of bodies (`HeldBodies`), each a second time as the
# message to its worker while the worker reads it; connections and replies take the rest.
MAX_GROWTH = 640 << 20
MAX_WORKERS = 2 * (1 << 30) + (1 << 29)  # two workers, each limited to 1 GiB above its size after set-up
STOP_BYTES = 8 << 30  # the benchmark stops above this, to protect the machine
ALL, CALM = "all at once", "no attack"


@dataclass(frozen=True, slots=True)
class HostileSettings:
    model: str = "smollm2"  # `tiny`: a generated model with random weights
    kinds: tuple[str, ...] = KINDS
    seconds: float = 8.0  # per phase
    streams: int = 16
    max_tokens: int = 48
    threads: int = 1  # of the engine, which leaves a second core to the HTTP process
    rounds: int = 200  # maximum per attack
    flood_bytes: int = 40 << 20  # per connection
    connections: int = 400
    small: bool = False
    max_growth: int = MAX_GROWTH


def bench_hostile(settings: HostileSettings, say: Callable[[str], None]) -> Report:
    return asyncio.run(_bench(settings, say))


async def _bench(settings: HostileSettings, say: Callable[[str], None]) -> Report:
    busy = load_average()
    with tempfile.TemporaryDirectory(prefix="quire-hostile-") as folder:
        async with _server(settings, Path(folder)) as (process, endpoint), _sender() as sender:
            streams = Streams(endpoint, settings.streams, settings.max_tokens)
            await streams.learn()
            watch = MemoryWatch(process.pid, STOP_BYTES)
            run = _AttackRun(settings, endpoint, sender, streams, watch, say)
            async with streams.running():
                phases = [await run.phase(CALM, ())]
                phases += [await run.phase(kind, (kind,)) for kind in settings.kinds]
                phases.append(await run.phase(ALL, settings.kinds))
            if process.returncode is not None:
                raise QuireError("engine_failed", f"The server ended with code {process.returncode} under attack.")
    bars = _bars(phases, settings)
    return {
        "benchmark": "hostile",
        "settings": asdict(settings),
        "num_cores": os.cpu_count(),
        "load_before": busy,
        "load_after": load_average(),
        "phases": phases,
        "bars": [bar.to_report() for bar in bars],
        "pass": all(bar.passed for bar in bars),
    }


@dataclass(slots=True)
class _AttackRun:
    settings: HostileSettings
    endpoint: Endpoint
    sender: asyncio.subprocess.Process
    streams: Streams
    watch: MemoryWatch
    say: Callable[[str], None]

    async def phase(self, name: str, kinds: Sequence[str]) -> Report:
        self.say(f"{name}, {self.settings.seconds:g} s or until each request has been sent once")
        before = read_histograms(await self._metrics())
        self.streams.reset()
        self.watch.begin()
        began = asyncio.get_running_loop().time()
        tallies = await self._attack(kinds) if kinds else {}
        if not kinds:
            await asyncio.sleep(self.settings.seconds)
        await asyncio.sleep(SETTLE_SECONDS)
        after = read_histograms(await self._metrics())
        memory = await self.watch.end()
        took = asyncio.get_running_loop().time() - began
        delays = {name: subtract(after[name], before[name]) for name in after}
        total = Tally()
        for tally in tallies.values():
            total.add(tally)
        return {
            "name": name,
            "seconds": took,
            "sent_bytes": total.sent_bytes,
            "answers": total.answers,
            "wrong_answers": total.wrong,
            "delay_s": _shares(delays.get("quire_http_loop_delay", [])),
            "computing_s": _shares(delays.get("quire_http_loop_computing", [])),
            "memory": asdict(memory),
            "streams": asdict(self.streams.counts),
        }

    async def _metrics(self) -> str:
        bare = Endpoint(self.endpoint.host, self.endpoint.port, False, "", KEY)
        async with asyncio.timeout(METRICS_SECONDS), ClientConnection(bare) as connection:
            _, headers = await connection.request("GET", "/metrics", b"")
            return (await connection.start_of_body(headers, 1 << 22)).decode()

    async def _attack(self, kinds: Sequence[str]) -> dict[str, Tally]:
        settings = self.settings
        target = Target(self.endpoint.host, self.endpoint.port, KEY)
        order = AttackOrder(
            target,
            tuple(kinds),
            settings.seconds,
            settings.rounds,
            settings.flood_bytes,
            settings.connections,
            settings.small,
        )
        assert self.sender.stdin is not None and self.sender.stdout is not None
        self.sender.stdin.write(msgspec.json.encode(order) + b"\n")
        answer = asyncio.create_task(self.sender.stdout.readline())
        too_much = asyncio.create_task(self.watch.is_too_much.wait())
        done, _ = await asyncio.wait((answer, too_much), timeout=ORDER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        too_much.cancel()
        if answer not in done or not answer.result():
            held, attack = self.watch.memory.peak, ", ".join(kinds)
            what = f"The server holds {held >> 20} MiB under {attack}, or the attacking process ended."
            raise QuireError("hostile_input", what, "Run this attack alone with --kinds and smaller --flood-mb.")
        return msgspec.json.decode(answer.result(), type=dict[str, Tally])


def _shares(histogram: list[tuple[float, float]]) -> Report:
    return {name: quantile(histogram, share) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}


def _bars(phases: Sequence[Report], settings: HostileSettings) -> list[Bar]:
    calm, together = phases[0], phases[-1]
    alone = phases[1:-1]

    def delay(phase: Report, clock: str = "delay_s") -> float:
        return 1000 * (phase[clock]["p99"] or 0.0)

    growth = max(phase["memory"]["peak"] for phase in phases) - calm["memory"]["before"]
    workers = max(phase["memory"]["workers_peak"] for phase in phases)
    return [
        Bar("loop delay p99, all at once, ms", delay(together), MAX_DELAY_MS, "at most"),
        Bar("loop delay p99, worst attack alone, ms", max(map(delay, alone)), MAX_DELAY_MS, "at most"),
        Bar("of it computing p99, all at once, ms", delay(together, "computing_s"), MAX_DELAY_MS, "at most"),
        Bar("HTTP process grew by, MiB", growth / 2**20, settings.max_growth / 2**20, "at most"),
        Bar("text workers hold, MiB", workers / 2**20, MAX_WORKERS / 2**20, "at most"),
        Bar("stream tokens lost", _sum(phases, "lost"), 0, "at most"),
        Bar("streams with wrong tokens", _sum(phases, "wrong"), 0, "at most"),
        Bar("tokens streamed while all attacks run", together["streams"]["tokens"], 1, "at least"),
        Bar("hostile requests answered wrongly", sum(sum(p["wrong_answers"].values()) for p in phases), 0, "at most"),
    ]


def _sum(phases: Sequence[Report], count: str) -> int:
    return sum(phase["streams"][count] for phase in phases)


# ---------------------------------------------------------------------------------------------------------------------
# Processes


@asynccontextmanager
async def _server(
    settings: HostileSettings, folder: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Endpoint]]:
    tiny = settings.model == "tiny"
    model = str(make_tiny_model(folder / "tiny")) if tiny else settings.model
    tokenizer = load_tokenizer(resolve_model(model, random_weights=tiny))
    if tokenizer is None:
        raise QuireError("no_tokenizer", "The model has no tokenizer, so it can't be served.")
    template = folder / "template.jinja"
    template.write_text(costly_template(template_source(tokenizer, None)))
    flags = [
        "--port",
        "0",
        "--api-key",
        KEY,
        "--threads",
        str(settings.threads),
        "--max-model-len",
        "1024",
        "--max-rows",
        "32",
        "--cache-memory",
        "200MiB",
        "--host-memory",
        "0",
        "--log-level",
        "error",
        "--chat-template",
        str(template),
        "--deterministic",
        *(["--random-weights"] if tiny else []),
    ]
    with (folder / "server.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "quire",
            "serve",
            model,
            *flags,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
        try:
            assert process.stdout is not None
            line = (await asyncio.wait_for(process.stdout.readline(), START_SECONDS)).decode()
            if " at http" not in line:
                words = (folder / "server.log").read_text()[-2000:]
                raise QuireError("engine_failed", f"The server did not start: {words.strip() or line}")
            yield process, parse_url(line.split(" at ")[1].strip(), KEY)
        finally:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Stop the server: SIGTERM twice, since the second one skips waiting for open replies, then SIGKILL."""
    for _ in range(2):
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
    try:
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    except TimeoutError:
        process.kill()


@asynccontextmanager
async def _sender() -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "quire.bench.hostile.sender",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 22,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
