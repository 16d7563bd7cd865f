"""Speculation on a GPU against none, two engines turn about: `python -m tests.gpu.speculation_figures`.

On random weights: one stream with a prediction of which nine tenths are right, one greedy stream with suffix matching
(random weights repeat themselves), one stream with nothing to find, and `ragged256`. Prints rates, acceptance, steps
replayed from graphs, and how many streams differ: near-ties of random weights turn where the number of rows changes.
`--tiny` tries the script itself on any machine.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.bench.workloads import draw_workload

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "eos_token_id": 2,
}


def nearly(tokens: Sequence[int], rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice(tokens) if rng.random() < 0.1 else token for token in tokens)


def graphs_of(llm: LLM) -> tuple[int, int]:
    """Steps with drafts that were replayed, and those that ran eagerly although a graph's size fits them."""
    graphs = llm.engine.workers.inner._verify  # type: ignore[attr-defined]
    return (0, 0) if graphs is None else (graphs.num_replayed, graphs.num_eager)


def compare(name: str, sides: dict[str, LLM], prompts: Any, params: dict[str, Any], turns: int) -> None:
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    made: dict[str, Any] = {}
    before = graphs_of(sides["on"])
    for turn in range(turns):
        for side in ("off", "on") if turn % 2 else ("on", "off"):
            begin = time.perf_counter()
            made[side] = sides[side].generate(prompts, params[side], salt=f"{name}/{turn}".encode())
            seconds[side].append(time.perf_counter() - begin)
    after = graphs_of(sides["on"])
    tokens = sum(len(output.token_ids) for output in made["off"])
    usage = [output.usage for output in made["on"]]
    pairs = list(zip(made["off"], made["on"], strict=True))
    figures = {
        "work": name,
        "off_tps": round(tokens / min(seconds["off"]), 1),
        "on_tps": round(tokens / min(seconds["on"]), 1),
        "ratio": round(sum(seconds["off"]) / sum(seconds["on"]), 3),
        "turns": [round(a / b, 3) for a, b in zip(seconds["off"], seconds["on"], strict=True)],
        "accepted": sum(one.accepted_prediction_tokens for one in usage),
        "rejected": sum(one.rejected_prediction_tokens for one in usage),
        "replayed": after[0] - before[0],
        "eager": after[1] - before[1],
        "streams_that_differ": sum(a.token_ids != b.token_ids for a, b in pairs),
    }
    print(json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--deterministic", action="store_true", help="bits that do not depend on a step's rows")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--skip-ragged", action="store_true")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="quire-figures-"))
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(TINY if args.tiny else {})}))
    how: dict[str, Any] = {"random_weights": True, "prefix_cache": False, "host_cache": False, "max_model_len": 2304}
    if not args.tiny:
        how |= {"max_batch_tokens": 16384, "cache_memory": 36 << 30, "deterministic": args.deterministic}
    began = time.perf_counter()
    with ExitStack() as held:
        sides = {
            side: held.enter_context(LLM(str(folder), speculate=speculate, **how))
            for side, speculate in (("off", "off"), ("on", "auto"))
        }
        for llm in sides.values():
            llm.prepare()
        print(f"two engines were ready after {time.perf_counter() - began:.0f} s", flush=True)
        rng = random.Random(1)
        vocab = 500 if args.tiny else 10_000
        prompt = [[rng.randrange(3, vocab) for _ in range(256)]]
        plain = SamplingParams(temperature=0.6, seed=5, max_tokens=256, ignore_eos=True)
        (answer,) = sides["off"].generate(prompt, plain)
        predicted = replace(plain, prediction_ids=nearly(answer.token_ids, rng))
        compare("single, prediction", sides, prompt, {"off": plain, "on": predicted}, args.turns)
        greedy = replace(plain, temperature=0.0)
        compare("single, greedy, suffix", sides, prompt, {"off": greedy, "on": greedy}, args.turns)
        compare("single, nothing to find", sides, prompt, {"off": plain, "on": plain}, args.turns)
        if not args.skip_ragged:
            jobs = draw_workload("ragged256", 0)
            if args.tiny:
                jobs = [
                    replace(job, tokens=[t % 500 for t in job.tokens[:40]], params=replace(job.params, max_tokens=20))
                    for job in jobs[:20]
                ]
            params = [job.params for job in jobs]
            tokens = [job.tokens for job in jobs]
            compare("ragged256", sides, tokens, {"off": params, "on": params}, max(args.turns - 1, 1))


if __name__ == "__main__":
    main()
