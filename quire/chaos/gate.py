"""One chaos run: a server, an undisturbed pass over all requests, the same requests under faults, and the count.

`quire chaos` calls `run_gate`. Faults that end the engine process are injected one at a time. The next one waits until
the engine is ready and no request is suspected: two losses in a row would quarantine innocent requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.bench.hostile.watch import status_bytes
from quire.bench.online.stream_client import Endpoint, RequestFailure, parse_url
from quire.bench.online.streamed_chat import StreamedReply, error_code, send_request, stream_chat
from quire.chaos.compare import NumericTolerance, SampleNoise, compare, measure_shift
from quire.chaos.faults import arm_fault, poison_seed
from quire.chaos.hostile import HostileTraffic
from quire.chaos.kinds import DEATHS, DISKS, FAILING_STEPS, POISON_CODES, RANKS, STEPS
from quire.chaos.report import Report
from quire.chaos.settings import ADMIN_KEY, CACHE, ChaosSettings, server_flags
from quire.chaos.traffic import SCHEMA, ScriptedRequest, invalid_bodies, make_scripts
from quire.files.source import resolve_model
from quire.files.tiny_model import make_tiny_model
from quire.text.loading import load_tokenizer
from quire.types import QuireError

START_SECONDS = 300.0
RANK_NAME = "quire-rank"  # that a rank's process gives itself once it has a place in a group
MAX_DAMAGED = 500  # files of the KV cache, by one fault
RECOVERY_SECONDS = 180.0  # limit for the engine to be ready again


@dataclass(slots=True)
class ChaosRun:
    settings: ChaosSettings
    show: Callable[[str], None]
    report: Report = field(default_factory=Report)
    process: subprocess.Popen[str] | None = None
    endpoint: Endpoint | None = None
    hostile_traffic: HostileTraffic | None = None
    scripts: list[ScriptedRequest] = field(default_factory=list)
    expected: dict[str, StreamedReply] = field(default_factory=dict)
    sample_noise: SampleNoise | None = None  # noise of seeded samples; None in the deterministic mode
    tolerance: NumericTolerance | None = None
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="quire-chaos-")))
    is_stopping: bool = False  # stream loops send no new requests

    # -- the server -----------------------------------------------------------------------------------------------

    @property
    def fault_socket(self) -> Path:
        return self.folder / "orders"

    async def start(self) -> None:
        settings = self.settings
        tiny = settings.model == "tiny"
        model = str(make_tiny_model(self.folder / "tiny")) if tiny else settings.model
        files = resolve_model(model, random_weights=tiny)
        tokenizer = load_tokenizer(files)
        if tokenizer is None:
            raise QuireError("no_tokenizer", "The model has no tokenizer, so it can't be served.")
        if not settings.deterministic:
            ids = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
            self.sample_noise = SampleNoise(ids, tokenizer.vocab_size if not tiny else 260)
        command = [sys.executable, "-m", "quire.chaos.server_process", str(self.fault_socket)]
        command += server_flags(settings, model, tokenizer, self.folder)
        log = open(self.folder / "server.log", "w")  # noqa: SIM115 (lives as long as the server)
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), START_SECONDS)
        if " at http" not in line:
            output = (self.folder / "server.log").read_text()[-2000:]
            raise QuireError("engine_failed", f"The server did not start: {output.strip() or line}")
        self.endpoint = parse_url(line.split(" at ")[1].strip(), ADMIN_KEY)
        self.hostile_traffic = HostileTraffic(self.endpoint)

    async def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(asyncio.to_thread(self.process.wait), 60)
            except TimeoutError:
                self.process.kill()
        if self.process is not None and self.process.returncode:
            self.report.problems.append(f"the server ended with code {self.process.returncode}")

    async def admin(self, method: str, path: str) -> dict[str, Any]:
        assert self.endpoint is not None
        bare = Endpoint(self.endpoint.host, self.endpoint.port, False, "", ADMIN_KEY)
        status, body = await send_request(bare, method, path)
        if status != 200:
            raise RequestFailure(f"HTTP {status}", body[:200].decode("utf-8", "replace"))
        answer: dict[str, Any] = json.loads(body)
        return answer

    # -- traffic --------------------------------------------------------------------------------------------------

    async def stream_patiently(self, body: dict[str, Any], **options: Any) -> StreamedReply:
        """Stream one request, and repeat it while the server answers 429 or 503."""
        assert self.endpoint is not None
        while True:
            seen = await stream_chat(self.endpoint, body, **options)
            if seen.status not in (429, 503):
                return seen
            self.report.num_refused += 1
            await asyncio.sleep(0.5)

    async def run_undisturbed(self) -> None:
        gate = asyncio.Semaphore(self.settings.streams)

        async def one(script: ScriptedRequest) -> None:
            async with gate:
                seen = await self.stream_patiently({**script.body, "speculate": False})
                self.expected[script.name] = seen
                if seen.error is not None:
                    raise QuireError("engine_failed", f"The undisturbed request {script.name} failed: {seen.error}.")

        await asyncio.gather(*(one(script) for script in self.scripts))
        for script in self.scripts:
            if script.kind == "predicted":
                text = self.expected[script.name].choices[0].text
                script.body["prediction"] = {"type": "content", "content": text or "nothing"}
        if self.sample_noise is not None:
            self.tolerance = NumericTolerance(await self.measure_shift_alone(), self.sample_noise)
            self.report.shift = self.tolerance.shift

    async def measure_shift_alone(self) -> float:
        """Return the shift of log-probabilities when each request is sent alone and without cached prefix."""
        shifts = []
        for script in self.scripts:
            alone = await self.stream_patiently({**script.body, "cache_salt": "alone", "speculate": False})
            shifts.append(measure_shift(self.expected[script.name], alone))
        return max(shifts)

    async def stream_loop(self, number: int) -> None:
        assert self.hostile_traffic is not None
        rng, attack_rng = (random.Random(f"{self.settings.seed}/{number}{what}") for what in ("", "/hostile"))
        while not self.is_stopping:
            if attack_rng.random() < self.settings.hostile:
                await self.hostile_traffic.send_one(attack_rng, self.report.hostile_sent, self.report.hostile_wrong)
            script = rng.choice(self.scripts)
            try:
                seen = await self.stream_patiently(script.body)
            except (RequestFailure, TimeoutError, OSError) as error:
                self.report.fail(script, f"{type(error).__name__}: {error}", self.expected[script.name])
                continue
            if seen.error is not None:
                self.report.fail(script, seen.error, self.expected[script.name])
                continue
            difference = await asyncio.to_thread(compare, script, self.expected[script.name], seen, self.tolerance)
            self.report.count(script, seen, difference)

    # -- faults ---------------------------------------------------------------------------------------------------

    async def inject_all(self) -> None:
        """Inject each kind in turn, spread over the run's time, in an order that the seed decides."""
        rng = random.Random(f"{self.settings.seed}/faults")
        chosen = self.settings.kinds
        total = self.settings.faults or max(len(chosen), int(self.settings.seconds / 8))
        kinds: list[str] = []
        while len(kinds) < total:
            kinds += rng.sample(chosen, len(chosen))
        started, span = time.monotonic(), self.settings.seconds * 0.95
        for number, kind in enumerate(kinds[:total]):
            pause = started + span * number / total - time.monotonic()
            if pause > 0:
                await asyncio.sleep(pause)
            self.show(f"fault {number + 1} of {total}: {kind}")
            try:
                await self.inject(kind, rng)
                self.report.faults[kind] += 1
            except (RequestFailure, TimeoutError, OSError, AssertionError) as error:
                self.report.problems.append(f"{kind}: {type(error).__name__}: {error}")
            if time.monotonic() > started + 3 * self.settings.seconds + 3 * RECOVERY_SECONDS:
                self.report.problems.append(f"only {number + 1} of {total} faults were injected before the time limit")
                break
        rest = started + self.settings.seconds - time.monotonic()
        if rest > 0:
            await asyncio.sleep(rest)

    async def inject(self, kind: str, rng: random.Random) -> None:
        if kind in DEATHS:
            await self.kill_engine(kind)
        elif kind in RANKS:
            await self.lose_rank(kind, rng)
        elif kind in STEPS:
            await self.wait_until_ready()  # several failed steps in a row would implicate a suspected request
            before = await asyncio.to_thread(arm_fault, self.fault_socket, None) or {}
            failures = await self.failed_steps()
            await self.arm(kind)
            await self.wait_until_injected(kind, before.get(kind, 0))
            if kind in FAILING_STEPS:
                await self.wait_for_failed_steps(failures)
        elif kind in DISKS:
            await self.disturb_disk(kind, rng)
        elif kind.startswith("poison_"):
            await self.send_poison(kind.removeprefix("poison_"))
        else:
            action: dict[str, Callable[[random.Random], Awaitable[None]]] = {
                "hang_up": self.hang_up,
                "slow_client": self.slow_client,
                "vanish": self.vanish,
                "hostile": self.hostile,
                "full_disk": self.full_disk,
                "cache_damaged": self.damage_cache,
            }
            await action[kind](rng)

    async def kill_engine(self, kind: str) -> None:
        await self.wait_until_ready()
        state = await self.admin("GET", "/admin/state")
        pages = await self.num_pages()
        if kind in ("kill", "stop"):
            pid = (await self.admin("GET", "/admin/engine"))["pid"]
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        else:
            await self.arm(kind)
        await self.wait_until_replaced(state["restarts"])
        left = await self.num_pages()
        # The supervisor shrinks the pool down to half of the first engine's pages.
        shrinks = kind == "starve" and pages > 0.6 * self.settings.num_pages
        assert left < pages if shrinks else left <= pages, f"the next engine has {left} pages after one of {pages}"

    async def lose_rank(self, kind: str, rng: random.Random) -> None:
        """Kill or stop one rank. Its group is rebuilt in the engine process, which goes on."""
        await self.wait_until_ready()
        engine, failures = (await self.admin("GET", "/admin/engine"))["pid"], await self.failed_steps()
        os.kill(rng.choice(rank_pids(engine)), signal.SIGKILL if kind == "rank_kill" else signal.SIGSTOP)
        lost_at = time.monotonic()
        await self.wait_for_failed_steps(failures)
        self.report.regroup_seconds = sorted([*self.report.regroup_seconds, time.monotonic() - lost_at])
        assert (await self.admin("GET", "/admin/engine"))["pid"] == engine, "the engine process was replaced"
        await self.wait_until_ready()

    async def num_pages(self) -> int:
        return int((await self.admin("GET", "/admin/engine"))["memory"]["groups"][0]["units"])

    async def arm(self, kind: str) -> None:
        """Arm a fault in the engine process; wait for the next process if there is none."""
        async with asyncio.timeout(RECOVERY_SECONDS):
            while await asyncio.to_thread(arm_fault, self.fault_socket, kind) is None:
                await asyncio.sleep(0.1)

    async def wait_until_injected(self, kind: str, before: int) -> None:
        """Wait until the fault has happened once more than `before`."""
        async with asyncio.timeout(RECOVERY_SECONDS):
            while (await asyncio.to_thread(arm_fault, self.fault_socket, None) or {}).get(kind, 0) == before:
                await asyncio.sleep(0.05)

    async def failed_steps(self) -> int:
        """Return how many steps have failed in this engine, as of its last beat."""
        return int((await self.admin("GET", "/admin/state"))["loop"]["transitions"].get("fail", 0))

    async def wait_for_failed_steps(self, failures: int) -> None:
        """Wait for a beat with one more failed step. Until then the state does not show the engine's suspects."""
        async with asyncio.timeout(RECOVERY_SECONDS):
            while await self.failed_steps() <= failures:
                await asyncio.sleep(0.05)

    async def wait_until_replaced(self, restarts: int) -> None:
        """Wait for one more restart than `restarts`, and until the engine is ready."""
        async with asyncio.timeout(RECOVERY_SECONDS):
            while (await self.admin("GET", "/admin/state"))["restarts"] <= restarts:
                await asyncio.sleep(0.1)
        await self.wait_until_ready()

    async def wait_until_ready(self) -> None:
        """Wait until the engine is ready and no request is suspected."""
        async with asyncio.timeout(RECOVERY_SECONDS):
            while True:
                state = await self.admin("GET", "/admin/state")
                engine = (await self.admin("GET", "/v1/stats"))["engine"]
                if state["process"]["state"] == "ready" and not state["suspects"] + engine["suspects"]:
                    return
                await asyncio.sleep(0.1)

    async def send_poison(self, name: str) -> None:
        """Send a poisoned request, which must end alone, with its own error."""
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "poison"}],
            "max_tokens": 8,
            "stream": True,
            "temperature": 0.7,
        }
        if name == "detokenize":  # a reply that ends with its first token has no text to detokenize
            body |= {"skip_special_tokens": False, "ignore_eos": True}
        else:
            body["seed"] = poison_seed(name)
        if name == "mask":
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
        if name == "die":
            await self.wait_until_ready()
        seen = await self.stream_patiently(body)
        assert seen.error == POISON_CODES[name], f"ended with {seen.error!r} instead of {POISON_CODES[name]!r}"
        await self.wait_until_ready()

    async def hang_up(self, rng: random.Random) -> None:
        for _ in range(3):
            await self.stream_patiently(rng.choice(self.scripts).body, leave_after=rng.randrange(1, 6))

    async def slow_client(self, rng: random.Random) -> None:
        script = rng.choice(self.scripts)
        seen = await self.stream_patiently(script.body, slow=0.2)
        assert seen.error is None, f"ended with {seen.error!r}"
        self.report.count(script, seen, compare(script, self.expected[script.name], seen, self.tolerance))

    async def vanish(self, rng: random.Random) -> None:
        """Connect, announce a body, and disconnect after several lengths of it."""
        assert self.endpoint is not None
        whole = self.endpoint.head("POST", "/chat/completions", 100) + b'{"messages": ['
        for cut in (3, 40, len(whole)):
            _, writer = await asyncio.open_connection(self.endpoint.host, self.endpoint.port)
            writer.write(whole[:cut])
            await writer.drain()
            writer.transport.abort()

    async def hostile(self, rng: random.Random) -> None:
        assert self.endpoint is not None
        for body in invalid_bodies(rng):
            status, answer = await send_request(
                self.endpoint, "POST", "/chat/completions", body, timeout=RECOVERY_SECONDS
            )
            assert 400 <= status < 500, f"{body[:80]!r} was answered with {status} {error_code(answer)}"

    async def full_disk(self, rng: random.Random) -> None:
        """Let file writes of the server fail for one request: storing a response may fail, streams may not."""
        assert self.endpoint is not None and self.process is not None
        await self.wait_until_ready()
        before = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (512, before[1]))
        try:
            body = json.dumps({"input": "hello", "max_output_tokens": 16, "store": True}).encode()
            status, answer = await send_request(self.endpoint, "POST", "/responses", body, timeout=RECOVERY_SECONDS)
            assert status == 200 or error_code(answer) == "store_failed", f"{status} {answer[:200]!r}"
        finally:
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, before)

    async def disturb_disk(self, kind: str, rng: random.Random) -> None:
        """Arm a fault of the cache's disk and send a fresh prompt, whose blocks have to be written."""
        await self.wait_until_ready()
        before = (await asyncio.to_thread(arm_fault, self.fault_socket, None) or {}).get(kind, 0)
        await self.arm(kind)
        words = " ".join(str(rng.randrange(10**6)) for _ in range(40))
        body = {"messages": [{"role": "user", "content": words}], "max_tokens": 2, "stream": True}
        seen = await self.stream_patiently(body)
        assert seen.error is None, f"ended with {seen.error!r}"
        await self.wait_until_injected(kind, before)

    async def damage_cache(self, rng: random.Random) -> None:
        """Damage, cut, swap and delete files of the KV cache, and have the next engine start on them."""
        paths = sorted((self.folder / CACHE).glob("??/*"))
        for path in rng.sample(paths, min(len(paths), MAX_DAMAGED)):
            with suppress(OSError):  # the engine may delete it meanwhile
                data = bytearray(path.read_bytes())
                match rng.randrange(4):
                    case 0:
                        path.write_bytes(data[: rng.randrange(len(data))])
                    case 1:
                        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                        path.write_bytes(data)
                    case 2:
                        path.write_bytes(rng.choice(paths).read_bytes())
                    case _:
                        path.unlink()
        await self.kill_engine("kill")

    # -- the end --------------------------------------------------------------------------------------------------

    async def check_at_end(self) -> None:
        """Wait until the server is idle, check for leaks, and add the server's counters to the report."""
        async with asyncio.timeout(RECOVERY_SECONDS):
            while True:
                engine = (await self.admin("GET", "/v1/stats"))["engine"]
                if not engine["running"] + engine["waiting"] + engine["held"] + engine["loading"]:
                    break
                await asyncio.sleep(0.2)
        checked = await self.admin("POST", "/admin/check")
        state = await self.admin("GET", "/admin/state")
        self.report.leaked = checked["leaked_units"]
        if not checked["ok"]:
            self.report.problems.append(f"the engine's check failed: {checked['problem']}")
        self.report.resumed = state["resumed_requests"]
        self.report.restarts = state["restarts"]
        self.report.recovery_seconds = sorted(state["recovery_seconds"])
        self.report.engine_peak_bytes = state["peak_memory"]
        self.report.server_peak_bytes = status_bytes(self.process.pid, "VmHWM") if self.process is not None else 0
        self.report.errors = Counter((await self.admin("GET", "/admin/errors"))["counts"])


def rank_pids(engine: int) -> list[int]:
    """Return the processes of an engine's ranks, without the spare one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == engine and (folder / "comm").read_text().strip() == RANK_NAME:
                found.append(int(folder.name))
    return sorted(found)


async def run_gate(settings: ChaosSettings, show: Callable[[str], None]) -> Report:
    run = ChaosRun(settings, show)
    report = run.report
    report.settings = settings
    try:
        show(f"starting a server on {settings.model}")
        await run.start()
        run.scripts = make_scripts(settings.seed, settings.num_scripts, settings.max_tokens, 60)
        show(f"{len(run.scripts)} requests undisturbed")
        await run.run_undisturbed()
        started = time.monotonic()
        streams = [asyncio.create_task(run.stream_loop(number)) for number in range(settings.streams)]
        try:
            await run.inject_all()
        finally:
            run.is_stopping = True
            results = await asyncio.gather(*streams, return_exceptions=True)
        report.seconds = time.monotonic() - started
        report.problems += [f"a stream loop failed: {r!r}" for r in results if isinstance(r, BaseException)]
        await run.check_at_end()
    except (RequestFailure, TimeoutError) as error:
        report.problems.append(f"the run was aborted: {type(error).__name__} {error} {getattr(error, 'detail', '')}")
    finally:
        await run.stop()
        report.log = str(run.folder / "server.log")
    return report
