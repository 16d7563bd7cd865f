"""What tiers of the KV cache save of real conversations: a Mooncake trace replayed through `quire serve`.

    python bench/tiers_replay.py mooncake_conversation.jsonl [--conversations 40] [--model tiny] [--scale 32]

Conversations are the requests that share more than the first block, which is a system prompt; those of at least three
turns are taken, in the order of the trace, and their turns in the order of time. The device cache holds a tenth of
their distinct pages. The trace is replayed without tiers, with host memory, and with host memory and disk; each
server is killed (SIGKILL) halfway and started again. Lengths are divided by `--scale`, so that a hashed block of 512
tokens is one page of 16. Prints, for each half, the share of prompt tokens that came from the cache and the tokens
that the engine computed.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from quire.bench.online.arrivals import Arrival, read_trace
from quire.files.tiny_model import make_tiny_model

VARIANTS = {"none": ("--no-host-cache",), "host": (), "host and disk": ("--cache-dir", "{cache}")}
START_SECONDS = 180.0
KEY = "replay"


class ReplayServer:
    """A `quire serve` process."""

    def __init__(self, model: str, flags: list[str]):
        command = [sys.executable, "-m", "quire", "serve", model, "--port", "0", "--admin-key", KEY, *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if " at http" not in line:
            raise SystemExit(f"the server did not start: {line!r}")
        self._url = line.split(" at ")[1].strip()

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", "x-api-key": KEY}
        request = urllib.request.Request(self._url + path, data, headers)
        with urllib.request.urlopen(request, timeout=600) as reply:
            found: dict[str, Any] = json.load(reply)
        return found

    def engine(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.ask("/v1/stats")["engine"]
        return stats

    def wait_until_written(self) -> None:
        """Wait until no tier has a transfer under way, so that runs are comparable."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            time.sleep(1.5)  # two beats of an idle engine
            if not any(tier["queued"] for tier in self.engine()["tiers"]):
                return

    def kill(self) -> None:
        pid = self.ask("/admin/engine")["pid"]
        self._process.kill()
        self._process.wait()
        while Path(f"/proc/{pid}").exists():  # the engine ends with its parent
            time.sleep(0.05)


def tokens_of(arrival: Arrival, vocab_size: int) -> list[int]:
    """Return the prompt: equal blocks are equal tokens."""
    tokens: list[int] = []
    for block in arrival.blocks:
        rng = random.Random(block)
        tokens += [rng.randrange(vocab_size) for _ in range(arrival.block_len)]
    return tokens[: arrival.prompt_len]


def choose_turns(arrivals: list[Arrival], count: int) -> list[Arrival]:
    """Return the requests of the first `count` conversations of at least three turns, in the order of time."""
    turns: dict[tuple[int, ...], list[Arrival]] = {}
    for arrival in arrivals:
        if len(arrival.blocks) > 1:
            turns.setdefault(arrival.blocks[:2], []).append(arrival)
    chosen = [one for one in turns.values() if len(one) >= 3][:count]
    return sorted((arrival for one in chosen for arrival in one), key=lambda arrival: arrival.at_s)


def replay(server: ReplayServer, arrivals: list[Arrival], vocab_size: int) -> dict[str, float]:
    before, prompt, cached = server.engine()["computed_tokens"], 0, 0
    for arrival in arrivals:
        body = {"prompt": tokens_of(arrival, vocab_size), "max_tokens": min(4, arrival.output_len), "temperature": 0}
        usage = server.ask("/v1/completions", body)["usage"]
        prompt += usage["prompt_tokens"]
        cached += usage["prompt_tokens_details"]["cached_tokens"]
    server.wait_until_written()
    engine = server.engine()
    computed = engine["computed_tokens"] - before
    return {"hit_share": cached / prompt, "computed": computed, "refused": engine["refused_loads"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--scale", type=int, default=32)
    args = parser.parse_args()
    with args.trace.open() as lines:
        num_lines = sum(bool(line.strip()) for line in lines)
    arrivals = choose_turns(read_trace(args.trace, num_lines, scale_len=1 / args.scale), args.conversations)
    num_distinct = len({block for arrival in arrivals for block in arrival.blocks})
    longest = max(len(arrival.blocks) for arrival in arrivals)
    num_pages = max(num_distinct // 10, 2 * longest + 8)
    half = len(arrivals) // 2
    print(f"{len(arrivals)} requests, {num_distinct} distinct blocks, {num_pages} pages on the device, killed halfway")
    print("| tiers | hits, first half | after the restart | computed, first half | after the restart | loads refused |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, flags in VARIANTS.items():
        with tempfile.TemporaryDirectory(prefix="quire-replay-") as folder:
            place = Path(folder)
            is_tiny = args.model == "tiny"
            model = str(make_tiny_model(place / "tiny", 1 << 15)) if is_tiny else args.model
            vocab_size = 250 if is_tiny else 10_000
            knobs = ["--num-pages", str(num_pages), "--page-tokens", "16", "--host-memory", "2GiB", "--threads", "2"]
            knobs += [flag.format(cache=place / "cache") for flag in flags] + (["--random-weights"] if is_tiny else [])
            results = []
            for part in (arrivals[:half], arrivals[half:]):
                server = ReplayServer(model, knobs)
                results.append(replay(server, part, vocab_size))
                server.kill()
        cells = [f"{one['hit_share']:.1%}" for one in results] + [f"{one['computed']:,.0f}" for one in results]
        cells.append(str(sum(int(one["refused"]) for one in results)))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
